"""Something stops the workers: a quota, a slow sample, each other, or the path from them to the loop."""

from __future__ import annotations

import statistics

from stoker.core.finding import Finding
from stoker.doctor.checks.facts import Facts, check, speedup_without, waiting_for_data

THROTTLED = 0.10
"""Share of the time: the same threshold as for waiting."""
IDLE_CORES = 0.75
"""Cores that must be idle to suspect a quota: half a core goes to what the system does anyway."""
ALWAYS = 0.65
"""Share of a worker's time from which it counts as always busy: hand-overs and full queues take the rest."""
TAKEN = 0.5
"""Cores in use by other programs from which they are worth mentioning."""
SLOW = 3.0
"""Times the typical batch: a batch of ordinary samples varies by less than half."""
FEW = 0.25
"""Share of the batches: more than that are not exceptions."""
EXCESS = 0.35
"""Share of the time of preparing all batches that exceptions add, from which they are the cause of the waits."""
SLOW_SAMPLE = 5.0
"""Times a typical sample, to name it."""
NAMED = 3
FEWEST = 16
"""Among fewer batches, nothing counts as an exception."""
IDLE_WORKERS = 0.6
"""Workers that a waiting loop is short of have next to nothing else to do; with this much time to spare they are not
what it waits for."""
UNEVEN = 0.2


@check("cpu-throttled", "the CPU quota throttles the workers", loss=waiting_for_data)
def cpu_throttled(facts: Facts) -> Finding | None:
    """What: the cgroup's CPU quota stops the whole container for part of the time.

    Why: workers that could run are stopped, all at once; either fewer of them fit the quota, or the quota must grow.

    Example: a pod with `limits: cpu: 2` on a host with 64 cores, and num_workers=16.
    """
    host = facts.observed.host
    if host is None or not facts.starved:
        return None
    fix = f"raise the container's CPU limit, or {facts.setting('num_workers', host.cpus)}"
    if host.throttled_share is not None and host.throttled_share >= THROTTLED:
        return Finding(f"the container's CPU quota stopped it {host.throttled_share:.0%} of the time", fix)
    # Not every kernel shows a container its own quota: what one sees is workers that wait for a core beside idle cores.
    idle = None if host.cpu_busy_share is None else (1 - host.cpu_busy_share) * host.cpus
    # Workers that have nothing to do for part of the time leave cores idle too, and queue when they all begin.
    always = facts.busy_workers is not None and facts.busy_workers >= ALWAYS
    if facts.split is None or idle is None or idle < IDLE_CORES or not always or not facts.waits_for_cores:
        return None
    message = (
        f"workers that could run wait for a core {facts.split.queueing:.0%} of the time while {idle:.1f} cores are idle"
    )
    return Finding(f"{message}: a CPU quota or affinity holds them back", fix)


@check("slow-samples", "a few slow samples hold up the rest", loss=waiting_for_data)
def slow_samples(facts: Facts) -> Finding | None:
    """What: a few batches take many times as long as the others, and all later ones wait, because the order is kept.

    Why: more workers only queue behind the same sample; that sample is the thing to look at.

    Example: one 400-megapixel TIFF among photographs: 9 s, every epoch.
    """
    share = _share_of_slow_batches(facts)
    if not facts.starved or share is None or share < EXCESS:
        return None
    walls = _own_times(facts)
    typical = statistics.median(walls)
    slow = [wall for wall in walls if wall > SLOW * typical]
    named = [s for s in facts.observed.slow_samples if s.seconds > SLOW_SAMPLE * s.typical_s][:NAMED]
    names = "; ".join(f"{s.name} {s.seconds * 1e3:.0f} ms (typical {s.typical_s * 1e3:.1f})" for s in named)
    return Finding(
        f"{len(slow)} of {len(walls)} batches take {statistics.median(slow) / typical:.0f} times as long as the "
        f"typical {typical * 1e3:.0f} ms, and later ones wait behind them" + (f": {names}" if names else ""),
        "shrink or re-encode these samples" if named else "find out what these samples have in common",
        speedup_without((facts.observed.times.wait_share or 0.0) * share),
    )


@check("workers-take-turns", "workers block one another", loss=waiting_for_data)
def workers_take_turns(facts: Facts) -> Finding | None:
    """What: several workers together compute exactly as much as one could, and wait the rest of the time.

    Why: they share a lock. More workers only make its queue longer.

    Example: an h5py file behind one lock; a cache in a multiprocessing.Manager.
    """
    if not facts.starved or not facts.takes_turns:
        return None
    split, shape = facts.split, facts.observed.loader
    assert split is not None
    assert shape is not None
    return Finding(
        f"{shape.workers} workers together use {facts.cores_used:.2f} cores, and each is blocked "
        f"{split.blocked:.0%} of its time: they wait for one another (a lock, a shared file)",
        "open files and caches in each worker, not before the fork",
    )


@check("too-many-workers", "too many workers", loss=waiting_for_data)
def too_many_workers(facts: Facts) -> Finding | None:
    """What: workers, or the threads that each of them starts, wait for cores.

    Why: the same work takes as long and needs more memory, and the loop's own thread waits for a core as well.

    Example: 8 workers x 8 OpenMP threads on 8 cores: OMP_NUM_THREADS=1 is the fix.
    """
    host, split, shape = facts.observed.host, facts.split, facts.observed.loader
    if host is None or split is None or shape is None or not facts.starved or not facts.has_too_many_threads:
        return None
    threads = shape.threads_per_worker or 1
    many = f"{shape.workers} workers" + (f" x {threads} threads" if threads > 1 and shape.workers else "")
    if threads > 1 and shape.workers <= host.cpus:
        fix = "OMP_NUM_THREADS=1, and torch.set_num_threads(1) in worker_init_fn"
    else:
        fix = facts.setting("num_workers", host.cpus)
    message = f"{many} on {host.cpus} cores: they wait for a core {split.queueing:.0%} of the time they could run"
    prediction = facts.prediction("workers")
    fewer = None if prediction is None else dict(prediction.settings).get("num_workers")
    return Finding(message, fix, facts.gain("workers") if isinstance(fewer, int) and fewer < shape.workers else None)


@check("cores-are-taken", "other programs use the cores", loss=waiting_for_data)
def cores_are_taken(facts: Facts) -> Finding | None:
    """What: workers wait for cores although there are no more workers than cores.

    Why: other programs run there, perhaps other ranks. The cores that they use are missing here.

    Example: four ranks on one host, each planned as if it had all 32 cores.
    """
    others, host, split = cores_of_others(facts), facts.observed.host, facts.split
    if others is None or host is None or split is None:
        return None
    return Finding(
        f"other programs use {others:.1f} of {host.cpus} cores; workers wait for a core {split.queueing:.0%} of the "
        "time they could run",
        "stop the other programs, or give each job its own cores (taskset, a cgroup)",
    )


@check("handover-bound", "batches are held up between the workers and the loop", loss=waiting_for_data)
def handover_bound(facts: Facts) -> Finding | None:
    """What: the loop waits although the workers have time to spare.

    Why: batches are held up in between: pickling, copying into shared memory, pinning, one thread that does it all.

    Example: a dataset that returns dicts of a thousand small tensors: each costs a file descriptor and a copy.
    """
    busy, slow = facts.busy_workers, _share_of_slow_batches(facts)
    steps, shape = facts.observed.steps, facts.observed.loader
    # With one more batch for each worker, begun and not finished when the observation ended: with few and slow batches
    # these are most of the work.
    if busy is not None and shape is not None and steps:
        busy = min(1.0, busy * (steps + shape.workers) / steps)
    # Slow batches also leave workers idle, because later batches wait for them.
    if not facts.starved or busy is None or busy > IDLE_WORKERS or (slow is not None and slow > UNEVEN):
        return None
    return Finding(
        f"workers are busy at most {busy:.0%} of the time, and the loop still waits "
        f"{facts.observed.times.wait_share:.0%} of its time: handing batches over takes long (pickling, shared memory, "
        "pinning)",
        "return a few large tensors instead of many small ones; uint8 instead of float32",
    )


def cores_of_others(facts: Facts) -> float | None:
    """Cores that other programs keep from the workers; None where that is not what delays batches."""
    host, shape = facts.observed.host, facts.observed.loader
    if host is None or shape is None or not facts.starved or facts.is_blocked:
        return None
    if not facts.waits_for_cores or facts.has_too_many_threads or host.cpu_busy_share is None:
        return None
    others = host.cpu_busy_share * host.cpus - facts.own_cores
    return others if others >= TAKEN else None


def _share_of_slow_batches(facts: Facts) -> float | None:
    """Share of the time of preparing batches that exceptional ones took beyond the typical; None if unknown."""
    walls = _own_times(facts)
    if len(walls) < FEWEST:
        return None
    typical, total = statistics.median(walls), sum(walls)
    slow = [wall for wall in walls if wall > SLOW * typical]
    if not slow or total <= 0 or len(slow) > FEW * len(walls):
        return 0.0
    return sum(wall - typical for wall in slow) / total


def _own_times(facts: Facts) -> list[float]:
    """How long each batch took, without its wait for a core, which depends on other programs, and without full garbage
    collections. A worker's first batch is left out, because it also imports modules and opens files."""
    begun: set[int] = set()
    times = []
    for batch in facts.observed.batches:
        if batch.worker in begun:
            times.append(max(0.0, batch.wall_s - (batch.runq_s or 0.0) - batch.collect_s))
        begun.add(batch.worker)
    return times
