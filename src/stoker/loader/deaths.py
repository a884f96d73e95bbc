"""How loader processes died: which one, by which signal, and whether the kernel did it because memory ran out."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from pathlib import Path

from stoker.core.cgroups import oom_kills
from stoker.core.errors import UserError

SETTLE_S = 5.0
"""A pipe breaks before the process counts as ended: the fork server has to collect it first."""
KERNEL_LOG = Path("/dev/kmsg")
NOT_KNOWN = 255
"""What multiprocessing reports for a process whose fork server is gone, too."""
REASONS = {
    signal.SIGKILL: "the kernel does this when memory runs out, and so does kill -9",
    signal.SIGBUS: "usually /dev/shm is full, or a mapped file became shorter",
    signal.SIGSEGV: "a library that it uses crashed",
    signal.SIGILL: "a library that it uses was built for another CPU",
    signal.SIGXCPU: "it used the CPU time that `ulimit -t` allows",
}


class WorkerDied(UserError):
    """A loader process ended in the middle of its work."""


class Casualties:
    """Watches the workers of one loader; made before they start."""

    def __init__(self) -> None:
        self._oom_kills = oom_kills()

    def explain(self, error: Exception, workers: Sequence[BaseProcess]) -> Exception:
        """The error to raise in place of the loader's: who died, or the loader's own if all workers live."""
        with suppress(OSError, ValueError):
            ended = connection.wait([worker.sentinel for worker in workers], SETTLE_S)
            for worker in workers:
                if worker.sentinel in ended:
                    worker.join(SETTLE_S)  # its files are closed a moment before it is gone
        dead = [(number, worker) for number, worker in enumerate(workers) if not worker.is_alive()]
        if not dead:
            # An error that a worker raised contains its name.
            lost = isinstance(error, (EOFError, ConnectionError)) and "DataLoader worker process" not in str(error)
            return _lost(error) if lost else error
        seen = "; ".join(f"{_who(number, worker)} {_how(worker.exitcode)}" for number, worker in dead)
        return WorkerDied(
            "worker-died",
            f"{seen}, of {len(workers)} in this loader",
            why=self._why([worker for _, worker in dead]),
            hint="the same command resumes; less memory: num_workers, prefetch_factor or batch_size",
        )

    def _why(self, dead: Sequence[BaseProcess]) -> str:
        pids = {worker.pid for worker in dead}
        before, now = self._oom_kills, oom_kills()
        if before is not None and now is not None and now > before:
            return (
                f"memory ran out: the kernel's OOM killer has ended {_processes(now - before)} of this cgroup meanwhile"
            )
        if pids & killed_for_memory():
            return "memory ran out: the kernel's log names it among those that the OOM killer ended"
        first = dead[0].exitcode
        reason = REASONS.get(signal.Signals(-first)) if first is not None and _is_signal(-first) else None
        return reason or "a worker only makes batches: it does not end by itself"


def _lost(error: Exception) -> WorkerDied:
    """No worker is left to ask: the fork server died before it had started one."""
    return WorkerDied(
        "worker-died",
        f"the loader's processes are not there any more ({type(error).__name__})",
        why="the process that starts them was killed; the kernel does this when memory runs out",
        hint="the same command resumes; loader=thread needs no such process",
    )


def killed_for_memory(log: Path = KERNEL_LOG) -> set[int]:
    """The processes that the kernel's log names as killed for lack of memory; empty if it cannot be read."""
    found: set[int] = set()
    with suppress(OSError):
        descriptor = os.open(log, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            # A device gives one record at a time, and BlockingIOError after the last.
            while record := os.read(descriptor, 8192):
                found.update(map(int, re.findall(rb"Killed process (\d+)", record)))
        except OSError:
            pass
        finally:
            os.close(descriptor)
    return found


def _who(number: int, worker: BaseProcess) -> str:
    return f"loader worker {number} (process {worker.pid})"


def _how(code: int | None) -> str:
    if code is None or code == NOT_KNOWN:
        return "ended, and nobody knows how"
    if code >= 0:
        return f"exited with code {code}"
    return f"was killed by {signal.Signals(-code).name if _is_signal(-code) else f'signal {-code}'}"


def _is_signal(number: int) -> bool:
    return number in {int(known) for known in signal.Signals}


def _processes(count: int) -> str:
    return f"{count} process{'es' * (count != 1)}"
