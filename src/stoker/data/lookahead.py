"""Announces coming batches to the reader: the order is known, so their bytes can be on their way already."""

from __future__ import annotations

from stoker.data.making import BatchMaker


class Announcer:
    """Keeps about `budget` bytes' worth of coming steps announced, ahead of the step that is made now."""

    def __init__(
        self, maker: BatchMaker, epoch: int, start: int, count: int, budget: int, *, stride: int, first: int
    ) -> None:
        self._maker = maker
        self._epoch = epoch
        self._start = start
        self._count = count
        self._budget = budget
        self._stride = stride
        self._next = first

    def before(self, step: int) -> None:
        """To be called before a step is made: announces it, and as many later ones as the budget holds."""
        batch_bytes = max(1.0, self._maker.plan.steps.batch_size * self._maker.reader.mean_bytes)
        # Two at least, so that the next batch is fetched while this one is decoded.
        ahead = max(2, int(self._budget / batch_bytes))
        last = min(self._count - 1, step + ahead * self._stride)
        while self._next <= last:
            self._maker.announce(self._epoch, self._next, self._start)
            self._next += self._stride
