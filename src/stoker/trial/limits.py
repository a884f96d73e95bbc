"""Limits of a trial: memory, and time. Whatever exceeds them is ended, with everything below it."""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from pathlib import Path

from stoker.core.cgroups import PROC
from stoker.core.child import kill_all
from stoker.profile.memory import read_counters, read_memory, tree_memory, tree_pids

LEAST_PATIENCE_S = 300.0
"""For the first trial: a step of a large model on a CPU takes a minute, a start from a slow disk another."""
RESERVE = 0.05
"""Share of the memory available when a trial starts that is left to everybody else."""
LOOK_EVERY_S = 0.2
EXACTLY_EVERY_S = 1.5
"""The exact measure takes milliseconds for each process that shares memory, on the cores that are being measured."""
NEAR = 0.8
"""Share of the limit above which memory is read exactly every time."""
PATIENT = 4.0
"""A run that takes this many times as long as the first one hangs."""
LEAST_WAIT_S = 30.0
"""A shorter run says little about how long starting many workers may take."""


def patience_after(first_took_s: float | None, seconds: float) -> float:
    """How long a trial may take, start included, given what the first one took."""
    if first_took_s is None:
        return max(LEAST_PATIENCE_S, 10 * seconds)
    return max(LEAST_WAIT_S, PATIENT * first_took_s) + 2 * seconds


def memory_left(limit_bytes: int | None) -> int | None:
    """Memory that a trial may take now: what is available, less a reserve, or the given limit if that is less."""
    state = read_memory()
    known = [] if state is None else [int((1 - RESERVE) * state.available_bytes)]
    return min([*known, *([] if limit_bytes is None else [limit_bytes])], default=None)


def be_killed_first() -> None:
    """If memory runs out after all, the OOM killer chooses this process or a descendant, and none of the user's."""
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")


class MemoryWatch:
    """Ends a process, with its descendants, when they exceed a limit together; remembers their peak."""

    def __init__(self, limit_bytes: int | None) -> None:
        self.limit_bytes = limit_bytes
        self.peak_bytes: int | None = None
        self.exceeded_bytes: int | None = None
        self._pid = self._whole = 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="trial-memory", daemon=True)

    def words(self) -> str:
        """What exceeded which limit."""
        limit = f"{(self.limit_bytes or 0) / 1e9:.2f} GB"
        return f"it took {(self.exceeded_bytes or 0) / 1e9:.2f} GB, and {limit} were left for it"

    def begin(self, pid: int, server: int) -> None:
        """Watches this process, which leads its own process group. Memory shared with the server that it was forked
        from counts as its own."""
        self._pid, self._whole = pid, server
        self._thread.start()

    def __enter__(self) -> MemoryWatch:
        return self

    def __exit__(self, *_error: object) -> None:
        self._over.set()
        if self._pid:
            self._thread.join()

    def _watch(self) -> None:
        exactly_due_s = 0.0
        while not self._over.wait(LOOK_EVERY_S):
            about = _about(self._whole)
            near = self.limit_bytes is not None and about > NEAR * self.limit_bytes
            if not near and time.monotonic() < exactly_due_s:
                continue
            exactly_due_s = time.monotonic() + EXACTLY_EVERY_S
            memory = tree_memory(self._whole)
            # Pages of libraries are not counted: others map them as well, and the kernel reclaims them first.
            taken = memory.anonymous_bytes + memory.shared_bytes
            self.peak_bytes = max(taken, self.peak_bytes or 0)
            if self.limit_bytes is not None and taken > self.limit_bytes:
                self.exceeded_bytes = taken
                kill_all(self._pid, running=True)
                return


def _about(pid: int) -> int:
    """A quick upper bound of the processes' memory: shared pages are counted in each of them."""
    found = 0
    for process in tree_pids(pid):
        status = read_counters(PROC / str(process) / "status")
        found += status.get("RssAnon", 0) + status.get("RssShmem", 0)
    return found
