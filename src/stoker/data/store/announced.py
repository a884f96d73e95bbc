"""The samples that will be asked for, in the order of their turn."""

from __future__ import annotations

from collections import Counter, deque

import numpy as np
from numpy.typing import NDArray

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
