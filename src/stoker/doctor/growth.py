"""Whether memory that grows will be full, when, and what fills it. Pure; for checks and predictions."""

from __future__ import annotations

from dataclasses import dataclass

from stoker.doctor.preparing import USABLE
from stoker.profile.observed import Held, MemoryGrowth, Observed

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
    held: Held | None
    """What was seen to get longer there."""


def filling(observed: Observed) -> Filling | None:
    """What fills the memory within a day, if anything does."""
    memory, host, shape = observed.memory, observed.host, observed.loader
    if memory is None or host is None or host.available_bytes is None:
        return None
    count = shape.workers if shape is not None and shape.engine == "process" else 0
    each, loop = memory.worker_bytes_per_second or 0.0, memory.loop_bytes_per_second or 0.0
    if count and each and (_ends_first(observed, count * each) or _fits(observed, memory, count)):
        each = 0.0
    if loop and _fits(observed, memory, 0):
        loop = 0.0
    total = count * each + loop
    if total <= 0 or host.available_bytes / total > HORIZON_S:
        return None
    in_workers = count * each > loop
    held = next((held for held in memory.held if held.in_worker is in_workers), None)
    if held is None and memory.watched_s < SURE_ALONE_S:
        return None
    return Filling(
        bytes_per_second=total,
        full_in_s=host.available_bytes / total,
        workers=count if in_workers else 0,
        each_bytes_per_second=each if in_workers else loop,
        held=held,
    )


def _ends_first(observed: Observed, bytes_per_second: float) -> bool:
    """Whether the workers of an epoch end, and give their memory back, before it is full."""
    shape, host, rate = observed.loader, observed.host, observed.images_per_second
    if shape is None or shape.persistent is not False or not shape.samples or not rate:
        return False
    assert host is not None
    assert host.available_bytes is not None
    return host.available_bytes / bytes_per_second > shape.samples / rate


def _fits(observed: Observed, memory: MemoryGrowth, workers: int) -> bool:
    """Whether what grows is a cache with at most one entry for each sample, and all of them fit."""
    held = next((held for held in memory.held if held.in_worker is bool(workers)), None)
    grown = memory.worker_grown_bytes if workers else memory.loop_grown_bytes
    samples = observed.loader.samples if observed.loader is not None else None
    if held is None or not held.keyed or held.keeps_graph or grown is None or samples is None or held.now > samples:
        return False
    assert observed.host is not None
    assert observed.host.available_bytes is not None
    entry_bytes = max(0.0, grown) / max(1, held.now - held.before)
    return entry_bytes * (samples - held.now) * max(1, workers) <= USABLE * observed.host.available_bytes
