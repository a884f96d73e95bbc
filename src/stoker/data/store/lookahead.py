"""What the reader needs to read ahead: which samples come next, and whether reading blocks."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from stoker.clock.costs import read_schedule

# The samples that will be asked for, in the order of their turn.

# A whole epoch may be announced at once; only so many numbers of it are Python objects at any time.
_PIECE = 1024


class Announced:
    """A queue from which samples may also be taken before their turn. Not locked: its owner does that."""

    def __init__(self) -> None:
        self._arrays: deque[NDArray[np.int64]] = deque()
        self._next: deque[int] = deque()
        self._taken_early: Counter[int] = Counter()

    def add(self, samples: NDArray[np.int64]) -> None:
        """Appends samples; the array must not change afterwards."""
        self._arrays.append(samples)

    def first(self) -> int | None:
        """Whose turn it is, or None where nothing is announced."""
        while self._next or self._arrays:
            if not self._next:
                self._unpack()
                continue
            sample = self._next[0]
            if sample not in self._taken_early:
                return sample
            self._next.popleft()
            self._taken_early[sample] -= 1
            if not self._taken_early[sample]:
                del self._taken_early[sample]
        # What is left was never announced (a bad sample's replacement): it must not hide a later one.
        self._taken_early.clear()
        return None

    def drop_first(self) -> None:
        """The turn goes to the next."""
        self._next.popleft()

    def take_out(self, sample: int) -> None:
        """This sample has been taken care of: the queue passes over it once."""
        first = self.first()
        if first == sample:
            self._next.popleft()
        elif first is not None:
            self._taken_early[sample] += 1

    def clear(self) -> None:
        """Nothing is announced any more."""
        self._arrays.clear()
        self._next.clear()
        self._taken_early.clear()

    def _unpack(self) -> None:
        array = self._arrays.popleft()
        self._next.extend(array[:_PIECE].tolist())
        if len(array) > _PIECE:
            self._arrays.appendleft(array[_PIECE:])


# Whether reading blocks: the difference between a warm page cache and a cold disk, a network mount, a store.

Result = TypeVar("Result")

# Handing a sample from thread to thread costs 0.03 to 0.1 ms; a read from a cold disk or a network mount blocks
# for 0.5 to 20 ms. Three times apart, so that noise does not make it swing between the two ways.
BLOCKS_ABOVE_S = 0.3e-3
FLOWS_BELOW_S = 0.1e-3
# One hiccup (a burst of writing elsewhere) should not turn the switch: two in a row have to.
LONGEST_COUNTED_S = 2e-3
_WEIGHT = 1 / 8
# A thread that waits for Python's lock looks like one that waits for storage, and threads that read ahead make
# that worse: once switched on by mistake they would stay on, and take a quarter of the speed. So a wait below this
# counts only where the kernel says that bytes really came from storage; FUSE mounts do not say so, but take longer.
LOCK_WAITS_BELOW_S = 1.5e-3
# How often the read of a file gives up Python's lock and waits for it again: open, stat, read, close.
_LOCK_WAITS = 4


class Blocking:
    """A running mean of the time that reads were blocked, and what follows from it."""

    def __init__(self, remote: bool) -> None:
        self.blocks = remote
        """Whether threads that read ahead are worth their cost."""
        self.mean_s = BLOCKS_ABOVE_S if remote else 0.0

    def timed(self, read: Callable[[], Result], was_remote: Callable[[], bool]) -> Result:
        """What `read` returns, after noting how long the thread was blocked by it. Costs about 30 µs."""
        stored = _bytes_from_storage()
        before, start = _used_s(), time.perf_counter()
        result = read()
        after, end = _used_s(), time.perf_counter()
        blocked = end - start - (after - before)
        # Other threads that hold Python's lock look like slow storage. That part is taken off for local files.
        # For remote ones it stays: to read them one by one by mistake would be the far greater loss.
        if not was_remote():
            # Reading the times gives up Python's lock once, and blocks on nothing else.
            lock_wait = time.perf_counter() - end - (_used_s() - after)
            blocked -= _LOCK_WAITS * max(0.0, lock_wait)
            if stored is not None and stored == _bytes_from_storage() and blocked < LOCK_WAITS_BELOW_S:
                blocked = 0.0
        self.note(blocked)
        return result

    def note(self, blocked_s: float) -> None:
        """Counts one read."""
        counted = min(max(0.0, blocked_s), LONGEST_COUNTED_S)
        self.mean_s += (counted - self.mean_s) * _WEIGHT
        if self.mean_s > BLOCKS_ABOVE_S:
            self.blocks = True
        elif self.mean_s < FLOWS_BELOW_S:
            self.blocks = False


def _used_s() -> float:
    """Seconds that this thread ran or was ready to run; the rest of the time it was blocked."""
    schedule = read_schedule()
    return time.thread_time() + (schedule[1] / 1e9 if schedule is not None else 0.0)


def _bytes_from_storage() -> int | None:
    """Bytes that this thread has made the kernel fetch from a disk or a network file system; None where it does
    not say."""
    try:
        with open("/proc/thread-self/io", "rb") as file:  # noqa: PTH123 - three times as fast as by Path
            for line in file:
                if line.startswith(b"read_bytes:"):
                    return int(line.split()[1])
    except (OSError, ValueError):
        pass
    return None
