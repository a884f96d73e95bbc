"""Hands tasks to worker processes, one at a time each, and never leaves a process behind.

Python's own pool does not say which task a worker was at when the kernel killed it, and its workers outlive
a parent that was killed.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import Any

_PR_SET_PDEATHSIG = 1
_GRACE_S = 5.0

Report = Callable[[Any], None]
Work = Callable[[Any, Any, Report], Any]
"""work(shared, task, report) -> result: a function of a module, so that another process finds it."""


class WorkerDied(Exception):
    """A worker process ended in the middle of a task."""

    def __init__(self, task: Any, exit_code: int | None) -> None:
        super().__init__(f"worker ended with {exit_code} during {task!r}")
        self.task = task
        self.exit_code = exit_code


class TaskFailed(Exception):
    """A task raised an error; the worker's traceback is the message."""


def run_in_processes(
    work: Work,
    shared: Any,
    tasks: Sequence[Any],
    *,
    workers: int,
    on_report: Callable[[Any], None],
    on_result: Callable[[Any], None],
) -> None:
    """Runs every task; reports and results arrive in this process, in the order in which they happen.

    However it ends, Ctrl-C and errors in the callbacks included, no worker is alive afterwards.
    """
    waiting = list(reversed(tasks))
    busy: dict[Connection[Any, Any], tuple[SpawnProcess, Any]] = {}
    started: list[SpawnProcess] = []
    try:
        for _ in range(min(workers, len(tasks))):
            process, connection = _start(work, shared)
            started.append(process)
            busy[connection] = (process, task := waiting.pop())
            with suppress(BrokenPipeError):  # died already: its end is seen below
                connection.send(task)
        while busy:
            for ready in wait(list(busy)):
                assert isinstance(ready, Connection)
                connection = ready
                process, task = busy[connection]
                try:
                    kind, value = connection.recv()
                except (EOFError, ConnectionResetError):
                    process.join(_GRACE_S)
                    raise WorkerDied(task, process.exitcode) from None
                if kind == "report":
                    on_report(value)
                    continue
                if kind == "failed":
                    raise TaskFailed(value)
                on_result(value)
                if waiting:
                    busy[connection] = (process, task := waiting.pop())
                    with suppress(BrokenPipeError):
                        connection.send(task)
                else:
                    del busy[connection]
                    connection.close()  # the worker ends when it finds no more tasks
    finally:
        _end(started)


def _start(work: Work, shared: Any) -> tuple[SpawnProcess, Connection[Any, Any]]:
    # Spawned, not forked: this process may have threads, and a lock that one of them held would stay held.
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs, os.getpid(), work, shared), daemon=True)
    # Ctrl-C is sent to the whole group and is for us alone. A blocked signal stays blocked in the child from
    # its first instruction on, and pending here. (The tracker unblocks it when it starts: so it starts first.)
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        process.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        theirs.close()  # or its end would never be seen as closed
    return process, ours


def _end(processes: Sequence[SpawnProcess]) -> None:
    for process in processes:
        process.terminate()
    for process in processes:
        process.join(_GRACE_S)
        if process.is_alive():  # stuck in the kernel, on a dead network disk for example
            process.kill()
            process.join(_GRACE_S)


def _serve(connection: Connection[Any, Any], parent: int, work: Work, shared: Any) -> None:
    """A worker process's whole life."""
    # The kernel ends this process with its parent, however that ends.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        return  # it was gone before we asked
    while True:
        try:
            task = connection.recv()
        except (EOFError, ConnectionResetError):
            return
        try:
            answer = ("result", work(shared, task, lambda value: connection.send(("report", value))))
        except Exception:
            answer = ("failed", traceback.format_exc())
        connection.send(answer)
