"""How fast a loader is when nothing waits for it, and how fast a step is when batches are always ready."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import numpy as np

from stoker.clock.costs import BatchCost
from stoker.clock.steps import Interval, StepClock
from stoker.data.images.sample_index import SampleSet
from stoker.data.loader import BatchLoader

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
"""If nothing came in all the time: a rate of zero could not be compared with others."""


class LinkBalance:
    """What was consumed, and what of it came over the link in the same time.

    A loader that reads far ahead has a store of samples when it begins, and hands them out at the speed of its cores:
    over 6 MB/s, a trial saw 377 images/s of 115 KB. They count as far as others came in for them.
    """

    def __init__(self) -> None:
        self._ready: dict[int, int] = {}
        self._at_first: dict[int, int] = {}
        self._consumed = 0

    def take(self, cost: BatchCost) -> None:
        """A batch was consumed; each process has a store of its own."""
        self._ready[cost.process] = cost.ready_bytes
        self._at_first.setdefault(cost.process, cost.ready_bytes)
        self._consumed += cost.bytes_read

    def begin(self) -> None:
        """It counts from here on."""
        self._at_first, self._consumed = dict(self._ready), 0

    @property
    def share_that_came(self) -> float:
        """At most 1: more than is consumed is of no use."""
        if not self._consumed:
            return 1.0
        stored = sum(self._ready.values()) - sum(self._at_first.values())
        return min(1.0, max(LEAST_CAME, 1 + stored / self._consumed))


def repeated(samples: SampleSet, at_least: int) -> SampleSet:
    """The samples repeated into one long epoch: with a small folder we would otherwise measure epoch starts."""
    times = -(-at_least // len(samples))
    if times <= 1:
        return samples
    members = np.tile(np.arange(len(samples), dtype=np.int64), times)
    labels = samples.labels(members).astype(np.int32)
    return SampleSet(samples.index, samples.classes, samples.indices(members), labels)


def decode_limit(files: list[bytes], workers: int, seconds: float) -> float | None:
    """Images a second that libjpeg-turbo alone decodes in full from memory on `workers` threads; None without JPEGs."""
    import simplejpeg

    jpegs = [data for data in files if simplejpeg.is_jpeg(data)]
    if not jpegs:
        return None
    ends = time.perf_counter() + seconds

    def decode_for_a_while(offset: int) -> int:
        done = 0
        while time.perf_counter() < ends:
            # CMYK and damaged files do not matter for the limit.
            with suppress(ValueError):
                simplejpeg.decode_jpeg(jpegs[(offset + done) % len(jpegs)])
            done += 1
        return done

    started = time.perf_counter()
    with ThreadPoolExecutor(max(1, workers)) as pool:
        done = sum(pool.map(decode_for_a_while, range(0, max(1, workers) * 7, 7)))
    return done / (time.perf_counter() - started)


def _endless(loader: BatchLoader[Any]) -> Iterator[Any]:
    epoch = 0
    while True:
        yield from loader.epoch(epoch)
        epoch += 1


# More than one, so that caches do not hold a single batch; few, so that they fit into memory.
REPLAYED_BATCHES = 4
# The first steps include allocation, the choice of kernels and an empty pipeline.
WARM_UP_STEPS = 3
ENDLESS = 1_000_000_000

ReportSeconds = Callable[[float], None]
"""Called with the seconds measured so far."""


class Replay:
    """A loader that repeats batches from memory: shows how fast the rest of a step is."""

    def __init__(self, batches: Sequence[Any]) -> None:
        self._batches = batches

    def steps(self, start: int = 0) -> int:  # noqa: ARG002 - protocol of the loop
        return ENDLESS

    def epoch(self, epoch: int, start: int = 0) -> Iterator[Any]:  # noqa: ARG002
        while True:
            yield from self._batches


def batches_to_replay(batches: Iterator[Any]) -> list[Any]:
    """Copies of the first few batches, valid after their loader is closed."""
    kept = []
    for batch in islice(batches, REPLAYED_BATCHES):
        images = batch.images.clone()
        kept.append(replace(batch, images=images.pin_memory() if batch.images.is_pinned() else images))
    return kept


class Stopwatch:
    """Lets steps warm up, measures for some seconds, and says when to stop."""

    def __init__(self, clock: StepClock, seconds: float, report: ReportSeconds) -> None:
        self.clock = clock
        self._seconds = seconds
        self._report = report
        self._steps = 0
        self._began_s = time.perf_counter()
        self._measured_from_s: float | None = None
        self._reported_s = 0.0
        self._starts: list[float] = []

    def step(self) -> bool:
        """Call it after each step; True after the last one. At least one step is measured, however long it takes."""
        self._steps += 1
        now = time.perf_counter()
        if self._measured_from_s is None:
            # A step that takes longer than the whole measurement is warm-up enough.
            if self._steps >= WARM_UP_STEPS or now - self._began_s > self._seconds:
                self._starts = self.clock.take_interval().epoch_starts_s
                self._measured_from_s = now
                self._report(0.0)
            return False
        if now - self._reported_s > 0.2:
            self._reported_s = now
            self._report(now - self._measured_from_s)
        return now - self._measured_from_s >= self._seconds

    def interval(self) -> Interval:
        """The steps after the warm-up, and the waits at the start of every epoch."""
        interval = self.clock.take_interval()
        interval.epoch_starts_s = self._starts + interval.epoch_starts_s
        return interval


def consume_at_pace(
    loader: BatchLoader[Any], first_epoch: int, pace_s: float, seconds: float, clock: StepClock, report: ReportSeconds
) -> Interval:
    """A consumer that holds each batch for `pace_s` and uses no core: stands in for an accelerator."""
    watch = Stopwatch(clock, seconds, report)
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
