"""The guard reduces the prefetch step by step as memory runs low, reports it, and is slow to raise it again."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from stoker.loader.loader import LoaderOptions
from stoker.profile.memory import MemoryState
from stoker.tasks.images.decode.calibration import choose_decoder
from stoker.tasks.images.image_loader import ImageLoader
from stoker.tasks.images.layouts.opening import open_index
from stoker.tasks.images.layouts.sample_index import all_samples
from stoker.tasks.images.memory_trial import generate_images, plan_over
from stoker.train.prefetch_guard import GROW_AFTER_S, SETTLE_S, PrefetchGuard, in_flight_levels

GB = 1_000_000_000


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return generate_images(tmp_path_factory.mktemp("guard") / "images")


def open_loader(images: Path, workers: int, prefetch: int) -> ImageLoader:
    samples = all_samples(open_index(str(images), "", index_dir=images.parent / "index"))
    decoding, _ = choose_decoder("pillow", list, 16)
    options = LoaderOptions(engine="thread", workers=workers, prefetch=prefetch)
    return ImageLoader(plan_over(samples, decoding, 16, 4), options)


@pytest.fixture
def loader(images: Path) -> Iterator[ImageLoader]:
    loader = open_loader(images, workers=3, prefetch=4)
    yield loader
    loader.close()


class Host:
    """A 62 GB host whose free memory and clock are set by the test."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.available = 40.0
        self.stalled: float | None = None
        self.reads = 0
        self.said: list[str] = []
        self.guard = PrefetchGuard(self.said.append, read=self.read, clock=lambda: self.now_s)

    def read(self) -> MemoryState:
        self.reads += 1
        return MemoryState(int(self.available * GB), 62 * GB, self.stalled)

    def pass_time(self, seconds: float, loader: ImageLoader) -> None:
        for _ in range(int(seconds)):
            self.now_s += 1
            self.guard.check(loader)


def test_nothing_happens_while_there_is_memory(loader: ImageLoader) -> None:
    host = Host()
    host.pass_time(60, loader)
    assert loader.in_flight == 12
    assert host.said == []


def test_the_prefetch_shrinks_step_by_step_with_a_message(loader: ImageLoader) -> None:
    host = Host()
    host.available = 5.0
    host.pass_time(1, loader)
    assert loader.in_flight == 6
    assert host.said == ["memory is down to 5 GB of 62 GB: prefetch_factor 4 -> 2 (12 -> 6 batches in flight)"]
    host.pass_time(SETTLE_S - 1, loader)
    assert loader.in_flight == 6, "what was in flight has not been taken yet"
    host.pass_time(1, loader)
    assert loader.in_flight == 3
    host.pass_time(60, loader)
    assert loader.in_flight == 1
    assert host.said[-1] == "memory is down to 5 GB of 62 GB: 3 -> 1 batches in flight"
    assert len(host.said) == 3


def test_with_almost_no_memory_left_it_drops_to_one_at_once(loader: ImageLoader) -> None:
    host = Host()
    host.available = 1.0
    host.pass_time(1, loader)
    assert loader.in_flight == 1
    assert len(host.said) == 1


def test_a_large_host_with_gigabytes_left_is_not_short(loader: ImageLoader) -> None:
    said: list[str] = []
    guard = PrefetchGuard(said.append, read=lambda: MemoryState(20 * GB, 2000 * GB))
    guard.check(loader)
    assert said == []


@pytest.mark.parametrize(("available", "in_flight"), [(10.0, 6), (40.0, 12)])
def test_memory_pressure_counts_only_when_little_is_left(loader: ImageLoader, available: float, in_flight: int) -> None:
    host = Host()
    host.available, host.stalled = available, 0.3
    host.pass_time(1, loader)
    assert loader.in_flight == in_flight


def test_it_grows_again_after_a_long_quiet_period_but_only_once(loader: ImageLoader) -> None:
    host = Host()
    host.available = 5.0
    host.pass_time(1, loader)
    host.available = 40.0
    host.pass_time(GROW_AFTER_S, loader)
    assert loader.in_flight == 6
    host.pass_time(1, loader)
    assert loader.in_flight == 12
    assert host.said[-1] == "40 GB of memory are free again: prefetch_factor 2 -> 4 (6 -> 12 batches in flight)"
    host.available = 5.0
    host.pass_time(1, loader)
    host.available = 40.0
    host.pass_time(3 * GROW_AFTER_S, loader)
    assert loader.in_flight == 6
    assert len(host.said) == 3


def test_another_loader_gets_the_same_limit(loader: ImageLoader, images: Path) -> None:
    host = Host()
    host.available = 5.0
    host.pass_time(1, loader)
    other = open_loader(images, workers=2, prefetch=2)
    try:
        host.guard.check(other)
        assert other.in_flight == 2
    finally:
        other.close()
    assert len(host.said) == 1


def test_memory_is_checked_once_a_second_and_not_at_every_step(loader: ImageLoader) -> None:
    host = Host()
    for _ in range(10_000):
        host.now_s += 0.001
        host.guard.check(loader)
    assert host.reads in (10, 11)


def test_a_system_without_memory_figures_is_left_alone(loader: ImageLoader) -> None:
    said: list[str] = []
    PrefetchGuard(said.append, read=lambda: None).check(loader)
    assert (loader.in_flight, said) == (12, [])


@pytest.mark.parametrize(
    ("workers", "prefetch", "levels"),
    [(12, 3, [36, 12, 6, 3, 1]), (2, 8, [16, 8, 4, 2, 1]), (1, 2, [2, 1]), (0, 2, [1])],
)
def test_steps_halve_the_prefetch_factor_first(workers: int, prefetch: int, levels: list[int]) -> None:
    assert in_flight_levels(workers, max(1, workers * prefetch)) == levels
