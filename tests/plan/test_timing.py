"""How long a job takes: the slowest part sets the pace."""

from __future__ import annotations

import json
import statistics
from dataclasses import replace
from typing import Any

import pytest

from stoker.config import load_config
from stoker.core.errors import UsageError
from stoker.plan.budget import Hardware, PlannedRun, check_counts
from stoker.plan.records import Rate, TimeBudget
from stoker.plan.timing import (
    cores_worth,
    loader_rate,
    read_storage,
    time_budget,
    time_findings,
    torch_loader_rate,
)
from stoker.profile.mounts import LocalDisk
from stoker.tasks.images.plan_facts import FASTER_THAN_TORCH, FASTER_THAN_TORCH_RANGE, loader_figures
from stoker.tasks.plan_facts import DataFacts
from tests.conftest import PROJECT

CONFIG = load_config(None, ["model=test_resnet", "batch_size=128", "epochs=100", "num_workers=4"]).config
DATA = DataFacts(1, 1, 1_000_000, 100_000.0, figures=replace(loader_figures(224), packing_speedup=1.5))


def job(
    config: dict[str, object] | None = None, *, gpus: int = 1, nodes: int = 1, cpus: int = 8, **more: Any
) -> PlannedRun:
    """A million images of 100 kB on a machine with 8 cores."""
    return PlannedRun(CONFIG.model_copy(update=config or {}), Hardware(gpus, nodes, cpus, **more), DATA)


def budget(planned: PlannedRun | None = None, **rates: float) -> TimeBudget:
    return time_budget({name: Rate(value, "made up") for name, value in rates.items()}, planned or job())


def test_the_slowest_part_sets_the_pace_and_is_named() -> None:
    two_nodes = job(nodes=2, price_per_hour=1.5)
    time = budget(two_nodes, accelerator=1000.0, loader=250.0, storage=512.0)
    assert (time.bound_by, time.images_per_second) == ("loader", 250.0)
    assert time.step_s == pytest.approx(256 / 250)
    assert two_nodes.steps_per_epoch == 1_000_000 // 256
    assert time.epoch_s == pytest.approx(two_nodes.steps_per_epoch * 256 / 250)
    assert time.total_s == pytest.approx(100 * time.epoch_s)
    assert time.cost == pytest.approx(time.total_s / 3600 * 1.5 * 2)


def test_unknown_times_are_not_reported() -> None:
    time = budget(job(price_per_hour=2.0))
    assert time.images_per_second is time.bound_by is time.cost is time.total_s is None
    assert time_findings(time, job(), "x.yaml") == []


def findings(time: TimeBudget) -> dict[str, str]:
    found = time_findings(time, job(), "x.yaml")
    assert all(finding.speedup is None or finding.speedup.low <= finding.speedup.high for finding in found)
    return {finding.name: finding.seen for finding in found}


def test_the_part_that_is_slower_than_the_accelerator_is_named_with_what_it_needs() -> None:
    assert list(findings(budget(accelerator=1000.0, loader=1200.0, storage=5000.0))) == ["accelerator-bound"]
    found = findings(budget(accelerator=1000.0, loader=250.0))
    assert set(found) == {"loader-bound", "packing-helps"}
    assert "32 cores" in found["loader-bound"]
    found = findings(budget(accelerator=1000.0, loader=2000.0, storage=200.0))
    # A million images at 200/s take 5,000 s to copy; each epoch then saves 4,000 s.
    assert "83 min and pays off after 1.2 epochs" in found["storage-bound"]
    assert "20 MB/s" in found["storage-bound"]
    assert "100 MB/s" in found["storage-bound"]


@pytest.mark.parametrize(
    ("free", "fix", "most"),
    [
        (None, "stoker stage x.yaml --to /local/disk/imagenet", 5.0),
        (200 * 10**9, "stoker stage x.yaml --to /nvme/imagenet", 5.0),
        (50 * 10**9, "cache_dir=/nvme/stoker-cache cache_size=45GB: keeps 45% of the data nearby", 1 / 0.55),
        (10**9, "a local disk with room for 100 GB, or a smaller, packed copy", None),
    ],
)
def test_slow_storage_is_fixed_by_staging_where_there_is_room(free: int | None, fix: str, most: float | None) -> None:
    room = None if free is None else LocalDisk("/nvme", free)
    planned = job({"data_root": "s3://bucket/imagenet"}, room=room)
    (found,) = time_findings(budget(accelerator=1000.0, loader=2000.0, storage=200.0), planned, "x.yaml")
    assert found.fix == fix
    assert (None if found.speedup is None else found.speedup.high) == (None if most is None else pytest.approx(most))
    assert ("/nvme has" in found.seen) == (room is not None)
    assert ("pays off" in found.seen) == fix.startswith("stoker stage")


def rate(workers: int, cores: int | None = None, *, cpus: int = 8, nodes: int = 1) -> Rate:
    return loader_rate(job({"num_workers": workers}, cpus=cpus, nodes=nodes, cores=cores), 700.0, "made up")


def test_workers_beyond_the_cores_gain_nothing() -> None:
    few, enough, many, none = (rate(workers).images_per_second for workers in (4, 8, 64, 0))
    assert few == 2800.0
    assert 0 < none < few < enough == many
    assert rate(4, nodes=3).images_per_second == pytest.approx(3 * few)


def test_a_second_thread_of_a_core_adds_less_than_a_core() -> None:
    assert cores_worth(6, 8) == 6
    assert 8 < cores_worth(16, 8) < 12
    alone, shared = (rate(14, cores, cpus=16, nodes=2) for cores in (16, 8))
    assert alone.images_per_second == pytest.approx(14 / cores_worth(14, 8) * shared.images_per_second)
    assert alone.source.startswith("28 cores x")
    assert shared.source.startswith("28 threads on 16 cores = 19.6 cores x")
    # As long as every thread has a core of its own, it makes no difference.
    assert rate(8, 8, cpus=16).images_per_second == pytest.approx(rate(8, 16, cpus=16).images_per_second)


def test_what_torch_s_loader_would_reach_comes_from_the_published_ratio() -> None:
    """The figure of docs/results.md, and its range, hold the ratio of results/loaders."""
    ratios = json.loads((PROJECT / "results" / "loaders" / "result.json").read_text())["measured"]["ratios"]
    of_torch = ratios["torch + PIL"]["stoker"]["rounds"] + ratios["torch + PIL"]["stoker threads"]["rounds"]
    assert pytest.approx(statistics.median(of_torch), abs=0.1) == FASTER_THAN_TORCH
    assert pytest.approx((min(of_torch), max(of_torch)), abs=0.06) == FASTER_THAN_TORCH_RANGE
    theirs = torch_loader_rate(Rate(3200.0, "made up"), loader_figures(224))
    assert theirs.images_per_second == pytest.approx(3200 / FASTER_THAN_TORCH)
    assert "results/loaders" in theirs.source
    time = budget(accelerator=1000.0, loader=2000.0)
    assert replace(time, torch_loader=Rate(100.0, "made up")).images_per_second == 1000.0


def test_storage_is_named_or_stated() -> None:
    assert read_storage("500MB/s").rate(100_000, 1).images_per_second == pytest.approx(5000)
    assert read_storage("fsx").rate(120_000, 8).images_per_second == pytest.approx(2000)
    one, four = (read_storage("s3").rate(110_000, ranks).images_per_second for ranks in (1, 4))
    assert four == pytest.approx(4 * one)
    assert 300 < one < 64 / 0.1


@pytest.mark.parametrize(
    ("word", "name", "told"),
    [("fxs", "unknown-storage", "fsx"), ("500/s", "storage-rate", "unit"), ("fast", "unknown-storage", "")],
)
def test_unknown_storage_is_refused(word: str, name: str, told: str) -> None:
    with pytest.raises(UsageError) as caught:
        read_storage(word)
    assert caught.value.name == name
    assert told in caught.value.seen


@pytest.mark.parametrize(
    ("cpus", "cores", "name", "hint"),
    [
        (0, None, "nothing-to-plan", "--cpus 1"),
        (4, 0, "nothing-to-plan", "--cores 1"),
        (4, 8, "more-cores-than-cpus", "--cpus 8 --cores 8 if no two of them share a core"),
        (None, 8, "cores-without-cpus", "--cpus 8 --cores 8 if no two of them share a core"),
    ],
)
def test_a_machine_without_anything_and_cores_without_cpus_are_refused(
    cpus: int | None, cores: int | None, name: str, hint: str
) -> None:
    with pytest.raises(UsageError) as caught:
        check_counts(cpus, cores)
    assert caught.value.name == name
    assert (caught.value.hint or "").startswith(hint)
