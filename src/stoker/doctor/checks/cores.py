"""The workers compute all the time: too few of them, or cores that are full; and of what."""

from __future__ import annotations

from stoker.doctor.checks.case import BLOCKED, PACK, Case, Hit, check, waiting_for_data
from stoker.doctor.checks.contention import cores_of_others
from stoker.doctor.preparing import named, workers_that_fit
from stoker.doctor.words import time_text

FREE = 0.75
"""Of a core that must be free before one more worker can use it: half a core goes to what the system does anyway."""
WORTH_A_WORKER = 1.25
"""A predicted speed-up that could not come from cores that are full."""
LITTLE = 1.05
"""A predicted speed-up below which more workers are said not to help: as much as the prediction may be wrong."""


@check("too-few-workers", "too few workers", loss=waiting_for_data)
def too_few_workers(case: Case) -> Hit | None:
    """What: the loop waits, the workers compute, and cores are idle.

    Why: each worker uses one core; the others could prepare batches too.

    Example: num_workers=2 on 16 cores: 14 of them are idle while the accelerator waits 70 % of the time.
    """
    shape, host = case.observed.loader, case.observed.host
    if not case.starved or shape is None or host is None or case.split is None:
        return None
    if case.is_blocked or not _has_free_cores(case) or case.takes_turns or case.filling is not None:
        return None
    prediction = case.prediction("workers")
    if prediction is not None and prediction.speedup.expected < 1:
        return None
    fit = workers_that_fit(case.observed)
    most = host.cpus if fit is None else min(host.cpus, fit)
    if prediction is None and shape.workers >= most:
        return None  # without a prediction we would name as many as there are cores, or fit into memory
    wanted = most if prediction is None else dict(prediction.settings)["num_workers"]
    if shape.workers == 0:
        message = f"the training loop prepares its own batches, and there are {host.cpus} cores"
    else:
        workers = "1 worker keeps" if shape.workers == 1 else f"{shape.workers} workers keep"
        message = f"{workers} {case.cores_used or 0.0:.1f} of {host.cpus} cores busy"
    return Hit(message, case.setting("num_workers", wanted), case.gain("workers"))


@check("decode-bound", "decoding takes all the CPU", loss=waiting_for_data)
def decode_bound(case: Case) -> Hit | None:
    """What: every core is busy, mostly with decoding.

    Why: more workers cannot help; fewer pixels to decode, or more cores, do.

    Example: 2 cores, 1.8 ms of decoding per image: 1,100 images/s, whatever num_workers is.
    """
    fix = "smaller images on disk (stoker pack), or a faster decoder (torchvision.io, simplejpeg)"
    if case.config_line:
        fix = PACK if case.has_large_files else "a faster decoder, or more cores"
    return _full_cores(case, "decode", "decoding", fix, "packing")


@check("augment-bound", "augmentation takes all the CPU", loss=waiting_for_data)
def augment_bound(case: Case) -> Hit | None:
    """What: every core is busy, mostly with augmentation on the CPU.

    Why: the same on the device costs it little and the cores nothing (nnU-Net #3063: 302 to 146 ms a step).

    Example: elastic deformation of volumes in the dataset's __getitem__.
    """
    fix = "move augmentation to the device, or use fewer and cheaper operations"
    return _full_cores(case, "augment", "augmentation", fix)


@check("preprocess-bound", "preprocessing takes all the CPU", loss=waiting_for_data)
def preprocess_bound(case: Case) -> Hit | None:
    """What: every core is busy, mostly with filters and resampling (scipy.ndimage, cv2) outside of an augmentation.

    Why: what is the same for every epoch needs to be done once, before training, and not in each of them.

    Example: a Gaussian filter over each sample: 30 ms, in every epoch.
    """
    fix = "filter and resample once, before training, and store the result; or on the device"
    return _full_cores(case, "preprocess", "preprocessing", fix)


@check("collate-bound", "collating batches takes all the CPU", loss=waiting_for_data)
def collate_bound(case: Case) -> Hit | None:
    """What: most of the workers' time goes into putting samples together.

    Why: each sample is copied once more than needed, often as float32 where uint8 would do, at four times the bytes.

    Example: torch.stack over 64 volumes of 10 MB in default_collate.
    """
    fix = "fill one preallocated array in collate_fn; uint8 instead of float32"
    return _full_cores(case, "collate", "collating", fix)


@check("cpu-bound", "preparing batches takes all the CPU", loss=waiting_for_data)
def cpu_bound(case: Case) -> Hit | None:
    """What: every core is busy preparing batches, and the stage is not known.

    Why: more workers cannot help. The line that takes the time is what to change.

    Example: a dataset that parses text in pure Python.
    """
    if not _cores_are_full(case) or _largest_stage(case) not in (None, "other"):
        return None
    assert case.split is not None
    return Hit(
        f"all cores are busy, {time_text(case.split.cpu_s)} of CPU per batch{_cores(case)}; {_more_workers(case)}",
        f"{_where(case)}; do that work once and store the result, or use more cores",
    )


def _full_cores(case: Case, stage: str, doing: str, fix: str, prediction: str | None = None) -> Hit | None:
    if not _cores_are_full(case) or _largest_stage(case) != stage:
        return None
    walls = {name: each.wall_s for name, each in case.observed.stages.items()}
    whole = sum(walls.values())
    share = walls[stage] / whole if whole > 0 else 0.0
    return Hit(
        f"all cores are busy, {share:.0%} of preparing a batch is {doing}{_cores(case)}; {_more_workers(case)}",
        fix,
        None if prediction is None else case.gain(prediction),
    )


def _cores_are_full(case: Case) -> bool:
    return (
        case.starved
        and case.split is not None
        and case.split.blocked < BLOCKED
        and not _has_free_cores(case)
        and not case.has_too_many_threads
        and cores_of_others(case) is None
    )


def _has_free_cores(case: Case) -> bool:
    """Whether another worker would find a core."""
    shape, host = case.observed.loader, case.observed.host
    if shape is None or host is None or case.split is None:
        return False
    if shape.workers == 0:
        # The loop itself prepares the batches: with a second core a worker could.
        return host.cpus >= 2
    if case.waits_for_cores:
        return False
    # What others use does not count: where they leave too little, workers wait for cores, which was asked above.
    if host.cpus - case.own_cores >= FREE:
        return True
    # A loop that computes on the same cores leaves them to others while it waits, though they are busy on average.
    gain = case.gain("workers")
    return shape.workers < host.cpus and gain is not None and gain.expected >= WORTH_A_WORKER


def _largest_stage(case: Case) -> str | None:
    """The stage that computes most; None where stages are not distinguished."""
    stages = case.observed.stages
    if set(stages) <= {"other"}:
        return None
    busy_s = {name: stage.wall_s if stage.cpu_s is None else stage.cpu_s for name, stage in stages.items()}
    return max(busy_s, key=lambda name: busy_s[name])


def _more_workers(case: Case) -> str:
    """That more workers do not help, or the little they gain from cores that the loop leaves idle while it waits."""
    gain = case.gain("workers")
    if gain is None or gain.expected < LITTLE:
        return "more workers cannot help"
    return f"more workers give {gain.expected:.1f}x at most"


def _where(case: Case) -> str:
    spots = case.observed.preparation.spots if case.observed.preparation is not None else ()
    if not spots:
        return "see where with `py-spy top --pid WORKER`"
    return f"{spots[0].share:.0%} of it is in {named(spots[0])}"


def _cores(case: Case) -> str:
    used, host = case.cores_used, case.observed.host
    return "" if used is None or host is None else f" ({used:.1f} of {host.cpus} cores)"
