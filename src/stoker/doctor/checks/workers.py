"""Too few workers, too many, or workers that stand in each other's way."""

from __future__ import annotations

from stoker.doctor.checks.case import Case
from stoker.doctor.checks.storage import BLOCKED, waits_for_bytes
from stoker.plan.records import Estimate, Finding

FREE = 0.75
"""Of a core that must be free before one more worker can use it: half a core goes to what the system does anyway."""
WORTH_A_WORKER = 1.25
"""A predicted gain that no cores could give that are full."""
QUEUEING = 0.35
"""Of the time in which workers want a core: above, cores are short by half. Two workers that fill two cores
stay below (results/verdicts)."""
DELAYS = 0.20
"""Of the time of making a batch: what hardly computes may stand in line for most of that, and it matters to nobody."""
THROTTLED = 0.10
"""Of the time: the line that is drawn for waiting, too."""
ALWAYS = 0.65
"""Of its time in which a worker makes batches, to say that it always does: hand-overs and full queues take the rest."""
TAKEN = 0.5
"""Cores in use by others from which they are worth a word."""
ALONE = 0.15
"""How far from exactly one core the sum of all workers may be, to call it taking turns."""


def has_free_cores(case: Case) -> bool:
    """Whether another worker would find a core."""
    shape, host, split = case.observed.loader, case.observed.host, case.split
    if shape is None or host is None or split is None:
        return False
    if shape.workers == 0:
        # The loop itself makes the batches: with a second core somebody else could.
        return host.cpus >= 2
    if in_line(case):
        return False
    # What others use does not count: where they leave too little, workers stand in line, and that was asked above.
    if host.cpus - own_cores(case) >= FREE:
        return True
    # A loop that computes on the same cores leaves them to others while it waits, though they are busy on average.
    gain = case.gain("workers")
    return shape.workers < host.cpus and gain is not None and gain.expected >= WORTH_A_WORKER


def in_line(case: Case) -> bool:
    """Whether workers stand in line for cores so much that it delays batches."""
    split = case.split
    return split is not None and split.queueing >= QUEUEING and split.runq >= DELAYS


def has_too_many(case: Case) -> bool:
    """Whether workers stand in line for cores because there are more of them than cores."""
    shape, host, split = case.observed.loader, case.observed.host, case.split
    if shape is None or host is None or split is None:
        return False
    return in_line(case) and _threads(case) > host.cpus


def own_cores(case: Case) -> float:
    """Cores that the workers and the loop use."""
    loop = (case.observed.consumer_cpu_s or 0.0) / case.observed.elapsed_s if case.observed.elapsed_s > 0 else 0.0
    return (case.cores_used or 0.0) + loop


def too_few_workers(case: Case) -> Finding | None:
    """What: the loop waits, the workers compute, and cores stand idle.

    Why: each worker uses one core; the others could make batches too.

    Example: num_workers=2 on 16 cores: 14 of them idle while the accelerator waits 70 % of the time.
    """
    shape, host, split = case.observed.loader, case.observed.host, case.split
    if not case.starved or shape is None or host is None or split is None:
        return None
    if split.blocked >= BLOCKED or not has_free_cores(case) or takes_turns(case):
        return None
    prediction = case.prediction("workers")
    if prediction is not None and prediction.speedup.expected < 1:
        return None
    wanted = host.cpus if prediction is None else dict(prediction.settings)["num_workers"]
    here = {0: "the loop makes its batches itself", 1: "one worker keeps one core busy"}.get(
        shape.workers, f"{shape.workers} workers keep as many cores busy"
    )
    return Finding(
        "too-few-workers",
        f"{here}, and there are {host.cpus} cores",
        case.setting("num_workers", wanted),
        case.gain("workers"),
    )


def too_many_workers(case: Case) -> Finding | None:
    """What: workers, or the threads that each of them starts, stand in line for cores.

    Why: the same work is done in the same time, with more memory, and the loop's own thread stands in that line too.

    Example: 8 workers x 8 OpenMP threads on 8 cores: OMP_NUM_THREADS=1 is the cure.
    """
    host, split, shape = case.observed.host, case.split, case.observed.loader
    if host is None or split is None or shape is None or not case.starved or not has_too_many(case):
        return None
    threads = shape.threads_per_worker or 1
    many = f"{shape.workers} workers" + (f" x {threads} threads" if threads > 1 and shape.workers else "")
    message = f"{many} on {host.cpus} cores: ready to run but in line {split.queueing:.0%} of the time they want a core"
    if threads > 1 and shape.workers <= host.cpus:
        fix = "OMP_NUM_THREADS=1, and torch.set_num_threads(1) in worker_init_fn"
    else:
        fix = case.setting("num_workers", host.cpus)
    return Finding("too-many-workers", message, fix, _gain_of_fewer(case))


def cores_are_taken(case: Case) -> Finding | None:
    """What: workers stand in line for cores although there are no more of them than cores.

    Why: other programs run there, other ranks among them. Their cores are what is missing here.

    Example: four ranks on one host, each planned as if it had all 32 cores.
    """
    host, split, shape = case.observed.host, case.split, case.observed.loader
    if host is None or split is None or shape is None or not case.starved:
        return None
    if split.blocked >= BLOCKED or not in_line(case) or has_too_many(case) or host.cpu_busy_share is None:
        return None
    others = host.cpu_busy_share * host.cpus - own_cores(case)
    if others < TAKEN:
        return None
    return Finding(
        "cores-are-taken",
        f"other programs use {others:.1f} of {host.cpus} cores; workers stand in line {split.queueing:.0%} of the time "
        "they want one",
        "stop what else runs here, or give each job cores of its own (taskset, a cgroup)",
    )


def cpu_throttled(case: Case) -> Finding | None:
    """What: the cgroup's CPU quota stops the whole container for part of the time.

    Why: workers that could run are made to stand still, all at once; fewer of them fit the quota, or the quota grows.

    Example: a pod with `limits: cpu: 2` on a host of 64 cores, and num_workers=16.
    """
    host = case.observed.host
    if host is None or not case.starved:
        return None
    fix = f"a larger CPU limit for the container, or {case.setting('num_workers', host.cpus)}"
    if host.throttled_share is not None and host.throttled_share >= THROTTLED:
        message = f"the container's CPU quota stopped it {host.throttled_share:.0%} of the time"
        return Finding("cpu-throttled", message, fix)
    # Not every kernel lets a container see its own quota. In line while cores are idle is what it looks like.
    idle = None if host.cpu_busy_share is None else (1 - host.cpu_busy_share) * host.cpus
    # Workers that have nothing to do for part of the time leave cores idle too, and queue when they all begin.
    always = case.busy_workers is not None and case.busy_workers >= ALWAYS
    if case.split is None or idle is None or idle < FREE or not always or not in_line(case):
        return None
    return Finding(
        "cpu-throttled",
        f"workers stand in line {case.split.queueing:.0%} of the time they want a core, with {idle:.1f} cores idle: "
        "a CPU quota, or an affinity, holds them back",
        fix,
    )


def workers_take_turns(case: Case) -> Finding | None:
    """What: several workers together compute exactly as much as one could, and wait the rest of the time.

    Why: they share a lock. More workers only make the line longer.

    Example: a h5py file behind one lock; a cache in a multiprocessing.Manager.
    """
    if not case.starved or not takes_turns(case):
        return None
    split, shape = case.split, case.observed.loader
    assert split is not None
    assert shape is not None
    return Finding(
        "workers-take-turns",
        f"{shape.workers} workers together compute {case.cores_used:.2f} cores, and each is blocked "
        f"{split.blocked:.0%} of its time: they hold each other up (a lock, a shared file)",
        "open files and caches in each worker, not before the fork",
    )


def takes_turns(case: Case) -> bool:
    """Whether a lock lets one worker compute at a time: together one core, never idle, and what they wait for is no
    storage. Workers that sleep exactly as long would look the same; that is rare enough."""
    split, shape, used = case.split, case.observed.loader, case.cores_used
    if split is None or shape is None or used is None or shape.workers < 2 or shape.engine == "thread":
        return False
    together = used + running_queue(case)
    return abs(together - 1) <= ALONE and (case.busy_workers or 0.0) > 1 - ALONE and not waits_for_bytes(case)


def running_queue(case: Case) -> float:
    """Workers that stood in line for a core, on average."""
    split, observed = case.split, case.observed
    if split is None or observed.elapsed_s <= 0:
        return 0.0
    return split.runq * split.wall_s * observed.steps / observed.elapsed_s


def _threads(case: Case) -> int:
    shape = case.observed.loader
    assert shape is not None
    return shape.workers * (shape.threads_per_worker or 1)


def _gain_of_fewer(case: Case) -> Estimate | None:
    prediction = case.prediction("workers")
    shape = case.observed.loader
    if prediction is None or shape is None:
        return None
    fewer = dict(prediction.settings).get("num_workers")
    return prediction.speedup if isinstance(fewer, int) and fewer < shape.workers else None
