"""The two sides of a loader, one at a time: batches that are already there, and a consumer that costs nothing."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import islice

from stoker.clock.interval import Interval
from stoker.clock.steps import StepClock
from stoker.data.batch import Batch
from stoker.data.loader import ImageLoader

# More than one, so that nothing is measured that only the same image again allows; few, so that memory holds them.
REPLAYED_BATCHES = 4
# The first steps pay for allocators, for choosing kernels and for an empty pipeline.
WARM_UP_STEPS = 3
ENDLESS = 1_000_000_000

Tell = Callable[[float], None]
"""Gets the seconds that were measured so far."""


class Replay:
    """A loader whose batches lie in memory, over and over: what the rest of a step can do at most."""

    def __init__(self, batches: Sequence[Batch]) -> None:
        self._batches = batches

    def steps(self, start: int = 0) -> int:  # noqa: ARG002 - the loop's protocol
        return ENDLESS

    def epoch(self, epoch: int, start: int = 0) -> Iterator[Batch]:  # noqa: ARG002
        while True:
            yield from self._batches


def batches_to_replay(batches: Iterator[Batch]) -> list[Batch]:
    """The first few batches, in memory of their own: their loader may be closed afterwards."""
    kept = []
    for batch in islice(batches, REPLAYED_BATCHES):
        images = batch.images.clone()
        kept.append(replace(batch, images=images.pin_memory() if batch.images.is_pinned() else images))
    return kept


class Stopwatch:
    """Lets steps warm up, measures for a while, and says when it is enough."""

    def __init__(self, clock: StepClock, seconds: float, tell: Tell) -> None:
        self.clock = clock
        self._seconds = seconds
        self._tell = tell
        self._steps = 0
        self._began_s = time.perf_counter()
        self._measured_from_s: float | None = None
        self._told_s = 0.0
        self._starts: list[float] = []

    def step(self) -> bool:
        """Call it after each step; whether it was the last. At least one is measured, however long it takes."""
        self._steps += 1
        now = time.perf_counter()
        if self._measured_from_s is None:
            # Where a step takes longer than the whole measurement should, one has to do for warming up.
            if self._steps >= WARM_UP_STEPS or now - self._began_s > self._seconds:
                self._starts = self.clock.take_interval().epoch_starts_s
                self._measured_from_s = now
                self._tell(0.0)
            return False
        if now - self._told_s > 0.2:
            self._told_s = now
            self._tell(now - self._measured_from_s)
        return now - self._measured_from_s >= self._seconds

    def interval(self) -> Interval:
        """The steps after the warm-up, and the waits at the starts of all epochs."""
        interval = self.clock.take_interval()
        interval.epoch_starts_s = self._starts + interval.epoch_starts_s
        return interval


def consume_at_pace(
    loader: ImageLoader, first_epoch: int, pace_s: float, seconds: float, clock: StepClock, tell: Tell
) -> Interval:
    """A consumer that holds each batch for `pace_s` and needs no core: an accelerator where there is none."""
    watch = Stopwatch(clock, seconds, tell)
    epoch = first_epoch
    while True:
        batches = loader.epoch(epoch)
        clock.epoch_begins()
        for _ in range(loader.steps()):
            with clock.waiting():
                batch = next(batches)
            with clock.computing():
                time.sleep(pace_s)
            clock.step_ends([batch])
            if watch.step():
                return watch.interval()
        epoch += 1
