"""Worker processes: tasks shared out, deaths named, nobody left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from stoker.data.images.pack.worker_processes import TaskFailed, WorkerDied, run_in_processes
from tests.conftest import PROJECT


def double_or_die(shared: int, task: int, report: Callable[[Any], None]) -> int:
    if task == 13:
        os.kill(os.getpid(), signal.SIGKILL)
    if task == 99:
        raise ValueError("no such number")
    report(task)
    return shared * task


def run(tasks: list[int]) -> tuple[list[int], list[int]]:
    reports: list[int] = []
    results: list[int] = []
    run_in_processes(double_or_die, 2, tasks, workers=2, on_report=reports.append, on_result=results.append)
    return reports, results


def test_tasks_are_shared_out_among_processes() -> None:
    reports, results = run([1, 2, 3, 4, 5])
    assert sorted(reports) == [1, 2, 3, 4, 5]
    assert sorted(results) == [2, 4, 6, 8, 10]


def test_a_worker_that_dies_is_named_by_its_task() -> None:
    with pytest.raises(WorkerDied) as died:
        run([1, 2, 13, 3])
    assert (died.value.task, died.value.exit_code) == (13, -signal.SIGKILL)


def test_an_error_in_a_worker_arrives_with_its_traceback() -> None:
    with pytest.raises(TaskFailed, match="no such number"):
        run([1, 99])


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def say_pid_and_wait(shared: None, task: int, report: Callable[[Any], None]) -> None:
    report(os.getpid())
    time.sleep(60)


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_no_worker_is_left_when_the_caller_stops(error: type[BaseException]) -> None:
    pids: list[int] = []

    def stop_at_the_second(pid: int) -> None:
        pids.append(pid)
        if len(pids) == 2:
            raise error

    with pytest.raises(error):
        run_in_processes(
            say_pid_and_wait, None, [1, 2, 3], workers=2, on_report=stop_at_the_second, on_result=pids.append
        )
    assert not any(map(is_running, pids))


PARENT = """
from tests.data.images.test_worker_processes import say_pid_and_wait
from stoker.data.images.pack.worker_processes import run_in_processes

if __name__ == "__main__":
    def say(pid):
        print(pid, flush=True)

    run_in_processes(say_pid_and_wait, None, [1, 2], workers=2, on_report=say, on_result=say)
"""


def test_workers_in_the_middle_of_a_task_end_with_a_parent_that_was_killed(tmp_path: Path) -> None:
    program = tmp_path / "parent.py"
    program.write_text(PARENT)
    parent = subprocess.Popen(
        [sys.executable, program], stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": str(PROJECT)}
    )
    assert parent.stdout is not None
    pids = [int(parent.stdout.readline()) for _ in range(2)]
    assert all(map(is_running, pids))
    parent.kill()
    parent.wait()
    end = time.monotonic() + 5
    while any(map(is_running, pids)) and time.monotonic() < end:
        time.sleep(0.02)
    assert not any(map(is_running, pids))
