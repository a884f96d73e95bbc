"""Whether reads block: what distinguishes a warm page cache from a cold disk, a network mount or an object store.

The reader starts threads that read ahead only if reads block.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from stoker.attach.stage_clock import read_schedule

Result = TypeVar("Result")

# Handing a sample from thread to thread costs 0.03 to 0.1 ms; a read from a cold disk or a network mount blocks
# for 0.5 to 20 ms. The two thresholds are a factor of three apart, so that noise does not switch back and forth.
BLOCKS_ABOVE_S = 0.3e-3
FLOWS_BELOW_S = 0.1e-3
# One slow read (a burst of writes elsewhere) must not switch; two in a row do.
LONGEST_COUNTED_S = 2e-3
_WEIGHT = 1 / 8
# A thread that waits for the GIL looks like one that waits for storage, and threads that read ahead make that
# worse: started by mistake they would never stop, and cost a quarter of the speed. So a wait below this counts only if
# the kernel reports bytes read from storage; FUSE mounts report none, but take longer.
LOCK_WAITS_BELOW_S = 1.5e-3
# How often reading a file releases the GIL and waits for it again: open, stat, read, close.
_LOCK_WAITS = 4


class Blocking:
    """A running mean of the time that reads were blocked, and whether reading ahead pays off."""

    def __init__(self, remote: bool) -> None:
        self.blocks = remote
        """Whether threads that read ahead are worth their cost."""
        self.mean_s = BLOCKS_ABOVE_S if remote else 0.0

    def timed(self, read: Callable[[], Result], was_remote: Callable[[], bool]) -> Result:
        """What `read` returns, after recording how long it blocked the thread. Costs about 30 µs."""
        stored = _bytes_from_storage()
        before, start = _used_s(), time.perf_counter()
        result = read()
        after, end = _used_s(), time.perf_counter()
        blocked = end - start - (after - before)
        # Other threads that hold the GIL look like slow storage. That part is subtracted for local files, but not
        # for remote ones: reading those one by one by mistake would cost far more.
        if not was_remote():
            # Reading the times releases the GIL once, and blocks on nothing else.
            lock_wait = time.perf_counter() - end - (_used_s() - after)
            blocked -= _LOCK_WAITS * max(0.0, lock_wait)
            if stored is not None and stored == _bytes_from_storage() and blocked < LOCK_WAITS_BELOW_S:
                blocked = 0.0
        self.note(blocked)
        return result

    def note(self, blocked_s: float) -> None:
        counted = min(max(0.0, blocked_s), LONGEST_COUNTED_S)
        self.mean_s += (counted - self.mean_s) * _WEIGHT
        if self.mean_s > BLOCKS_ABOVE_S:
            self.blocks = True
        elif self.mean_s < FLOWS_BELOW_S:
            self.blocks = False


def _used_s() -> float:
    """Seconds that this thread ran or was runnable; the rest of the time it was blocked."""
    schedule = read_schedule()
    return time.thread_time() + (schedule[1] / 1e9 if schedule is not None else 0.0)


def _bytes_from_storage() -> int | None:
    """Bytes that the kernel has read from disks and network file systems for this thread; None if it does not say."""
    try:
        with open("/proc/thread-self/io", "rb") as file:  # noqa: PTH123 - three times as fast as Path
            for line in file:
                if line.startswith(b"read_bytes:"):
                    return int(line.split()[1])
    except (OSError, ValueError):
        pass
    return None
