"""All checks in one list, the one thing that is most worth knowing, and what is needed against what is there."""

from __future__ import annotations

from collections.abc import Callable

from stoker.clock.observed import Observed
from stoker.doctor.checks.case import Case
from stoker.doctor.checks.device import (
    compute_bound,
    launch_bound,
    shared_memory_tight,
    slow_conv3d_of_torch_2_9,
    slow_link,
    transfer_bound,
)
from stoker.doctor.checks.preparation import augment_bound, collate_bound, cpu_bound, decode_bound, handover_bound
from stoker.doctor.checks.stalls import epoch_start_share, epoch_start_stalls, slow_samples
from stoker.doctor.checks.storage import page_cache_too_small, storage_bound, waits_elsewhere
from stoker.doctor.checks.workers import (
    cores_are_taken,
    cpu_throttled,
    takes_turns,
    too_few_workers,
    too_many_workers,
    workers_take_turns,
)
from stoker.doctor.records import Diagnosis, Need, Prediction
from stoker.plan.records import Finding

# What the accelerator wants, against what storage and cores deliver.


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


# All checks in one list, and the one thing that is most worth knowing.

CHECKS: tuple[Callable[[Case], Finding | None], ...] = (
    # Why the loop waits for data. Of those that fire, the first here names the cause: what stops everything stands
    # before what is slow, and that before what it is slow at.
    cpu_throttled,
    slow_samples,
    workers_take_turns,
    too_many_workers,
    cores_are_taken,
    handover_bound,
    storage_bound,
    waits_elsewhere,
    too_few_workers,
    decode_bound,
    augment_bound,
    collate_bound,
    cpu_bound,
    # What else takes time.
    epoch_start_stalls,
    transfer_bound,
    launch_bound,
    slow_conv3d_of_torch_2_9,
    compute_bound,
    # What to know besides.
    page_cache_too_small,
    slow_link,
    shared_memory_tight,
)
NEVER_THE_VERDICT = frozenset({"page-cache-too-small", "slow-pcie-link", "shared-memory-tight", "torch-2.9-conv3d"})
"""They say why something else is slow, or what may go wrong."""


def judge(observed: Observed, predictions: tuple[Prediction, ...] = ()) -> Diagnosis:
    """The verdict, everything that was found, ranked by what it would bring, and needs against has."""
    case = Case(observed, predictions)
    found = [finding for check in CHECKS if (finding := check(case)) is not None]
    verdict = _verdict(case, found)
    rest = sorted((f for f in found if f is not verdict), key=_worth, reverse=True)
    findings = (verdict, *rest) if verdict is not None else tuple(rest)
    line = _unknown(observed) if verdict is None else f"{_WORDS.get(verdict.id, verdict.id)}: {verdict.message}"
    return Diagnosis(
        verdict="unknown" if verdict is None else verdict.id,
        line=line,
        findings=findings,
        observed=observed,
        predictions=predictions,
        needs=needs_against_has(case),
    )


def workers_stand_in_line(observed: Observed) -> bool:
    """Whether more workers would only make a line longer, so that none should be predicted."""
    case = Case(observed)
    return takes_turns(case)


def _verdict(case: Case, found: list[Finding]) -> Finding | None:
    """The cause of the largest loss: of waiting, of epochs that begin, of copies, of a device without work."""
    named = {finding.id: finding for finding in found}
    observed = case.observed
    waiting = next((f for f in found if f.id in _OF_WAITING), None)
    accelerator = observed.accelerator
    idle = 0.0
    if accelerator is not None and accelerator.device_busy_share is not None and observed.elapsed_s > 0:
        idle = (1 - accelerator.device_busy_share) * (observed.compute_s or 0.0) / observed.elapsed_s
    losses = {
        waiting.id if waiting is not None else "": observed.wait_share or 0.0,
        "epoch-start-stalls": epoch_start_share(case) or 0.0,
        "transfer-bound": (observed.transfer_s or 0.0) / observed.elapsed_s if observed.elapsed_s > 0 else 0.0,
        "launch-bound": idle,
    }
    fired = {name: loss for name, loss in losses.items() if name in named}
    if fired:
        return named[max(fired, key=lambda name: fired[name])]
    return named.get("compute-bound")


def _worth(finding: Finding) -> float:
    return 0.0 if finding.speedup is None else finding.speedup.expected


def _unknown(observed: Observed) -> str:
    if not observed.steps:
        return "no step was seen; " + ("; ".join(observed.missing) or "nothing can be said")
    return "the loop waits for data, and what the workers did meanwhile could not be seen"


_OF_WAITING = frozenset(
    {
        "slow-samples", "cpu-throttled", "workers-take-turns", "too-many-workers", "handover-bound", "storage-bound",
        "storage-bound-cold", "storage-bound-latency", "storage-bound-bandwidth", "waits-elsewhere",
        "too-few-workers", "cores-are-taken", "decode-bound", "augment-bound", "collate-bound", "cpu-bound",
    }
)  # fmt: skip
_WORDS = {
    "storage-bound": "waiting for storage",
    "storage-bound-cold": "waiting for the local disk",
    "storage-bound-latency": "waiting for remote storage to answer",
    "storage-bound-bandwidth": "waiting for remote storage to deliver",
    "waits-elsewhere": "workers wait, and not for storage",
    "workers-take-turns": "workers take turns",
    "too-few-workers": "too few workers",
    "too-many-workers": "too many workers",
    "cores-are-taken": "other programs take the cores",
    "cpu-throttled": "the CPU quota throttles the workers",
    "slow-samples": "a few slow samples hold up the rest",
    "epoch-start-stalls": "every epoch starts late",
    "decode-bound": "the CPU decodes as fast as it can",
    "augment-bound": "the CPU augments as fast as it can",
    "collate-bound": "the CPU puts batches together as fast as it can",
    "cpu-bound": "the CPU makes batches as fast as it can",
    "handover-bound": "batches are held up between workers and loop",
    "transfer-bound": "the copy to the device holds up steps",
    "launch-bound": "the device waits for the CPU to launch kernels",
    "compute-bound": "the network itself takes the time; stop tuning the data",
}
