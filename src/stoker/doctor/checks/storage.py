"""The workers stand still until bytes arrive."""

from __future__ import annotations

from stoker.doctor.checks.case import Case
from stoker.plan.records import Estimate, Finding

BLOCKED = 0.5
"""Share of a worker's time from which waiting, not work, is what limits it: more than all the rest together."""
IS_FETCH = 0.5
"""Share of the blocked time that must lie in getting bytes to call it storage."""
BANDWIDTH_USED = 0.7
"""Of what many readers reached together; above, there is no more to have from more requests at once."""
LATENCY_SHARE = 0.5
"""Of a sample's blocked time that passes before its first byte."""
NO_BYTES = 1024
"""Bytes a sample, read by a stage that waits: below, it does not wait for storage."""


def storage_bound(case: Case) -> Finding | None:
    """What: workers are blocked most of the time, in getting bytes, and the loop waits for them.

    Why: neither cores nor a faster accelerator help; fewer round trips, more of them at once, or nearer bytes do.

    Example: 2 workers, 30 ms to the first byte of an object on S3, 8 samples a batch: 240 ms a batch, 95 % blocked.
    """
    split = case.split
    if not case.starved or split is None or split.blocked < BLOCKED or not waits_for_bytes(case):
        return None
    storage = case.observed.storage
    told = f"workers wait for bytes {split.blocked:.0%} of their time"
    if storage is None or storage.remote is None:
        return Finding("storage-bound", told, _fix(case), _gain(case))
    kind = storage.kind or ("a network" if storage.remote else "a local disk")
    if not storage.remote:
        message = f"{told}: cold reads from {kind}"
        return Finding("storage-bound-cold", message + _rate(storage.cold_bytes_per_second), _fix(case), _gain(case))
    used = _bandwidth_is_used(case)
    if used is None:
        return Finding("storage-bound", f"{told}, over {kind}", _fix(case), _gain(case))
    if used:
        message = f"{told}: {kind} gives all the bytes a second that it has"
        return Finding(
            "storage-bound-bandwidth", message + _rate(storage.parallel_bytes_per_second), _fix(case), _gain(case)
        )
    latency = "" if storage.latency_s is None else f", {storage.latency_s * 1e3:.0f} ms until a first byte"
    return Finding(
        "storage-bound-latency", f"{told}: {kind} answers late, one sample after the other{latency}",
        _fix(case), _gain(case),
    )  # fmt: skip


def waits_elsewhere(case: Case) -> Finding | None:
    """What: workers are blocked most of the time, and hardly read a byte meanwhile.

    Why: a lock that they share, a service that they ask, a sleep. Faster storage changes nothing.

    Example: a tokenizer behind one multiprocessing.Lock: 4 workers, three of them always in line.
    """
    split = case.split
    if not case.starved or split is None or split.blocked < BLOCKED or waits_for_bytes(case):
        return None
    where = max(case.observed.stages, key=lambda name: case.observed.stages[name].blocked_s or 0.0, default=None)
    inside = f" in {where}" if where not in (None, "other") else ""
    return Finding(
        "waits-elsewhere",
        f"workers are blocked {split.blocked:.0%} of their time{inside}, and read next to nothing meanwhile: "
        "a lock, a service or a sleep",
        f"{line}, unless it is a lock" if (line := _workers_fix(case)) else "look at what __getitem__ waits for",
        case.gain("workers"),
    )


def page_cache_too_small(case: Case) -> Finding | None:
    """What: the files do not fit into the memory that is left to cache them, so every epoch reads them cold.

    Why: with a little more memory, or smaller files, all epochs but the first would read from memory.

    Example: 140 GB of ImageNet on a host with 62 GB: the second epoch is as slow as the first.
    """
    storage, host, split = case.observed.storage, case.observed.host, case.split
    if storage is None or host is None or split is None or not case.starved or split.blocked < BLOCKED:
        return None
    if storage.dataset_bytes is None or host.page_cache_bytes is None or storage.remote is not False:
        return None
    if storage.dataset_bytes <= host.page_cache_bytes:
        return None
    return Finding(
        "page-cache-too-small",
        f"{storage.dataset_bytes / 1e9:.1f} GB of files, {host.page_cache_bytes / 1e9:.1f} GB of memory to cache them",
        "stoker pack DATA FOLDER --longest 500 --quality 90" if case.config_line else "smaller files, or more memory",
        case.gain("packing"),
    )


def waits_for_bytes(case: Case) -> bool:
    """Whether the blocked time is storage's: it lies in the fetch stage, or, where stages are not told apart, in one
    that reads."""
    stages = case.observed.stages
    blocked = sum(stage.blocked_s or 0.0 for stage in stages.values())
    if not stages or blocked <= 0:
        return True
    fetch = stages.get("fetch")
    if fetch is not None and (fetch.blocked_s or 0.0) >= IS_FETCH * blocked:
        return True
    other = stages.get("other")
    if other is None or (other.blocked_s or 0.0) < IS_FETCH * blocked:
        return False
    # A reader that we do not know. It waits for storage if it reads.
    if other.read_bytes is not None:
        return other.read_bytes >= NO_BYTES * max(1, case.observed.samples)
    storage = case.observed.storage
    return fetch is None and storage is not None and bool(storage.bytes_per_sample)


def _bandwidth_is_used(case: Case) -> bool | None:
    """Whether more requests at once would bring no more bytes; None where nothing tells."""
    storage, observed = case.observed.storage, case.observed
    if storage is None or not storage.bytes_per_sample or observed.images_per_second is None:
        return None
    if storage.parallel_bytes_per_second is not None:
        return (
            observed.images_per_second * storage.bytes_per_sample >= BANDWIDTH_USED * storage.parallel_bytes_per_second
        )
    split, steps = case.split, max(1, observed.steps)
    if storage.latency_s is None or split is None:
        return None
    blocked_a_sample = split.blocked * split.wall_s / max(1.0, observed.samples / steps)
    return storage.latency_s < LATENCY_SHARE * blocked_a_sample


def _gain(case: Case) -> Estimate | None:
    gains = [gain for name in ("staging", "workers") if (gain := case.gain(name)) is not None]
    return max(gains, key=lambda gain: gain.expected, default=None)


def _fix(case: Case) -> str | None:
    nearer = "cache_dir=/local/disk/cache" if case.config_line else "copy the data to a local disk first"
    staging, workers = case.gain("staging"), case.gain("workers")
    if staging is not None and (workers is None or staging.expected >= workers.expected):
        return nearer
    return _workers_fix(case) or nearer


def _workers_fix(case: Case) -> str | None:
    prediction = case.prediction("workers")
    if prediction is None or prediction.speedup.expected <= 1:
        return None
    return "  ".join(case.setting(key, value) for key, value in prediction.settings)


def _rate(bytes_per_second: float | None) -> str:
    return "" if bytes_per_second is None else f" ({bytes_per_second / 1e6:,.0f} MB/s)"
