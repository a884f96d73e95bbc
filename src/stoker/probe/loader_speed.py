"""How fast a loader is by itself: images a second, by number of workers, and what a batch costs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from stoker.clock.costs import BatchCost
from stoker.data.batch import Batch
from stoker.data.index.samples import SampleSet
from stoker.data.loader import ImageLoader

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
