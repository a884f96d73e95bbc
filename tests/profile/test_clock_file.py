"""clock.jsonl is read back to the clock's sums, truncated on resume, and refused if its version is unknown."""

from __future__ import annotations

import json
import multiprocessing
import re
import time
from pathlib import Path
from typing import Any

import pytest

from stoker.core.errors import UserError
from stoker.doctor.diagnosing import diagnosis_of
from stoker.profile.batch_costs import BatchCost, StageCost
from stoker.profile.clock_file import ClockFile, ClockHeader
from stoker.profile.clock_reading import observed_from, read_observed
from stoker.profile.host import HostWatch
from stoker.profile.observed import LoaderShape
from stoker.profile.step_clock import StepClock
from stoker.run.folder import RunFolder
from stoker.run.metrics import truncate_after

LONGEST_LINE = 2000
"""Bytes for an interval of 50 steps: 5,004 steps then stay below 200 kB."""


class Made:
    """The part of a batch that the clock needs."""

    def __init__(self, number: int) -> None:
        stages = {
            "other": StageCost(0.0001, 0.0001, 0.0, 1),
            "collate": StageCost(0.0002, 0.0001, 0.0, 1),
            "fetch": StageCost(0.031234567, 0.0101, 0.0002, 1),
            "decode": StageCost(0.2512345, 0.2412345, 0.0052345, 1),
        }
        self.cost = BatchCost(
            stages, 0.28, 14_000_000, 256, 38_535_168, 40_000 + number % 8, 1, number, 0.003 + number / 1e6
        )

    def __len__(self) -> int:
        return 256


def header(**shape: Any) -> ClockHeader:
    loader = LoaderShape(**{"workers": 8, "prefetch": 2, "batch_size": 256, "samples": 1_281_167} | shape)
    return ClockHeader(loader, cpus=8, world=1, torch="2.15.0", device="cpu")


def names(samples: Any) -> list[str]:
    return [f"n0144{sample:04d}/n0144{sample:04d}_1234.JPEG" for sample in samples]


def write(folder: Path, steps: int, every: int, first: int = 0, **shape: Any) -> StepClock:
    """Records steps as the loop and its observer would; the clock has the sums of all of them."""
    clock = StepClock()
    file = ClockFile(folder / "clock.jsonl", header(**shape), HostWatch(), step=first, name_samples=names)
    clock.epoch_begins()
    for step in range(first + 1, first + steps + 1):
        with clock.waiting():
            time.sleep(0.0002)
        with clock.computing():
            pass
        clock.step_ends([Made(step)])
        if step % every == 0:
            file.step(step, 0, clock.take_interval())
    with clock.validating():
        time.sleep(0.01)
    file.epoch(first + steps, 0, clock.take_interval())
    file.close()
    return clock


def test_the_file_reads_back_to_the_sums_of_the_clock(tmp_path: Path) -> None:
    clock = write(tmp_path, 105, every=10)
    seen = read_observed(tmp_path)
    assert seen.source == "run"
    # The first step of the epoch is counted separately.
    others = (clock.steps - 1) / clock.steps
    assert (seen.steps, seen.samples) == (clock.steps - 1, clock.samples - 256)
    assert clock.first_wait_s is not None
    wait_s = clock.wait_s - clock.first_wait_s
    assert seen.times.wait_s == pytest.approx(wait_s, abs=1e-5)
    assert seen.times.elapsed_s == pytest.approx(wait_s + others * (clock.total_s - clock.wait_s), abs=1e-5)
    assert seen.times.compute_s == pytest.approx(others * clock.compute_s, abs=1e-5)
    assert seen.times.wait_s + (seen.times.compute_s or 0) + (seen.times.other_s or 0) == pytest.approx(
        seen.times.elapsed_s, abs=1e-4
    )
    assert seen.times.epoch_starts_s == pytest.approx([clock.first_wait_s], abs=1e-5)
    assert seen.times.validation_s >= 0.01
    assert seen.stages.keys() == clock.cost.stages.keys()
    for name, stage in clock.cost.stages.items():
        assert seen.stages[name].wall_s == pytest.approx(stage.wall_s, abs=1e-4)
        assert seen.stages[name].cpu_s == pytest.approx(stage.cpu_s, abs=1e-4)
        assert seen.stages[name].blocked_s == pytest.approx(stage.blocked_s, abs=1e-4)
        assert seen.stages[name].calls == 105
    assert seen.stages["fetch"].read_bytes == 105 * 14_000_000
    assert seen.storage.bytes_per_sample == pytest.approx(14_000_000 / 256)
    assert seen.loader.workers == 8
    assert {batch.worker for batch in seen.batches} == set(range(8))
    assert seen.slow_samples[0].name == names([105])[0]
    assert seen.slow_samples[0].typical_s == pytest.approx(0.2512345 / 256, rel=1e-3)
    assert seen.host.cpus >= 1
    assert seen.host.shm_used_bytes >= 0


def test_short_epochs_do_not_look_faster_than_long_ones() -> None:
    # A worker takes 0.12 s per batch, the loop 0.06 s per step; in each epoch of 6 steps the first waits longer.
    epoch = {"kind": "step", "steps": 6, "samples": 6 * 64, "wait_s": 5 * 0.06, "elapsed_s": 5 * 0.12 + 0.06,
             "compute_s": 6 * 0.06, "other_s": 0.0, "epoch_starts_s": [0.12]}  # fmt: skip
    seen = observed_from([{"kind": "event", "event": "clock", **header().as_record()}, *[epoch] * 40], "these")
    assert (seen.steps, seen.samples) == (200, 200 * 64)
    assert seen.images_per_second == pytest.approx(64 / 0.12)
    assert seen.times.wait_share == pytest.approx(0.5)
    assert seen.times.wait_s + (seen.times.compute_s or 0) == pytest.approx(seen.times.elapsed_s)
    single = {"kind": "step", "steps": 1, "samples": 8, "wait_s": 0.0, "elapsed_s": 0.1, "epoch_starts_s": [1.0]}
    seen = observed_from([{"kind": "event", "event": "clock", **header().as_record()}, *[single] * 3], "these")
    assert (seen.steps, seen.samples) == (3, 24)


def test_a_line_stays_small_however_long_its_interval_is(tmp_path: Path) -> None:
    write(tmp_path, 500, every=50)
    lines = (tmp_path / "clock.jsonl").read_bytes().splitlines()
    assert max(map(len, lines)) < LONGEST_LINE


def test_only_whole_lines_of_the_resumed_run_as_it_is_set_up_now_count(tmp_path: Path) -> None:
    path = RunFolder(tmp_path).clock_file
    write(tmp_path, 40, every=10)
    truncate_after(path, 20, 0)
    assert read_observed(tmp_path).steps == 20 - 1
    write(tmp_path, 20, every=10, first=20)
    assert read_observed(tmp_path).steps == 40 - 2
    write(tmp_path, 20, every=10, first=40, workers=2)
    path.write_bytes(path.read_bytes()[:-30])
    seen = read_observed(tmp_path)
    assert seen.steps == 20 - 1
    assert seen.loader.workers == 2


def test_a_file_that_cannot_be_interpreted_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=re.escape("clock.jsonl")) as caught:
        read_observed(tmp_path)
    assert caught.value.name == "no-clock"
    write(tmp_path, 10, every=10)
    path = tmp_path / "clock.jsonl"
    text = path.read_text()
    path.write_text(text.replace('"format": 1', '"format": 7'))
    with pytest.raises(UserError, match="format 7") as caught:
        read_observed(tmp_path)
    assert caught.value.name == "clock-format"
    path.write_text("".join(text.splitlines(keepends=True)[1:]))
    with pytest.raises(UserError) as caught:
        read_observed(tmp_path)
    assert caught.value.name == "no-clock"


def test_a_damaged_value_counts_as_not_measured() -> None:
    begin = {"kind": "event", "event": "clock", **header().as_record()}
    line = {
        "kind": "step", "steps": 10, "samples": 80, "wait_s": 0.5, "elapsed_s": 1.0, "waits_s": [0.1, 0.2],
        "steps_s": [0.3, 0.4], "batches": [[0.1, None, None, None, 8, 0, None, None]],
        "stages": {"decode": {"wall_s": 1.0, "cpu_s": 0.5}}, "host": {"cpus": 8, "cpu_busy_share": 0.5},
    }  # fmt: skip
    damaged = [
        line | {"wait_s": "long"},
        line
        | {"steps": 0, "samples": 0, "elapsed_s": 0.0, "wait_s": 0.0, "waits_s": [None, 0.2], "batches": [[1], "x"]},
        {"kind": "step", "stages": [], "slowest": [1], "host": None, "epoch_starts_s": "none"},
        {"no": "kind"},
    ]
    seen = observed_from([begin, line, *damaged], "these")
    assert (seen.steps, seen.samples, seen.times.wait_s, seen.times.elapsed_s) == (10, 80, 0.5, 1.0)
    assert (seen.times.waits_s, seen.times.steps_s) == ((0.1, 0.2, 0.1, 0.2, 0.2), (0.3, 0.4, 0.3, 0.4, 0.4))
    assert len(seen.batches) == 2
    assert seen.host.cpu_busy_share == 0.5
    not_counted = observed_from([begin, line, line | {"stages": {"decode": {"wall_s": 1.0, "cpu_s": None}}}], "these")
    assert (not_counted.stages["decode"].wall_s, not_counted.stages["decode"].cpu_s) == (2.0, None)


def grown(own: float, workers: float, *, points: int = 40, first: int = 0) -> list[dict[str, Any]]:
    """Lines of a run whose processes grow by so many bytes a second, with a look every ten seconds."""
    return [
        {"kind": "step", "time": 1e9 + 10 * at, "step": at + 1, "steps": 1, "samples": 256, "elapsed_s": 1.0,
         "wait_s": 0.5, "host": {"cpus": 8, "available_bytes": 20_000_000_000},
         "memory": {"own_bytes": 1e9 + 10 * own * at, "children_bytes": 8e8 + 10 * workers * at}}
        for at in range(first, first + points)
    ]  # fmt: skip


def test_memory_that_grows_beyond_its_caches_is_seen_in_a_runs_own_lines() -> None:
    start = {"kind": "event", "event": "clock", **header().as_record(), "may_grow_bytes": 500_000_000}
    seen = observed_from([start, *grown(0, 8e6)], "these")
    assert seen.memory.watched_s == 390
    assert seen.memory.worker_bytes_per_second == pytest.approx(1e6, rel=0.01)
    assert (seen.memory.loop_bytes_per_second, seen.memory.loop_grown_bytes) == (0, 0)
    found = next(each for each in diagnosis_of(seen).findings if each.name == "memory-grows")
    assert found.seen.startswith("each of 8 workers grows by 60 MB a minute, at 28.8 GB an hour in all: 20 GB")
    assert "the same command continues" in (found.fix or "")
    fills_a_cache = observed_from([start, *grown(0, 1e6)], "these")
    assert "memory-grows" not in {each.name for each in diagnosis_of(fills_a_cache).findings}
    # After a restart the process is another one, with its own memory.
    again = observed_from([start, *grown(0, 8e6), start, *grown(0, 0, first=40)], "these")
    assert (again.memory.watched_s, again.memory.worker_bytes_per_second) == (390, 0)


def test_private_memory_and_names_that_are_not_utf8_are_written(tmp_path: Path) -> None:
    odd = b"x\xff.jpg".decode("utf-8", "surrogateescape")
    clock, file = StepClock(), ClockFile(tmp_path / "clock.jsonl", header(), HostWatch(), name_samples=lambda _: [odd])
    clock.epoch_begins()
    clock.step_ends([Made(1)])
    with multiprocessing.get_context("fork").Pool(1) as pool:
        pool.apply(int)
        file.epoch(1, 0, clock.take_interval())
    file.close()
    line = json.loads((tmp_path / "clock.jsonl").read_text().splitlines()[1])
    assert line["memory"]["own_bytes"] > 10_000_000
    assert line["memory"]["children_bytes"] > 1_000_000
    assert line["slowest"][0]["name"] == "x?.jpg"
