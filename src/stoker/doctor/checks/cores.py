"""The workers compute all the time: there are too few of them, or the cores are full, and what fills them."""

from __future__ import annotations

from stoker.core.finding import Finding
from stoker.core.units import duration_text
from stoker.doctor.checks.contention import cores_of_others
from stoker.doctor.checks.facts import BLOCKED, PACK, Facts, check, waiting_for_data
from stoker.doctor.preparing import named, workers_that_fit

FREE = 0.75
"""Share of a core that must be free before one more worker can use it: half a core goes to the system anyway."""
WORTH_A_WORKER = 1.25
"""A predicted speed-up that full cores could not explain."""
LITTLE = 1.05
"""A predicted speed-up below which we say that more workers do not help: the prediction may be off by as much."""


@check("too-few-workers", "too few workers", loss=waiting_for_data)
def too_few_workers(facts: Facts) -> Finding | None:
    """What: the loop waits, the workers compute, and cores are idle.

    Why: each worker uses one core; the others could prepare batches too.

    Example: num_workers=2 on 16 cores: 14 of them are idle while the accelerator waits 70 % of the time.
    """
    shape, host = facts.observed.loader, facts.observed.host
    if not facts.starved or shape is None or host is None or facts.split is None:
        return None
    if facts.is_blocked or not _has_free_cores(facts) or facts.takes_turns or facts.filling is not None:
        return None
    prediction = facts.prediction("workers")
    if prediction is not None and prediction.speedup.expected < 1:
        return None
    fit = workers_that_fit(facts.observed)
    most = host.cpus if fit is None else min(host.cpus, fit)
    if prediction is None and shape.workers >= most:
        return None  # without a prediction we would name as many as there are cores, or fit into memory
    wanted = most if prediction is None else dict(prediction.settings)["num_workers"]
    if shape.workers == 0:
        message = f"the training loop prepares its own batches, and there are {host.cpus} cores"
    else:
        workers = "1 worker keeps" if shape.workers == 1 else f"{shape.workers} workers keep"
        message = f"{workers} {facts.cores_used or 0.0:.1f} of {host.cpus} cores busy"
    return Finding(message, facts.setting("num_workers", wanted), facts.gain("workers"))


@check("decode-bound", "decoding takes all the CPU", loss=waiting_for_data)
def decode_bound(facts: Facts) -> Finding | None:
    """What: every core is busy, mostly with decoding.

    Why: more workers cannot help; fewer pixels to decode, or more cores, do.

    Example: 2 cores, 1.8 ms of decoding per image: 1,100 images/s, whatever num_workers is.
    """
    fix = "smaller images on disk (stoker pack), or a faster decoder (torchvision.io, simplejpeg)"
    if facts.config_line:
        fix = PACK if facts.has_large_files else "a faster decoder, or more cores"
    return _full_cores(facts, "decode", "decoding", fix, "packing")


@check("augment-bound", "augmentation takes all the CPU", loss=waiting_for_data)
def augment_bound(facts: Facts) -> Finding | None:
    """What: every core is busy, mostly with augmentation on the CPU.

    Why: the same on the device costs it little and the cores nothing (nnU-Net #3063: 302 to 146 ms a step).

    Example: elastic deformation of volumes in the dataset's __getitem__.
    """
    fix = "move augmentation to the device, or use fewer and cheaper operations"
    return _full_cores(facts, "augment", "augmentation", fix)


@check("preprocess-bound", "preprocessing takes all the CPU", loss=waiting_for_data)
def preprocess_bound(facts: Facts) -> Finding | None:
    """What: every core is busy, mostly with filters and resampling (scipy.ndimage, cv2) outside of an augmentation.

    Why: what is the same for every epoch needs to be done once, before training, and not in each of them.

    Example: a Gaussian filter over each sample: 30 ms, in every epoch.
    """
    fix = "filter and resample once, before training, and store the result; or on the device"
    return _full_cores(facts, "preprocess", "preprocessing", fix)


@check("collate-bound", "collating batches takes all the CPU", loss=waiting_for_data)
def collate_bound(facts: Facts) -> Finding | None:
    """What: most of the workers' time goes into putting samples together.

    Why: each sample is copied once more than needed, often as float32 where uint8 would do, at four times the bytes.

    Example: torch.stack over 64 volumes of 10 MB in default_collate.
    """
    fix = "fill one preallocated array in collate_fn; uint8 instead of float32"
    return _full_cores(facts, "collate", "collating", fix)


@check("cpu-bound", "preparing batches takes all the CPU", loss=waiting_for_data)
def cpu_bound(facts: Facts) -> Finding | None:
    """What: every core is busy preparing batches, and the stage is not known.

    Why: more workers cannot help. The line that takes the time is what to change.

    Example: a dataset that parses text in pure Python.
    """
    if not _cores_are_full(facts) or _largest_stage(facts) not in (None, "other"):
        return None
    assert facts.split is not None
    where = "see where with `py-spy top --pid WORKER`"
    if facts.spots:
        where = f"{facts.spots[0].share:.0%} of it is in {named(facts.spots[0])}"
    return Finding(
        f"all cores are busy, {duration_text(facts.split.cpu_s)} of CPU per batch{_cores(facts)}; "
        f"{_more_workers(facts)}",
        f"{where}; do that work once and store the result, or use more cores",
    )


def _full_cores(facts: Facts, stage: str, doing: str, fix: str, prediction: str | None = None) -> Finding | None:
    if not _cores_are_full(facts) or _largest_stage(facts) != stage:
        return None
    walls = {name: each.wall_s for name, each in facts.observed.stages.items()}
    whole = sum(walls.values())
    share = walls[stage] / whole if whole > 0 else 0.0
    return Finding(
        f"all cores are busy, {share:.0%} of preparing a batch is {doing}{_cores(facts)}; {_more_workers(facts)}",
        fix,
        None if prediction is None else facts.gain(prediction),
    )


def _cores_are_full(facts: Facts) -> bool:
    return (
        facts.starved
        and facts.split is not None
        and facts.split.blocked < BLOCKED
        and not _has_free_cores(facts)
        and not facts.has_too_many_threads
        and cores_of_others(facts) is None
    )


def _has_free_cores(facts: Facts) -> bool:
    """Whether another worker would find a core."""
    shape, host = facts.observed.loader, facts.observed.host
    if shape is None or host is None or facts.split is None:
        return False
    if shape.workers == 0:
        # The loop itself prepares the batches: with a second core a worker could.
        return host.cpus >= 2
    if facts.waits_for_cores:
        return False
    # What others use does not count: where they leave too little, workers wait for cores, which was asked above.
    if host.cpus - facts.own_cores >= FREE:
        return True
    # A loop that computes on the same cores leaves them to others while it waits, though they are busy on average.
    gain = facts.gain("workers")
    return shape.workers < host.cpus and gain is not None and gain.expected >= WORTH_A_WORKER


def _largest_stage(facts: Facts) -> str | None:
    """The stage that computes most; None where stages are not distinguished."""
    stages = facts.observed.stages
    if set(stages) <= {"other"}:
        return None
    busy_s = {name: stage.wall_s if stage.cpu_s is None else stage.cpu_s for name, stage in stages.items()}
    return max(busy_s, key=lambda name: busy_s[name])


def _more_workers(facts: Facts) -> str:
    """Whether more workers help at all, from cores that the loop leaves idle while it waits."""
    gain = facts.gain("workers")
    if gain is None or gain.expected < LITTLE:
        return "more workers cannot help"
    return f"more workers give {gain.expected:.1f}x at most"


def _cores(facts: Facts) -> str:
    used, host = facts.cores_used, facts.observed.host
    return "" if used is None or host is None else f" ({used:.1f} of {host.cpus} cores)"
