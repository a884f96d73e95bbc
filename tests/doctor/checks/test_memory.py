"""Memory that will be full is named with the date and the culprit, and no more workers are advised meanwhile."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from stoker.doctor.diagnosing import diagnosis_of
from stoker.doctor.screen import doctor_text
from stoker.profile.memory import Point, growth_rate, thinned
from stoker.profile.observed import Held, HostFacts, LoaderShape, MemoryGrowth, Observed
from tests.doctor.checks.observations import BATCH, starved

MB = 1_000_000
LIST = Held("self.seen", 4, 772, in_worker=True)
CACHE = Held("self.cache", 100, 1100, in_worker=True, keyed=True)
GRAPH = Held("losses", 8, 640, in_worker=False, keeps_graph=True)


def series(*sizes: float, every_s: float = 0.5) -> list[Point]:
    return [(number * every_s, size) for number, size in enumerate(sizes)]


def test_steady_growth_has_its_rate_though_some_points_jump() -> None:
    points = series(*(100 * MB + number * 5 * MB for number in range(30)))
    points[13] = points[13][0], 900 * MB
    assert growth_rate(points) == pytest.approx(10 * MB, rel=0.05)


@pytest.mark.parametrize(
    "sizes",
    [
        [min(400, 100 + 40 * number) * MB for number in range(30)],
        [(100 + 200 * (number >= 20)) * MB for number in range(30)],
        [100 * MB + number * 100_000 for number in range(30)],
        [(900 - 10 * number) * MB for number in range(30)],
    ],
    ids=["a cache that is full", "one jump", "a little", "shrinks"],
)
def test_what_does_not_grow_all_the_time_has_none(sizes: list[float]) -> None:
    assert growth_rate(series(*sizes)) == 0.0


def test_a_few_points_say_nothing_and_a_long_series_is_kept_short_with_both_ends() -> None:
    assert growth_rate(series(*(number * 50 * MB for number in range(5)))) is None
    points: list[Point] = []
    for number in range(1000):
        points = thinned([*points, (float(number), float(number))])
    assert len(points) <= 64
    assert (points[0], points[-1]) == ((0.0, 0.0), (999.0, 999.0))


def grows(*held: Held, workers: int = 2, available: float = 20e9, persistent: bool = True, **changes: Any) -> Observed:
    """Workers of a starved loop on 8 cores that grow by 1 MB a second each; more of them would help."""
    shape = LoaderShape(workers=workers, prefetch=2, engine="process", persistent=persistent, batch_size=BATCH)
    memory = MemoryGrowth(60.0, worker_bytes_per_second=1e6, loop_bytes_per_second=0.0, worker_grown_bytes=60e6)
    return starved(
        cpu=0.4,
        workers=workers,
        loader=replace(shape, samples=100_000),
        host=HostFacts(cpus=8, available_bytes=int(available)),
        memory=replace(memory, held=held, **changes),
    )


def found_in(observed: Observed) -> dict[str, str]:
    return {finding.name: finding.seen for finding in diagnosis_of(observed).findings}


def test_a_list_in_the_data_set_is_named_with_the_time_when_memory_is_full() -> None:
    assert "num_workers" in doctor_text(diagnosis_of(replace(grows(LIST), memory=None)))  # otherwise more are advised
    found = diagnosis_of(grows(LIST))
    assert found.verdict == "memory-grows"
    assert found.findings[0].seen == (
        "each of 2 workers grows by 60 MB a minute, at 7.2 GB an hour in all: 20 GB of memory are left, and full in "
        "2.8 h; `self.seen` went from 4 to 772 entries in each worker"
    )
    assert "`self.seen`" in found.findings[0].fix
    assert all(prediction.id != "workers" for prediction in found.predictions)
    assert "num_workers" not in doctor_text(found)


def test_a_cache_counts_only_if_all_samples_together_do_not_fit() -> None:
    # An entry takes 60 kB: 98,900 more of them in each of two workers are 12 GB.
    assert "memory-grows" not in found_in(grows(CACHE))
    assert "`self.cache` went from 100 to 1,100 entries" in found_in(grows(CACHE, available=10e9))["memory-grows"]
    unbounded = replace(CACHE, now=200_000)
    assert "memory-grows" in found_in(grows(unbounded))


def test_workers_that_end_with_the_epoch_before_memory_is_full_are_no_danger() -> None:
    # An epoch takes 2,500 s; 20 GB last for 10,000.
    assert "memory-grows" not in found_in(grows(LIST, persistent=False))
    assert "memory-grows" in found_in(grows(LIST, persistent=False, available=4e9))


def test_losses_that_are_kept_with_their_graph_are_named() -> None:
    found = diagnosis_of(grows(GRAPH, worker_bytes_per_second=0.0, loop_bytes_per_second=8e6))
    finding = next(each for each in found.findings if each.name == "memory-grows")
    assert finding.seen == (
        "the training process grows, at 28.8 GB an hour in all: 20 GB of memory are left, and full in 42 min; "
        "`losses` keeps the autograd graph of every step (8, then 640)"
    )
    assert finding.fix == "keep loss.item() or loss.detach() in `losses`, not the loss itself"


def test_growth_that_lasts_for_days_or_that_nothing_explains_for_a_minute_is_no_finding() -> None:
    assert "memory-grows" not in found_in(grows(LIST, available=500e9))
    assert "memory-grows" not in found_in(replace(grows(LIST), host=HostFacts(cpus=8)))
    assert "memory-grows" not in found_in(grows(watched_s=20.0))
    assert "memory-grows" in found_in(grows(watched_s=90.0))
    assert "memory-grows" in found_in(grows(LIST, watched_s=20.0))
