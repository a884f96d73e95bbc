"""How a script prepares its samples: what one costs, the line that takes the time, work on far more than the sample,
a cache that cannot help, how many workers fit into memory, and what fills it. Pure; for checks and predictions."""

from __future__ import annotations

from dataclasses import dataclass

from stoker.profile.observed import CacheFacts, FilterWork, Held, HotSpot, MemoryGrowth, Observed

WORTH_NAMING = 0.25
"""Share of the time of preparing batches from which a line is worth naming: without it a worker is a third faster."""
FAR_MORE = 4.0
"""Times the sample: a filter on a patch with a margin for its kernel and a rotation works on at most three times it."""
VOLUMETRIC = 4
"""Dimensions of a sample with channels, from which it is a patch of a volume."""
FEWEST_SAMPLES = 8
MISSES = 0.5
"""Share of the samples from which a cache does less than half of what it is there for."""
USABLE = 0.9
"""Share of the available memory: the rest is for what grows meanwhile."""


@dataclass(frozen=True)
class Oversized:
    """Work on far more than a sample needs."""

    spot: HotSpot
    elements: float
    """What one call works on; the bytes that are read for a sample if no call could be measured."""
    times: float
    """What is worked on for one sample, relative to the sample."""
    is_read: bool = False
    """Whether it was measured by what is read."""


def oversized_work(observed: Observed) -> Oversized | None:
    """The line that takes much of the workers' time because it works on far more than the sample, if there is one."""
    preparation = observed.preparation
    if preparation is None or not preparation.sample_elements or preparation.samples < FEWEST_SAMPLES:
        return None
    for spot in preparation.spots:
        work = _filter_at(spot, preparation.filters)
        if spot.share < WORTH_NAMING or work is None:
            continue
        # A cache that helps makes it less for a sample than a call works on.
        times = work.elements / preparation.samples / preparation.sample_elements
        if times >= FAR_MORE:
            return Oversized(spot, work.elements / work.calls, times)
    return _read_far_more(observed)


def _read_far_more(observed: Observed) -> Oversized | None:
    """A function that we do not measure, between reading far more than the sample and cropping it."""
    preparation, storage = observed.preparation, observed.storage
    if preparation is None or (preparation.sample_dimensions or 0) < VOLUMETRIC or not preparation.sample_elements:
        return None
    sizes = [batch.bytes / batch.samples for batch in observed.batches if batch.bytes and batch.samples]
    read = None if storage is None else storage.bytes_per_sample
    spot = next((spot for spot in preparation.spots if spot.share >= 2 * WORTH_NAMING), None)
    if spot is None or not read or not sizes or (spot.calls or "").startswith(READERS):
        return None
    times = read / (sum(sizes) / len(sizes))
    return Oversized(spot, read, times, is_read=True) if times >= FAR_MORE else None


READERS = ("tifffile.", "nibabel.", "h5py.", "zarr.", "PIL.", "imageio.", "numpy.load", "numpy.fromfile", "torch.load")


def _filter_at(spot: HotSpot, filters: tuple[FilterWork, ...]) -> FilterWork | None:
    """The measured function that is called there: of the same package, with the same name."""
    if spot.calls is None:
        return None
    package, name = spot.calls.split(".")[0], spot.calls.split(".")[-1]
    return next((f for f in filters if f.name.split(".")[0] == package and f.name.split(".")[-1] == name), None)


def cache_that_cannot_hit(observed: Observed) -> tuple[CacheFacts, float] | None:
    """A cache that throws entries away, with the share of the samples that it does not have."""
    preparation = observed.preparation
    if preparation is None or preparation.samples < FEWEST_SAMPLES:
        return None
    misses = preparation.samples_that_read / preparation.samples
    cache = next((cache for cache in preparation.caches if cache.evicted), None)
    return (cache, misses) if cache is not None and misses >= MISSES else None


def sample_cpu_s(observed: Observed) -> float | None:
    """CPU time that one sample costs a worker."""
    known = [(batch.cpu_s, batch.samples) for batch in observed.batches if batch.cpu_s is not None]
    samples = sum(count for _, count in known)
    return sum(cpu for cpu, _ in known) / samples if samples else None


def workers_that_fit(observed: Observed) -> int | None:
    """How many workers memory has room for, those that there are included; None if it is not known."""
    host, shape, preparation = observed.host, observed.loader, observed.preparation
    if host is None or host.available_bytes is None or shape is None or preparation is None or not shape.workers:
        return None
    if not preparation.worker_bytes:
        return None
    return shape.workers + int(USABLE * host.available_bytes // preparation.worker_bytes)


def named(spot: HotSpot) -> str:
    """`scipy.ndimage.median_filter`, called in data.py:88 (load)"""
    called = "" if spot.calls is None else f"`{spot.calls}`, called in "
    return f"{called}{spot.file}:{spot.line} ({spot.function})"


HORIZON_S = 24 * 3600.0
"""Memory that lasts another day does not end a run: an epoch, a restart or the end of training comes first."""

SURE_ALONE_S = 60.0
"""If nothing was seen to get longer, memory has to grow for this long: allocators and caches of a young process also
grow for a while (nine seconds of one-second steps looked like 33 GB an hour)."""


@dataclass(frozen=True)
class Filling:
    """Memory that grows until there is none left."""

    bytes_per_second: float
    """Growth of the loop and all workers together."""
    full_in_s: float
    workers: int
    """Worker processes that grow; 0 if it is the loop's process."""
    each_bytes_per_second: float
    """Growth of one of them."""
    available_bytes: int
    """What is left now."""
    held: Held | None
    """What was seen to get longer there."""


def filling(observed: Observed) -> Filling | None:
    """What fills the memory within a day, if anything does."""
    memory, host, shape = observed.memory, observed.host, observed.loader
    if memory is None or host is None or host.available_bytes is None:
        return None
    count = shape.workers if shape is not None and shape.engine == "process" else 0
    each, loop = memory.worker_bytes_per_second or 0.0, memory.loop_bytes_per_second or 0.0
    left = host.available_bytes
    if count and each and (_ends_first(observed, left / (count * each)) or _fits(observed, memory, count, left)):
        each = 0.0
    if loop and _fits(observed, memory, 0, left):
        loop = 0.0
    total = count * each + loop
    if total <= 0 or left / total > HORIZON_S:
        return None
    in_workers = count * each > loop
    held = next((held for held in memory.held if held.in_worker is in_workers), None)
    if held is None and memory.watched_s < SURE_ALONE_S:
        return None
    return Filling(
        bytes_per_second=total,
        full_in_s=left / total,
        workers=count if in_workers else 0,
        each_bytes_per_second=each if in_workers else loop,
        available_bytes=left,
        held=held,
    )


def _ends_first(observed: Observed, full_in_s: float) -> bool:
    """Whether the workers of an epoch end, and give their memory back, before it is full."""
    shape, rate = observed.loader, observed.images_per_second
    if shape is None or shape.persistent is not False or not shape.samples or not rate:
        return False
    return full_in_s > shape.samples / rate


def _fits(observed: Observed, memory: MemoryGrowth, workers: int, available_bytes: int) -> bool:
    """Whether what grows is a cache with at most one entry for each sample, and all of them fit."""
    held = next((held for held in memory.held if held.in_worker is bool(workers)), None)
    grown = memory.worker_grown_bytes if workers else memory.loop_grown_bytes
    samples = observed.loader.samples if observed.loader is not None else None
    if held is None or not held.keyed or held.keeps_graph or grown is None or samples is None or held.now > samples:
        return False
    entry_bytes = max(0.0, grown) / max(1, held.now - held.before)
    return entry_bytes * (samples - held.now) * max(1, workers) <= USABLE * available_bytes
