"""Workers step back behind the thread that trains; that thread keeps its priority."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from stoker.core.priority import LOWEST, STEPS_BACK, step_back
from stoker.io.prefetch import open_reader
from tests.io.test_prefetch import SlowStore, index_of
from tests.loader.test_loader import loader_for, make_images

pytestmark = pytest.mark.skipif(not Path("/proc/thread-self").exists(), reason="needs a priority for each thread")


def priority_of(task: int) -> int:
    return os.getpriority(os.PRIO_PROCESS, task)


def lowered() -> int:
    return min(LOWEST, priority_of(0) + STEPS_BACK)


def named(name: str) -> list[int]:
    return [thread.native_id or 0 for thread in threading.enumerate() if thread.name.startswith(name)]


def in_a_thread(run: Callable[[], object]) -> None:
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()


def test_a_thread_steps_back_alone_and_once_and_what_it_starts_goes_with_it() -> None:
    before, seen = priority_of(0), []

    def run() -> None:
        step_back()
        step_back()
        seen.append(priority_of(threading.get_native_id()))
        in_a_thread(lambda: (step_back(), seen.append(priority_of(threading.get_native_id()))))

    in_a_thread(run)
    assert seen == [lowered(), lowered()]
    assert priority_of(0) == before


def test_the_lowest_priority_stays_as_it_is() -> None:
    program = "import os; os.nice(17); from stoker.core.priority import step_back; step_back(); print(os.nice(0))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == f"{LOWEST}\n"


@pytest.mark.parametrize("engine", ["thread", "process"])
def test_workers_run_at_a_lower_priority_than_the_thread_that_takes_their_batches(tmp_path: Path, engine: str) -> None:
    make_images(tmp_path, "train", 12)
    before = priority_of(0)
    loader = loader_for(tmp_path, "batch_size=2", f"loader={engine}", workers=2)
    try:
        for _ in loader.epoch(0):
            pass
        if engine == "thread":
            workers = named("stoker-loader")
        else:
            workers = [worker.pid for worker in loader._engine._loader._iterator._workers]  # type: ignore[union-attr]
        assert [priority_of(worker) for worker in workers] == [lowered()] * 2
    finally:
        loader.close()
    assert priority_of(0) == before


def test_threads_that_read_ahead_step_back_too() -> None:
    reader = open_reader(SlowStore(), index_of(8), lookahead_bytes=10**6)
    reader.take(np.arange(8))
    threads = named("stoker-reader")
    assert threads
    assert {priority_of(thread) for thread in threads} == {lowered()}
    reader.close()
