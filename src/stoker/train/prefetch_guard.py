"""Reduces prefetching when memory runs low, before the kernel kills a worker.

The batches stay the same; only how far the loader runs ahead of the model changes.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from stoker.core.console import Say
from stoker.core.units import size_text
from stoker.profile.memory import MemoryState, read_memory

if TYPE_CHECKING:
    from stoker.loader.loader import BatchLoader

CHECK_EVERY_S = 1.0
# Acts before earlyoom, which kills processes when 10 % of the memory is left; but 8 GB are enough on any host.
LOW_SHARE = 0.12
LOW_AT_MOST_BYTES = 8_000_000_000
# With half of that left there is no time to reduce step by step.
CRITICAL_PART = 0.5
# If all processes wait for memory for a tenth of the time, the host is thrashing. Re-reading a large data set through
# the page cache stalls as well, with plenty of memory; so stalls only count below twice the low mark.
STALLED = 0.1
STALLED_WITHIN = 2.0
# Batches in flight have to be consumed before their memory is free.
SETTLE_S = 5.0
# A peak such as validation or another job on the host is over by then. A run that shrinks a second time has a leak or
# is too large, and stays small.
GROW_AFTER_S = 600.0


class PrefetchGuard:
    """Call `check` once per step with the loader of the step's batch: it reads a clock, and once a second a few small
    files."""

    def __init__(
        self,
        say: Say,
        *,
        read: Callable[[], MemoryState | None] = read_memory,
        clock: Callable[[], float] = time.monotonic,
        every_s: float = CHECK_EVERY_S,
        settle_s: float = SETTLE_S,
        grow_after_s: float = GROW_AFTER_S,
    ) -> None:
        self._say = say
        self._read = read
        self._clock = clock
        self._every_s = every_s
        self._settle_s = settle_s
        self._grow_after_s = grow_after_s
        self._loader: BatchLoader[Any] | None = None
        self._levels: list[int] = []
        self._level = 0
        """Position in `_levels`; kept when the loader changes."""
        self._next_check = -1.0
        self._settled_at = -1.0
        self._calm_since: float | None = None
        self._times_shrunk = 0

    def check(self, loader: BatchLoader[Any]) -> None:
        """Looks at memory, at most once a second, and reduces the loader's batches in flight if it runs low."""
        if loader is not self._loader or loader.most_in_flight != self._levels[0]:
            self._adopt(loader)
        now = self._clock()
        if now < self._next_check:
            return
        self._next_check = now + self._every_s
        state = self._read()
        if state is None:
            return
        low = min(LOW_SHARE * state.limit_bytes, LOW_AT_MOST_BYTES)
        if is_short(state, low):
            self._calm_since = None
            if now >= self._settled_at:
                self._shrink(state, now, at_once=state.available_bytes < CRITICAL_PART * low)
        elif self._level:
            self._maybe_grow(state, now, low)

    def _adopt(self, loader: BatchLoader[Any]) -> None:
        """Applies the current limit to another loader (another image size, or validation), or to one with other
        workers."""
        self._loader = loader
        self._levels = in_flight_levels(loader.workers, loader.most_in_flight)
        if self._level:
            loader.limit_prefetch(self._target())

    def _target(self) -> int:
        return self._levels[min(self._level, len(self._levels) - 1)]

    def _shrink(self, state: MemoryState, now: float, *, at_once: bool) -> None:
        if self._level >= len(self._levels) - 1:
            return
        before = self._target()
        self._level = len(self._levels) - 1 if at_once else self._level + 1
        self._times_shrunk += 1
        self._settled_at = now + self._settle_s
        self._apply(f"memory is down to {size_text(state.available_bytes)} of {size_text(state.limit_bytes)}", before)

    def _maybe_grow(self, state: MemoryState, now: float, low: float) -> None:
        assert self._loader is not None
        before = self._target()
        larger = self._levels[min(self._level, len(self._levels) - 1) - 1]
        needed = (larger - before) * self._loader.batch_bytes
        if self._times_shrunk > 1 or state.available_bytes < 2 * low + needed:
            self._calm_since = None
            return
        if self._calm_since is None:
            self._calm_since = now
        if now - self._calm_since >= self._grow_after_s:
            self._calm_since = None
            self._level = min(self._level, len(self._levels) - 1) - 1
            self._apply(f"{size_text(state.available_bytes)} of memory are free again", before)

    def _apply(self, reason: str, before: int) -> None:
        assert self._loader is not None
        after, workers = self._target(), max(1, self._loader.workers)
        self._loader.limit_prefetch(after)
        change = f"{before} -> {after} batches in flight"
        if before % workers == after % workers == 0:
            change = f"prefetch_factor {before // workers} -> {after // workers} ({change})"
        self._say(f"{reason}: {change}")


def is_short(state: MemoryState, low: float) -> bool:
    """Whether so little memory is left, or processes wait for it so long, that fewer batches should be in flight."""
    if state.available_bytes < low:
        return True
    return state.stalled is not None and state.stalled >= STALLED and state.available_bytes < STALLED_WITHIN * low


def in_flight_levels(workers: int, most: int) -> list[int]:
    """Batches in flight, level by level: halves the prefetch factor down to one, then the batches down to one."""
    workers = max(1, workers)
    levels, factor = [most], most // workers
    while factor > 1:
        factor //= 2
        levels.append(factor * workers)
    while levels[-1] > 1:
        levels.append(levels[-1] // 2)
    return levels
