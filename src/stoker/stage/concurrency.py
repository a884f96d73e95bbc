"""How many requests are in flight: found while running, because nobody knows it beforehand."""

from __future__ import annotations

import time
from collections.abc import Callable

FEWEST = 4
START = 32
MOST = 512
# A step has to gain this much, or it is taken back: less is noise, and more connections cost CPU.
WORTH_IT = 1.1
# Each level is measured for at least this long, and until this many requests have ended for each that is in flight;
# those that were begun at the level before do not count.
LEAST_S = 0.15
ROUNDS = 1.5
LONGEST_S = 4.0
# After this time the next level is tried again: networks change, and the first result may have been noise.
AGAIN_AFTER_S = 8.0
# After 'slow down' the store gets this long before more is tried.
QUIET_S = 3.0
# Counted for a request in addition to its bytes, so that many tiny objects are work, too; a guess.
REQUEST_BYTES = 32_000


class Concurrency:
    """Doubles while that makes it faster, steps back when it does not, later tries a little more or less again, and
    halves when the store asks to slow down."""

    def __init__(self, fixed: int | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self.limit = START if fixed is None else fixed
        self._fixed, self._clock = fixed is not None, clock
        self._best: tuple[int, float] | None = None
        """The level that is known to be good, and its rate."""
        self._hold_until = 0.0
        self._up, self._doubles = True, True
        self._since, self._work, self._ended, self._settling = 0.0, 0, 0, 0
        self._begin()

    def done(self, size: int) -> None:
        """Counts a request that has succeeded."""
        if self._fixed:
            return
        if self._settling:
            self._settling -= 1
            self._since = self._clock()
            return
        self._work += size + REQUEST_BYTES
        self._ended += 1
        elapsed = self._clock() - self._since
        if elapsed > LONGEST_S or (elapsed > LEAST_S and self._ended >= ROUNDS * self.limit):
            self._judge(self._work / elapsed)

    def slow_down(self) -> None:
        """The store has asked for fewer requests (503, 429)."""
        now = self._clock()
        if self._fixed or now < self._hold_until:
            return  # the requests that were in flight together complain together
        self.limit = max(FEWEST, self.limit // 2)
        self._hold_until = now + QUIET_S
        self._best, self._doubles = None, False
        self._begin()

    def _judge(self, rate: float) -> None:
        now = self._clock()
        if now < self._hold_until:
            if self._best is not None:
                self._best = (self.limit, rate)
        elif self._best is None or rate > self._best[1] * WORTH_IT:
            self._best = (self.limit, rate)
            self.limit = self._next()
        elif self.limit != self._best[0]:
            # Not worth it: back, and later the other way.
            self.limit, self._up, self._doubles = self._best[0], not self._up, False
            self._hold_until = now + AGAIN_AFTER_S
        else:
            self._best = (self.limit, rate)
            self.limit = self._next()
        self._begin()

    def _next(self) -> int:
        assert self._best is not None
        level = self._best[0]
        if self._doubles:
            return min(MOST, 2 * level)
        return min(MOST, level + max(2, level // 2)) if self._up else max(FEWEST, level - max(1, level // 3))

    def _begin(self) -> None:
        self._since, self._work, self._ended, self._settling = self._clock(), 0, 0, self.limit


class RateLimit:
    """Lets this many bytes a second begin; None for no limit."""

    def __init__(self, bytes_per_second: float | None, clock: Callable[[], float] = time.monotonic) -> None:
        self.bytes_per_second, self._clock = bytes_per_second, clock
        self._free_at = clock()

    def wait_s(self) -> float:
        """How long the next request has to wait; 0 if it can begin."""
        return 0.0 if self.bytes_per_second is None else max(0.0, self._free_at - self._clock())

    def take(self, size: int) -> None:
        """Counts a request for this many bytes that begins."""
        if self.bytes_per_second is not None:
            self._free_at = max(self._free_at, self._clock()) + size / self.bytes_per_second
