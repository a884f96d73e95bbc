"""How fast a loader is by itself, and how fast a consumer that never waits."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice

import numpy as np

from stoker.clock.costs import BatchCost
from stoker.clock.steps import Interval, StepClock
from stoker.data.batch import Batch
from stoker.data.images.sample_index import SampleSet
from stoker.data.loader import ImageLoader

# How fast a loader is by itself: images a second, by number of workers, and what a batch costs.

# The first batches pay for starting workers and for an empty pipeline.
WARM_UP_BATCHES = 2


@dataclass(frozen=True)
class LoaderSpeed:
    """What a loader delivered to a consumer that takes no time."""

    workers: int
    images_per_second: float
    first_batch_s: float
    """Until the first batch was there, workers started."""
    cost: BatchCost
    """Sum over the counted batches."""
    images: int


def measure_loader(open_loader: Callable[[], ImageLoader], workers: int, seconds: float) -> LoaderSpeed:
    """Runs a fresh loader for about so many seconds after its warm-up."""
    started = time.perf_counter()
    loader = open_loader()
    cost, images, first_batch_s, counted_from = BatchCost.zero(), 0, 0.0, 0.0
    try:
        skip = WARM_UP_BATCHES + max(1, workers)
        for number, batch in enumerate(_endless(loader), 1):
            now = time.perf_counter()
            if number == 1:
                first_batch_s = now - started
            if number == skip:
                counted_from = now
            elif number > skip:
                images += len(batch)
                cost.add(batch.cost)
                if now - counted_from >= seconds:
                    break
        elapsed = time.perf_counter() - counted_from
    finally:
        loader.close()
    return LoaderSpeed(workers, images / elapsed, first_batch_s, cost, images)


def repeated(samples: SampleSet, at_least: int) -> SampleSet:
    """The samples over and over, as one long epoch: a small folder would otherwise measure epoch starts."""
    times = -(-at_least // len(samples))
    if times <= 1:
        return samples
    members = np.tile(np.arange(len(samples), dtype=np.int64), times)
    labels = samples.labels(members).astype(np.int32)
    return SampleSet(samples.index, samples.classes, samples.numbers(members), labels)


def decode_limit(files: list[bytes], workers: int, seconds: float) -> float | None:
    """Images a second that bare libjpeg-turbo decodes whole, from memory, with as many threads; None where
    none of the files is a JPEG."""
    import simplejpeg

    jpegs = [data for data in files if simplejpeg.is_jpeg(data)]
    if not jpegs:
        return None
    ends = time.perf_counter() + seconds

    def decode_for_a_while(offset: int) -> int:
        done = 0
        while time.perf_counter() < ends:
            # CMYK and damaged files are a decoder's business, not the limit's.
            with suppress(ValueError):
                simplejpeg.decode_jpeg(jpegs[(offset + done) % len(jpegs)])
            done += 1
        return done

    started = time.perf_counter()
    with ThreadPoolExecutor(max(1, workers)) as pool:
        done = sum(pool.map(decode_for_a_while, range(0, max(1, workers) * 7, 7)))
    return done / (time.perf_counter() - started)


def _endless(loader: ImageLoader) -> Iterator[Batch]:
    epoch = 0
    while True:
        yield from loader.epoch(epoch)
        epoch += 1


# The two sides of a loader, one at a time: batches that are already there, and a consumer that costs nothing.

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
