"""A loader and its consumer as a simulation takes them: what was measured of each batch and each step."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from stoker.facts.observed import BatchTime, LoaderShape, Observed
from stoker.tuning.loader_simulation import Setup, Work

FEWEST_BATCHES = 8
"""Below that a mean says little; the doctor stays silent."""


@dataclass(frozen=True)
class Model:
    """What the simulation needs to know, from an observation."""

    setup: Setup
    batches: tuple[Work, ...]
    steps: tuple[Work, ...]
    images_per_second: float
    fetching: tuple[Work, ...] | None = None
    """Of each batch what went into getting its bytes: on a core by threads beside the workers, and blocked. None where
    the stages are not known."""
    fetched_bytes: tuple[float, ...] | None = None
    most_batches_per_second: float | None = None
    """What storage can give at most, however many workers ask."""


def model_of(observed: Observed) -> Model | None:
    """The observation as the simulation takes it; None where too little of it was measured."""
    rate, shape = observed.images_per_second, observed.loader
    known = [b for b in observed.batches if b.cpu_s is not None and b.blocked_s is not None]
    if rate is None or shape is None or len(known) < FEWEST_BATCHES or not observed.steps_s:
        return None
    cpus = float(observed.host.cpus) if observed.host is not None else float(max(1, shape.workers))
    batches = tuple(Work(b.cpu_s or 0.0, b.blocked_s or 0.0) for b in known)
    worker_cpu = sum(work.cpu_s for work in batches) / len(batches)
    batches_per_second = observed.steps / observed.elapsed_s
    used_cpu = _step_cpu(observed, worker_cpu, cpus)
    mean_step = max(1e-9, statistics.fmean(observed.steps_s))
    step_cpu = _own_cpu(observed, shape, used_cpu, cpus * mean_step)
    # With batches that are there already nobody else uses the cores: the step as it is by itself.
    alone = _alone(observed, mean_step)
    threads = max(1.0, step_cpu / mean_step)
    share = min(1.0, step_cpu / threads / mean_step)
    handover = _handover(observed)
    steps = tuple(
        Work(handover + alone * seconds * share, alone * seconds * (1 - share)) for seconds in observed.steps_s
    )
    others = _others(observed, worker_cpu + used_cpu, batches_per_second)
    fetching = _fetching(known, used_cpu - step_cpu)
    if fetching is not None:
        # What threads compute for a worker that waits for them, they compute on the core that it leaves.
        batches = tuple(Work(b.cpu_s + f.cpu_s, b.blocked_s - f.cpu_s) for b, f in zip(batches, fetching, strict=True))
    return Model(
        setup=Setup(
            workers=shape.workers,
            prefetch=shape.prefetch or 2,
            round_robin=shape.engine == "process" or (shape.engine == "main" and observed.source == "script"),
            cores=max(0.5, cpus - others),
            consumer_threads=threads,
        ),
        batches=batches,
        steps=steps,
        images_per_second=rate,
        fetching=fetching,
        fetched_bytes=_fetched_bytes(observed, [b.samples for b in known]),
        most_batches_per_second=_storage_limit(observed),
    )


def _own_cpu(observed: Observed, shape: LoaderShape, used_cpu: float, most_cpu: float) -> float:
    """What the loop itself computes in a step. Threads that fetch may live in the same process: the loop computes only
    while it does not wait, and a consumer that keeps a pace not at all; the rest is theirs."""
    if shape.engine == "process":
        return used_cpu
    return 0.0 if observed.pace_images_per_second is not None else min(used_cpu, most_cpu)


def _fetching(batches: Sequence[BatchTime], threads_cpu: float) -> tuple[Work, ...] | None:
    blocked = [min(batch.blocked_s or 0.0, batch.fetch_s) for batch in batches if batch.fetch_s is not None]
    if len(blocked) < len(batches):
        return None
    own = [min(threads_cpu, seconds) for seconds in blocked]
    return tuple(Work(cpu, seconds - cpu) for cpu, seconds in zip(own, blocked, strict=True))


def _alone(observed: Observed, mean_step: float) -> float:
    """What the ceiling says of a step's length, beside what was seen with workers around."""
    if not observed.ceiling_images_per_second or not observed.steps:
        return 1.0
    return min(1.0, observed.samples / observed.steps / observed.ceiling_images_per_second / mean_step)


def _step_cpu(observed: Observed, worker_cpu: float, cpus: float) -> float:
    """CPU seconds of the loop itself in one step. Not seen: what a loop without an accelerator computes, it computes
    on a core; with one it mostly waits."""
    steps = max(1, observed.steps)
    if observed.consumer_cpu_s is not None:
        return observed.consumer_cpu_s / steps
    accelerated = observed.accelerator is not None and bool(observed.accelerator.name or observed.accelerator.count)
    if accelerated:
        return 0.0
    busy = observed.host.cpu_busy_share if observed.host is not None else None
    if busy is None:
        return 0.0
    used = busy * cpus * observed.elapsed_s / steps - worker_cpu
    return max(0.0, min(used, cpus * statistics.fmean(observed.steps_s)))


def _others(observed: Observed, ours_a_batch: float, batches_per_second: float) -> float:
    """Cores that other programs took meanwhile."""
    if observed.host is None or observed.host.cpu_busy_share is None or observed.consumer_cpu_s is None:
        return 0.0
    return max(0.0, observed.host.cpu_busy_share * observed.host.cpus - ours_a_batch * batches_per_second)


def _handover(observed: Observed) -> float:
    """What taking a batch costs that is there already: the shortest waits, where they are short enough to be that."""
    if not observed.waits_s:
        return 0.0
    shortest = sorted(observed.waits_s)[len(observed.waits_s) // 10]
    return shortest if shortest < 0.1 * statistics.fmean(observed.steps_s) else 0.0


def _fetched_bytes(observed: Observed, samples: Sequence[int]) -> tuple[float, ...] | None:
    each = observed.storage.bytes_per_sample if observed.storage is not None else None
    return None if each is None else tuple(each * count for count in samples)


def _storage_limit(observed: Observed) -> float | None:
    storage = observed.storage
    if storage is None or not storage.parallel_bytes_per_second or not storage.bytes_per_sample or not observed.steps:
        return None
    if storage.remote is False:
        return None  # what is read twice comes from the page cache: the cold rate binds only the first epoch
    return storage.parallel_bytes_per_second / (storage.bytes_per_sample * observed.samples / observed.steps)
