"""The clock tells running, waiting for a core and being blocked apart, and costs next to nothing."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest

from stoker.clock.costs import BatchClock, BatchCost, read_schedule


def spin(seconds: float) -> None:
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


def test_sleeping_counts_as_blocked_and_spinning_as_running() -> None:
    clock = BatchClock()
    with clock.stage("fetch"):
        time.sleep(0.1)
    with clock.stage("decode"):
        spin(0.1)
    cost = clock.finish()
    assert cost.fetch_s >= 0.1
    assert cost.decode_s >= 0.1
    assert cost.on_cpu_s == pytest.approx(0.1, abs=0.04)
    assert cost.blocked_s is not None
    assert cost.blocked_s >= 0.09
    assert cost.wall_s >= 0.2


def test_each_thread_has_its_own_account_and_closes_it() -> None:
    before = len(list(Path("/proc/self/fd").iterdir()))
    found: list[int] = []

    def work() -> None:
        schedule = read_schedule()
        assert schedule is not None
        spin(0.02)
        after = read_schedule()
        assert after is not None
        found.append(after[0] - schedule[0])

    for _ in range(20):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert all(15e6 < nanoseconds < 200e6 for nanoseconds in found)
    assert len(list(Path("/proc/self/fd").iterdir())) <= before + 2


def test_a_forked_child_reads_its_own_times() -> None:
    spin(0.05)
    read_schedule()
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        schedule = read_schedule()
        os.write(writer, str(schedule[0] if schedule else -1).encode())
        os._exit(0)
    os.waitpid(child, 0)
    assert 0 <= int(os.read(reader, 64)) < 40e6
    os.close(reader)
    os.close(writer)


def test_sums_keep_what_was_never_measured_apart_from_zero() -> None:
    total = BatchCost.zero()
    total.add(BatchCost(fetch_s=1.0, on_cpu_s=0.5, run_queue_s=0.1, blocked_s=0.4, samples=2))
    assert total.per_image()["fetch"] == 0.5
    assert total.per_image()["on_cpu"] == 0.25
    total.add(BatchCost(fetch_s=1.0, samples=2))
    assert total.on_cpu_s is None
    assert total.per_image()["fetch"] == 0.5
