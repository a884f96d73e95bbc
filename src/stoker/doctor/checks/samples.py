"""Preparing a sample costs more than it should: work on far more than the sample, one costly line, a useless cache."""

from __future__ import annotations

from stoker.core.finding import Finding
from stoker.core.units import count, duration_text, size_text
from stoker.doctor.checks.facts import Facts, check
from stoker.doctor.preparing import (
    VOLUMETRIC,
    cache_that_cannot_hit,
    named,
    oversized_work,
    sample_cpu_s,
    workers_that_fit,
)

MOST = 0.5
"""Share of the workers' time from which a line is what limits them: more than everything else together."""
COSTLY_S = 0.05
"""CPU time of a sample: a core makes 20 of them a second, fewer than any accelerator takes."""


def _waiting_for_one_line(facts: Facts) -> float:
    """The share of waiting, if that line is most of what the workers do; less than nothing if the loop does not wait:
    then it is worth knowing, and not the verdict."""
    found = oversized_work(facts.observed)
    if not facts.starved or found is None or found.spot.share < MOST:
        return -1.0
    return facts.observed.times.wait_share or 0.0


@check("whole-volume-preprocessing", "far more is preprocessed than the sample needs", loss=_waiting_for_one_line)
def whole_volume_preprocessing(facts: Facts) -> Finding | None:
    """What: most of a worker's time goes into a function that works on a whole volume, of which a patch is then cut.

    Why: it does the same work again for every sample, and throws nearly all of it away. More workers multiply the
    waste, and the memory that it takes.

    Example: a 3x3x3 median filter over 320x320x320 voxels, 15 s or more, for a patch of 72x136x136.
    """
    found = oversized_work(facts.observed)
    if found is None:
        return None
    spot = found.spot
    if found.is_read:
        what = f"{size_text(found.elements)} are read for a sample, {found.times:.0f} times its size"
    else:
        preparation = facts.observed.preparation
        is_volume = preparation is not None and (preparation.sample_dimensions or 0) >= VOLUMETRIC
        unit, kept = ("voxels", "the patch") if is_volume else ("values", "the sample")
        what = f"it works on {found.elements:,.0f} {unit}, {found.times:.0f} times {kept} that is kept"
    name = "it" if spot.calls is None else spot.calls.split(".")[-1]
    return Finding(
        f"{_cost(facts)}{spot.share:.0%} of it in {named(spot)}: {what}",
        f"run {name} once, before training, and store the result (stoker pack does), or crop first",
        facts.gain("preprocessing"),
    )


@check("costly-line")
def costly_line(facts: Facts) -> Finding | None:
    """What: one line takes most of the time of preparing a sample, and a sample takes long.

    Why: whatever limits this loop now, an accelerator will wait for that line.

    Example: a tokenizer in pure Python, 80 ms a sample, in the dataset's __getitem__.
    """
    spots, cost = facts.spots, sample_cpu_s(facts.observed)
    if not spots or spots[0].share < MOST or cost is None or cost < COSTLY_S:
        return None
    if oversized_work(facts.observed) is not None or facts.is_blocked:  # then it waits there, and does not compute
        return None
    return Finding(
        f"{_cost(facts)}{spots[0].share:.0%} of it in {named(spots[0])}",
        "do that once and store the result, do it on the device, or use a faster function",
    )


@check("cache-cannot-hit")
def cache_cannot_hit(facts: Facts) -> Finding | None:
    """What: a cache in the data set throws entries away, and most samples are not in it.

    Why: samples are drawn in random order from more files than it holds, and each worker has a cache of its own. It
    costs memory, and hits about as often as it holds a share of the data.

    Example: 50 of 806 volumes in each worker: 94 % of the samples read and preprocess a volume again.
    """
    found, preparation = cache_that_cannot_hit(facts.observed), facts.observed.preparation
    if found is None or preparation is None:
        return None
    cache, misses = found
    size = "" if cache.bytes is None else f" ({size_text(cache.bytes)})"
    entries = count(cache.entries, "entry", "entries")
    times = preparation.opens / preparation.files if preparation.files else 1.0
    again = f": {preparation.files:,} files were opened {times:.1f} times each" if times >= 1.1 else ""
    each = "" if facts.observed.loader is None or not facts.observed.loader.workers else " in each worker"
    return Finding(
        f"`{cache.name}` keeps {entries}{size}{each}, and {misses:.0%} of the samples are not in it{again}",
        "store the data so that a patch can be read alone (memory-mapped .npy, Zarr; stoker pack), or drop the cache",
    )


@check("no-memory-for-workers")
def no_memory_for_workers(facts: Facts) -> Finding | None:
    """What: the loop waits, and more workers would not fit into memory.

    Why: the kernel kills a worker, or the whole run, when memory is full; often hours later, when caches have filled.

    Example: 7 GB a worker and 12 cores: 6 workers are 42 GB, and their caches grow to 170.
    """
    fit, shape, host = workers_that_fit(facts.observed), facts.observed.loader, facts.observed.host
    preparation = facts.observed.preparation
    if not facts.starved or fit is None or shape is None or host is None or preparation is None or fit >= host.cpus:
        return None
    assert host.available_bytes is not None
    assert preparation.worker_bytes is not None
    more = "no more workers fit" if fit <= shape.workers else f"not more than {fit} workers fit"
    return Finding(
        f"a worker takes {size_text(preparation.worker_bytes)}, and {size_text(host.available_bytes)} of memory are "
        f"available: {more}",
        "make a worker smaller first: smaller caches, no whole volumes in float32",
    )


def _cost(facts: Facts) -> str:
    """one sample costs 1.4 s of CPU, …"""
    cost = sample_cpu_s(facts.observed)
    return "" if cost is None else f"one sample costs {duration_text(cost)} of CPU, "
