"""The cores are busy making batches: with what?"""

from __future__ import annotations

from stoker.doctor.checks.case import Case
from stoker.doctor.checks.stalls import slow_share
from stoker.doctor.checks.storage import BLOCKED
from stoker.doctor.checks.workers import cores_are_taken, has_free_cores, has_too_many
from stoker.plan.records import Finding

FIXES = {
    "decode": "stoker pack DATA FOLDER --longest 500 --quality 90",
    "augment": "move augmentation to the device, or to fewer and cheaper operations",
    "collate": "make batches in one buffer: collate_fn that fills a preallocated array, uint8 instead of float32",
}
FOREIGN_DECODE = "smaller images on disk (stoker pack), or a faster decoder (torchvision.io, simplejpeg)"


def _cores_are_full(case: Case) -> bool:
    split = case.split
    return (
        case.starved
        and split is not None
        and split.blocked < BLOCKED
        and not has_free_cores(case)
        and not has_too_many(case)
        and cores_are_taken(case) is None
    )


def _largest(case: Case) -> str | None:
    """The stage that computes most; None where stages are not told apart or most of it is in none."""
    stages = {name: stage.cpu_s if stage.cpu_s is not None else stage.wall_s
              for name, stage in case.observed.stages.items()}  # fmt: skip
    if not stages or set(stages) <= {"other"}:
        return None
    return max(stages, key=lambda name: stages[name])


def decode_bound(case: Case) -> Finding | None:
    """What: every core is busy, most of it with decoding.

    Why: more workers cannot help; fewer pixels to decode, or more cores, do.

    Example: 2 cores, 1.8 ms of decoding an image: 1,100 images/s, whatever num_workers says.
    """
    fix = FIXES["decode"] if case.config_line else FOREIGN_DECODE
    return _bound(case, "decode", fix, "packing")


def augment_bound(case: Case) -> Finding | None:
    """What: every core is busy, most of it with augmentation on the CPU.

    Why: the same on the device costs it little and the cores nothing (nnU-Net #3063: 302 to 146 ms a step).

    Example: elastic deformation of volumes in the dataset's __getitem__.
    """
    return _bound(case, "augment", FIXES["augment"], None)


def collate_bound(case: Case) -> Finding | None:
    """What: most of the workers' time goes into putting samples together.

    Why: each sample is copied once more than needed, often as float32 where uint8 would do, at four times the bytes.

    Example: torch.stack over 64 volumes of 10 MB in default_collate.
    """
    return _bound(case, "collate", FIXES["collate"], None)


def cpu_bound(case: Case) -> Finding | None:
    """What: every core is busy making batches, and in what stage is not known.

    Why: more workers cannot help. A profile of one worker tells where its time goes.

    Example: a dataset that parses text in pure Python.
    """
    if not _cores_are_full(case) or _largest(case) not in (None, "other"):
        return None
    split = case.split
    assert split is not None
    return Finding(
        "cpu-bound",
        f"the cores are full: {split.cpu_s * 1e3:.1f} ms of computing a batch{_cores(case)}; {_more_workers(case)}",
        "py-spy top --pid WORKER shows where; do it once and store the result, or use more cores",
    )


def handover_bound(case: Case) -> Finding | None:
    """What: the loop waits although the workers have time to spare.

    Why: batches get lost between them: pickling, copying into shared memory, pinning, one thread that does it all.

    Example: a dataset that returns dicts of a thousand small tensors: each costs a file descriptor and a copy.
    """
    busy = case.busy_workers_at_most
    if not case.starved or busy is None or busy > IDLE or _is_uneven(case):
        return None
    return Finding(
        "handover-bound",
        f"workers make batches at most {busy:.0%} of their time, and the loop still waits "
        f"{case.observed.wait_share:.0%} of its own: batches are held up on their way (pickling, shared memory, "
        "pinning)",
        "return few large tensors instead of many small ones; uint8 instead of float32",
    )


IDLE = 0.6
"""Workers that a waiting loop is short of have next to nothing else to do; with this much time to spare they are not
what it waits for."""


def _is_uneven(case: Case) -> bool:
    """Slow batches also leave workers idle: they wait in order behind them."""
    share = slow_share(case)
    return share is not None and share > 0.2


def _bound(case: Case, stage: str, fix: str, prediction: str | None) -> Finding | None:
    if not _cores_are_full(case) or _largest(case) != stage:
        return None
    share = case.stage_share(stage) or 0.0
    return Finding(
        f"{stage}-bound",
        f"the cores are full, {share:.0%} of making a batch is {_GERUND[stage]}{_cores(case)}; {_more_workers(case)}",
        fix,
        None if prediction is None else case.gain(prediction),
    )


_GERUND = {"decode": "decoding", "augment": "augmenting", "collate": "putting samples together"}
LITTLE = 1.05
"""A predicted gain below which more workers are said to bring nothing: as much as the prediction may be wrong."""


def _more_workers(case: Case) -> str:
    """Nothing, or the little that cores bring which the loop leaves idle while it waits."""
    gain = case.gain("workers")
    if gain is None or gain.expected < LITTLE:
        return "more workers cannot help"
    return f"more workers bring {gain.expected:.1f}x and no more"


def _cores(case: Case) -> str:
    used, host = case.cores_used, case.observed.host
    return "" if used is None or host is None else f" ({used:.1f} of {host.cpus} cores)"
