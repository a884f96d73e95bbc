"""The workers are blocked: by storage, or by something else."""

from __future__ import annotations

from stoker.core.finding import Estimate, Finding
from stoker.core.units import size_text
from stoker.doctor.checks.facts import Facts, check, waiting_for_data
from stoker.doctor.preparing import WORTH_NAMING, named
from stoker.plan.break_even import (
    ANY_CONFIG,
    StagingFix,
    break_even_of,
    break_even_text,
    dataset_bytes,
    staging_fix,
)
from stoker.profile.mounts import LocalDisk

BANDWIDTH_USED = 0.7
"""Share of what many readers reached together; above it, more requests at once do not help."""
LATENCY_SHARE = 0.5
"""Share of a sample's blocked time that passes before its first byte."""


@check("storage-bound", "waiting for storage", loss=waiting_for_data)
def storage_bound(facts: Facts) -> Finding | None:
    """What: workers are blocked most of the time, reading, and the loop waits for them. What kind of storage it is, or
    which of latency and bandwidth limits it, is not known.

    Why: neither cores nor a faster accelerator help; fewer round trips, more of them at once, or nearer bytes do.

    Example: a network file system that the script reads through a library we do not know.
    """
    storage = facts.observed.storage
    if not _reads_most_of_the_time(facts) or (storage is not None and storage.remote is False):
        return None
    if storage is None or storage.remote is None:
        return _hit(facts, "")
    return _hit(facts, f", from {_kind(facts)}") if _bandwidth_is_used(facts) is None else None


@check("storage-bound-cold", "waiting for the local disk", loss=waiting_for_data)
def local_disk_bound(facts: Facts) -> Finding | None:
    """What: workers are blocked most of the time, reading files from this host's disk that are not in memory.

    Why: neither cores nor a faster accelerator help; smaller files, a faster disk or more workers at once do.

    Example: the first epoch of ImageNet from a hard disk: 120 MB/s, 1,000 images/s at best.
    """
    storage = facts.observed.storage
    if not _reads_most_of_the_time(facts) or storage is None or storage.remote is not False:
        return None
    return _hit(facts, f": cold reads from {_kind(facts)}{_rate(storage.cold_bytes_per_second)}")


@check("storage-bound-latency", "waiting for remote storage to answer", loss=waiting_for_data)
def remote_storage_answers_late(facts: Facts) -> Finding | None:
    """What: workers are blocked most of the time, waiting for the first byte of each sample from remote storage.

    Why: there is bandwidth to spare; more requests at once use it, and a local copy needs none.

    Example: 2 workers, 30 ms to the first byte of an object on S3, 8 samples a batch: 240 ms a batch, 95 % blocked.
    """
    storage = facts.observed.storage
    if not _reads_most_of_the_time(facts) or storage is None or not storage.remote:
        return None
    if _bandwidth_is_used(facts) is not False:
        return None
    latency = "" if storage.latency_s is None else f", {storage.latency_s * 1e3:.0f} ms to the first byte"
    return _hit(facts, f": {_kind(facts)} answers late, one sample after another{latency}")


@check("storage-bound-bandwidth", "waiting for remote storage to deliver", loss=waiting_for_data)
def remote_bandwidth_is_used(facts: Facts) -> Finding | None:
    """What: workers are blocked most of the time, and remote storage delivers all the bytes per second that it can.

    Why: more requests at once do not help; smaller samples or a local copy do.

    Example: a bucket behind a 1 Gb/s link: 125 MB/s, 1,100 photographs/s for all nodes together.
    """
    storage = facts.observed.storage
    if not _reads_most_of_the_time(facts) or storage is None or not storage.remote or not _bandwidth_is_used(facts):
        return None
    return _hit(facts, f": {_kind(facts)} delivers all it can{_rate(storage.parallel_bytes_per_second)}")


@check("waits-elsewhere", "workers wait, but not for storage", loss=waiting_for_data)
def waits_elsewhere(facts: Facts) -> Finding | None:
    """What: workers are blocked most of the time, and read almost nothing meanwhile.

    Why: a lock that they share, a service that they call, a sleep. Faster storage changes nothing.

    Example: a tokenizer behind one multiprocessing.Lock: of 4 workers, three always wait.
    """
    split = facts.split
    if not facts.starved or split is None or not facts.is_blocked or facts.waits_for_bytes:
        return None
    where = max(facts.observed.stages, key=lambda name: facts.observed.stages[name].blocked_s or 0.0, default=None)
    inside = f" in {where}" if where not in (None, "other") else ""
    line = f", mostly in {named(facts.spots[0])}" if facts.spots and facts.spots[0].share >= WORTH_NAMING else ""
    return Finding(
        f"workers are blocked {split.blocked:.0%} of their time{inside}, and read almost nothing meanwhile: "
        f"a lock, a service or a sleep{line}",
        f"{fix}, unless it is a lock" if (fix := _workers_fix(facts)) else "find out what __getitem__ waits for",
        facts.gain("workers"),
    )


def _reads_most_of_the_time(facts: Facts) -> bool:
    return facts.starved and facts.is_blocked and facts.waits_for_bytes


def _hit(facts: Facts, details: str) -> Finding:
    assert facts.split is not None
    gains = [gain for name in ("staging", "workers") if (gain := facts.gain(name)) is not None]
    best: Estimate | None = max(gains, key=lambda gain: gain.expected, default=None)
    fix, about = _fix(facts)
    seen = f"workers spend {facts.split.blocked:.0%} of their time waiting for reads{details}"
    return Finding("; ".join([seen, *about]), fix, best)


def _kind(facts: Facts) -> str:
    storage = facts.observed.storage
    assert storage is not None
    return storage.kind or ("a network" if storage.remote else "a local disk")


def _bandwidth_is_used(facts: Facts) -> bool | None:
    """Whether more requests at once would not deliver more bytes; None if unknown."""
    storage, observed = facts.observed.storage, facts.observed
    if storage is None or not storage.bytes_per_sample or observed.images_per_second is None:
        return None
    if storage.parallel_bytes_per_second is not None:
        return (
            observed.images_per_second * storage.bytes_per_sample >= BANDWIDTH_USED * storage.parallel_bytes_per_second
        )
    split, steps = facts.split, max(1, observed.steps)
    if storage.latency_s is None or split is None:
        return None
    blocked_per_sample = split.blocked * split.wall_s / max(1.0, observed.samples / steps)
    return storage.latency_s < LATENCY_SHARE * blocked_per_sample


def _fix(facts: Facts) -> tuple[str, list[str]]:
    """What to type, and what is to be said about it: the time of copying, and the disk."""
    more_workers = _workers_fix(facts)
    storage = facts.observed.storage
    if storage is not None and storage.remote is False:
        packing = "stoker pack DATA_ROOT PACKED --longest 500 --quality 90"
        return more_workers or (packing if facts.config_line and storage.packed is False else "a faster disk"), []
    staging, workers = facts.gain("staging"), facts.gain("workers")
    if more_workers and (staging is None or (workers is not None and workers.expected > staging.expected)):
        return more_workers, []
    nearer = _staging(facts)
    if nearer is None:
        return "copy the data to a local disk first", []
    pays = break_even_of(facts.observed, staging.expected) if nearer.share == 1 and staging is not None else None
    told = [] if pays is None or pays.epochs is None else [break_even_text(pays)]
    return nearer.fix, [*told, *([nearer.about] if nearer.about else [])]


def _staging(facts: Facts) -> StagingFix | None:
    """The command that brings the data nearer; None for a script whose files were not seen."""
    storage = facts.observed.storage
    root = None if storage is None else storage.root
    source = facts.observed.config or ANY_CONFIG if facts.config_line else root
    if source is None:
        return None
    disk = None
    if storage is not None and storage.local_folder is not None:
        disk = LocalDisk(storage.local_folder, storage.local_free_bytes)
    size = dataset_bytes(facts.observed)
    return staging_fix(source, is_config=facts.config_line, root=root, size_bytes=size, disk=disk)


def _workers_fix(facts: Facts) -> str | None:
    prediction = facts.prediction("workers")
    if prediction is None or prediction.speedup.expected <= 1:
        return None
    return "  ".join(facts.setting(key, value) for key, value in prediction.settings)


def _rate(bytes_per_second: float | None) -> str:
    return "" if bytes_per_second is None else f" ({size_text(bytes_per_second)}/s)"
