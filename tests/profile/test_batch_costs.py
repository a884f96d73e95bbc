"""The clock distinguishes running, runnable and blocked time stage by stage, at almost no cost."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from statistics import median

import pytest

from stoker.attach.stage_clock import read_schedule
from stoker.profile.batch_costs import BatchClock, BatchCost, StageCost


def spin(seconds: float) -> None:
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


@pytest.mark.real_time
def test_a_sleeping_stage_is_blocked_and_a_spinning_one_runs() -> None:
    slept, spun = [], []
    for _ in range(5):
        clock = BatchClock()
        clock.begins("fetch")
        time.sleep(0.04)
        clock.begins("decode")
        spin(0.04)
        cost = clock.finish()
        slept.append(cost.stages["fetch"])
        spun.append(cost.stages["decode"])
    # Waking up may take a while if others use the cores: that is time in the run queue.
    assert min(stage.blocked_s or 0.0 for stage in slept) >= 0.035
    assert min(stage.cpu_s or 0.0 for stage in spun) >= 0.039
    # The least of several: a host that takes the core away makes it look as if the thread had slept.
    assert min(stage.cpu_s or 0.0 for stage in slept) < 0.01
    assert min(stage.cpu_s or 0.0 for stage in spun) < 0.05
    assert all(stage.blocked_s is not None for stage in spun)
    assert min(stage.blocked_s or 0.0 for stage in spun) < 0.02


@pytest.mark.real_time
def test_a_short_stage_gets_its_own_cpu_time_and_not_a_tick_of_its_neighbour() -> None:
    """The kernel updates schedstat only every few milliseconds."""
    found = []
    for _ in range(11):
        clock = BatchClock()
        clock.begins("decode")
        spin(0.0105)
        clock.begins("collate")
        spin(0.001)
        found.append(clock.finish().stages["collate"].cpu_s or 0.0)
    assert min(found) >= 0.001
    # Not each of them: the kernel counts its interrupts as time of the thread that they hit.
    assert median(found) < 0.0025


def test_stages_and_their_parts_add_up_to_the_wall_time() -> None:
    clock = BatchClock()
    for number in range(20):
        clock.begins(("fetch", "decode", "collate")[number % 3])
        spin(0.0005) if number % 2 else time.sleep(0.0005)
    cost = clock.finish()
    assert sum(stage.wall_s for stage in cost.stages.values()) == pytest.approx(cost.wall_s, abs=1e-9)
    for stage in cost.stages.values():
        parts = (stage.cpu_s, stage.runq_s, stage.blocked_s)
        assert sum(part or 0.0 for part in parts) == pytest.approx(stage.wall_s, abs=1e-9)
    whole = (cost.on_cpu_s, cost.run_queue_s, cost.blocked_s)
    assert sum(part or 0.0 for part in whole) == pytest.approx(cost.wall_s, abs=1e-6)


def spinning_child(core: set[int]) -> int:
    """A process that is already busy on this core when its number is returned."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.sched_setaffinity(0, core)
        os.write(writer, b"x")
        spin(60)
        os._exit(0)
    assert os.read(reader, 1) == b"x"
    os.close(reader)
    os.close(writer)
    return child


@pytest.mark.real_time
def test_waiting_for_a_core_that_others_use_is_neither_running_nor_blocked() -> None:
    core = {min(os.sched_getaffinity(0))}
    children = [spinning_child(core) for _ in range(2)]
    found: list[StageCost] = []

    def work() -> None:
        os.sched_setaffinity(0, core)  # of this thread
        clock = BatchClock()
        clock.begins("decode")
        spin(0.1)
        found.append(clock.finish().stages["decode"])

    try:
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    finally:
        for child in children:
            os.kill(child, 9)
            os.waitpid(child, 0)
    (decode,) = found
    assert decode.runq_s > 0.05
    # Waiting takes twice as long as computing, at least: far more than what a tick may add.
    assert 0.099 <= decode.cpu_s < 0.15


def test_each_thread_opens_and_closes_its_own_schedstat() -> None:
    before = len(list(Path("/proc/self/fd").iterdir()))
    found: list[int] = []

    def work() -> None:
        schedule = read_schedule()
        spin(0.02)
        after = read_schedule()
        found.append(after[0] - schedule[0])

    for _ in range(20):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    # 20 ms, less what a coarse tick has not counted yet; the thread that waits for these has none.
    assert all(5e6 < nanoseconds < 200e6 for nanoseconds in found)
    assert len(list(Path("/proc/self/fd").iterdir())) <= before + 2


def test_a_forked_child_reads_its_own_times() -> None:
    spin(0.2)
    parents = read_schedule()
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        schedule = read_schedule()
        os.write(writer, str(schedule[0] if schedule else -1).encode())
        os._exit(0)
    os.waitpid(child, 0)
    assert 0 <= int(os.read(reader, 64)) < parents[0] / 2
    os.close(reader)
    os.close(writer)


def cost_of(seconds: float, *, measured: bool = True, **parts: int | float) -> BatchCost:
    stage = StageCost(seconds, seconds / 2 if measured else None, 0.0 if measured else None, 1)
    return BatchCost({"fetch": stage}, wall_s=seconds, samples=2, **parts)  # type: ignore[arg-type]


def test_sums_distinguish_unmeasured_from_zero_and_name_the_slowest_sample_of_all() -> None:
    total = BatchCost()
    assert total.on_cpu_s is None
    total.add(cost_of(1.0))
    assert total.per_image()["fetch"] == 0.5
    assert total.per_image()["on_cpu"] == 0.25
    total.add(cost_of(1.0, measured=False))
    assert total.on_cpu_s is None
    assert total.per_image()["fetch"] == 0.5
    for number, seconds in ((7, 0.1), (8, 0.5), (9, 0.2)):
        total.add(cost_of(1.0, slowest_sample=number, slowest_s=seconds))
    assert (total.slowest_sample, total.slowest_s) == (8, 0.5)
