"""What the accelerator wants, against what storage and cores deliver."""

from __future__ import annotations

from stoker.checks.case import Case
from stoker.facts.diagnosis import Need


def needs_against_has(case: Case) -> tuple[Need, ...]:
    """Images and bytes a second: wanted by the accelerator without a wait, and what each part could give."""
    observed = case.observed
    wanted = observed.ceiling_images_per_second
    computing = observed.elapsed_s - observed.wait_s
    if wanted is None and computing > 0 and observed.samples:
        wanted = observed.samples / computing
    if not wanted:
        return ()
    found = []
    if observed.loader_images_per_second is not None:
        how = "the loader alone" if observed.loader is None else f"the loader alone, {observed.loader.workers} workers"
        found.append(Need("loader", "images/s", wanted, observed.loader_images_per_second, how))
    found += _cores(case, wanted)
    found += _storage(case, wanted)
    return tuple(found)


def _cores(case: Case, wanted: float) -> list[Need]:
    split, host, observed = case.split, case.observed.host, case.observed
    if split is None or host is None or not observed.steps or split.cpu_s <= 0:
        return []
    each = split.cpu_s * observed.steps / observed.samples
    how = f"{host.cpus} cores, {each * 1e3:.2g} ms of computing an image"
    return [Need("CPU", "images/s", wanted, host.cpus / each, how)]


def _storage(case: Case, wanted: float) -> list[Need]:
    storage = case.observed.storage
    if storage is None or not storage.bytes_per_sample:
        return []
    kinds = {
        "storage, cold": (storage.parallel_bytes_per_second or storage.cold_bytes_per_second),
        "storage, warm": storage.warm_bytes_per_second,
    }
    readers = {
        "storage, cold": "many readers" if storage.parallel_bytes_per_second else "one reader",
        "storage, warm": "one reader",
    }
    return [
        Need(what, "bytes/s", wanted * storage.bytes_per_sample, has,
             f"{storage.kind or 'storage'}, {readers[what]}, {storage.bytes_per_sample / 1e3:.0f} kB an image")
        for what, has in kinds.items() if has is not None
    ]  # fmt: skip
