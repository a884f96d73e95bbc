"""How fast a loader is when nothing waits for it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from stoker.loader.loader import BatchLoader
from stoker.profile.batch_costs import BatchCost

# The first batches include the start of the workers and an empty pipeline.
WARM_UP_BATCHES = 2


@dataclass(frozen=True)
class LoaderSpeed:
    """What a loader delivers to a consumer that takes no time."""

    workers: int
    images_per_second: float
    first_batch_s: float
    """From opening the loader to its first batch, start of the workers included."""
    cost: BatchCost
    """Sum over the counted batches."""
    images: int


def measure_loader(open_loader: Callable[[], BatchLoader[Any]], workers: int, seconds: float) -> LoaderSpeed:
    """Opens a loader and runs it for about `seconds` after its warm-up."""
    started = time.perf_counter()
    loader = open_loader()
    cost, images, first_batch_s, counted_from = BatchCost(), 0, 0.0, 0.0
    link = LinkBalance()
    try:
        skip = WARM_UP_BATCHES + max(1, workers)
        for number, batch in enumerate(_endless(loader), 1):
            now = time.perf_counter()
            link.take(batch.cost)
            if number == 1:
                first_batch_s = now - started
            if number == skip:
                counted_from = now
                link.begin()
            elif number > skip:
                images += len(batch)
                cost.add(batch.cost)
                if now - counted_from >= seconds:
                    break
        elapsed = time.perf_counter() - counted_from
    finally:
        loader.close()
    return LoaderSpeed(workers, link.share_that_came * images / elapsed, first_batch_s, cost, images)


LEAST_CAME = 0.01
"""Lowest share, if nothing arrived at all: a rate of zero could not be compared with others."""


class LinkBalance:
    """The bytes consumed, and the share of them that arrived over the link in the same time.

    A loader that reads far ahead has a store of samples when it begins, and hands them out at the speed of its cores:
    over 6 MB/s, a trial saw 377 images/s of 115 KB. They count only as far as others arrived to replace them.
    """

    def __init__(self) -> None:
        self._ready: dict[int, int] = {}
        self._at_first: dict[int, int] = {}
        self._consumed = 0

    def take(self, cost: BatchCost) -> None:
        """Counts a consumed batch; each process has its own store of samples."""
        self._ready[cost.process] = cost.ready_bytes
        self._at_first.setdefault(cost.process, cost.ready_bytes)
        self._consumed += cost.bytes_read

    def begin(self) -> None:
        """Starts counting."""
        self._at_first, self._consumed = dict(self._ready), 0

    @property
    def share_that_came(self) -> float:
        """At most 1: bytes beyond those consumed do not help."""
        if not self._consumed:
            return 1.0
        stored = sum(self._ready.values()) - sum(self._at_first.values())
        return min(1.0, max(LEAST_CAME, 1 + stored / self._consumed))


def _endless(loader: BatchLoader[Any]) -> Iterator[Any]:
    epoch = 0
    while True:
        yield from loader.epoch(epoch)
        epoch += 1
