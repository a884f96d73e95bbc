"""Predicts the speed-up of a change ('num_workers 2 -> 6: 2.1x (1.8-2.3)') by simulating with measured times.

Each prediction is the ratio of two simulations, with the change and without, so that what the simulation does not know
cancels out. The interval is an 80 % one: from resampling the measured batches, and from the error that the model itself
showed when its predictions were checked (results/what_if).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from stoker.core.finding import Estimate
from stoker.doctor.diagnosis import Prediction
from stoker.doctor.preparing import filling, oversized_work, workers_that_fit
from stoker.doctor.simulation import Setup, ThreadWork, simulate
from stoker.plan.records import PACKED_BYTES
from stoker.profile.datasheets import PACKING_SPEEDUP
from stoker.profile.observed import BatchTime, LoaderShape, Observed

DRAWN = 160
"""Batches of one simulation, plus a few for each worker: 3 ms, and steady from the fiftieth on."""
TOGETHER = 8
"""Neighbours that are drawn together."""
BOOTSTRAPS = 12
MODEL_ERROR = 0.06
"""Standard deviation of the logarithm of (predicted / measured): 0.05 on a quiet machine (results/what_if), and a
little for machines that are not quiet."""
NORMAL_80 = 1.2816
"""80 % of a normal distribution are within this many standard deviations."""
ENOUGH = 0.95
"""We advise the smallest setting that reaches this share of the best one, because workers cost memory."""
MOST_WORKERS = 32
WORKERS_PER_CORE = 4
"""Blocked workers need no core, but each needs memory: beyond this, we advise other fixes."""
WORTH_SAYING = 1.02
STAGING_ERROR = 0.18
"""With the model's own error, the root mean square of the logarithm of (predicted / measured) in results/cures: 0.19
over six trials, all of them too low."""
PACKING_ERROR = 0.12
"""The spread of PACKING_SPEEDUP between rounds, as a standard deviation of its logarithm."""

PREPROCESSING_ERROR = 0.2
"""An allowance, not measured: the time of a filter is not quite proportional to what it works on; a patch has a margin,
and fits into the core's cache."""

FEWEST_BATCHES = 8
"""With fewer a mean says little, and nothing is predicted."""


@dataclass(frozen=True)
class LoaderModel:
    """What the simulation needs, from an observation."""

    setup: Setup
    batches: tuple[ThreadWork, ...]
    steps: tuple[ThreadWork, ...]
    images_per_second: float
    fetching: tuple[ThreadWork, ...] | None = None
    """What fetching took of each batch: on a core, by threads beside the workers, and blocked. None if the stages are
    not known."""
    fetched_bytes: tuple[float, ...] | None = None
    most_batches_per_second: float | None = None
    """What storage can deliver at most, however many workers ask."""


Change = Callable[[LoaderModel], LoaderModel]
Drawn = NDArray[np.int64]


def speed_up(model: LoaderModel, change: Change, *, error: float = MODEL_ERROR) -> Estimate:
    changed = change(model)
    count = DRAWN + 4 * max(model.setup.workers, changed.setup.workers)
    logs = []
    for number in range(BOOTSTRAPS):
        # The same draws for both: what is unusual about a draw cancels out.
        rng = np.random.default_rng(number)
        batches, steps = _draw(rng, len(model.batches), count), _draw(rng, len(model.steps), count)
        logs.append(math.log(_rate(changed, batches, steps) / _rate(model, batches, steps)))
    middle = statistics.fmean(logs)
    # Predicting no change at all is nearly always right; the error grows with how much is changed.
    size = min(1.0, 0.5 + abs(middle) / math.log(1.5))
    spread = NORMAL_80 * math.hypot(statistics.stdev(logs), error * size)
    return Estimate(math.exp(middle - spread), math.exp(middle), math.exp(middle + spread))


def rate_of(model: LoaderModel) -> float:
    """Batches a second of one simulation."""
    count = DRAWN + 4 * model.setup.workers
    rng = np.random.default_rng(0)
    return _rate(model, _draw(rng, len(model.batches), count), _draw(rng, len(model.steps), count))


def _draw(rng: np.random.Generator, of: int, count: int) -> Drawn:
    """Indices of measured batches, neighbours together: a hiccup of the machine hits all workers at once, and would
    hold up the queue once for each of them if they were drawn separately."""
    starts = rng.integers(of, size=-(-count // TOGETHER))
    return ((starts[:, None] + np.arange(TOGETHER)) % of).ravel()[:count]


def _rate(model: LoaderModel, batches: Drawn, steps: Drawn) -> float:
    found = simulate(model.setup, [model.batches[i] for i in batches], [model.steps[i] for i in steps])
    return found if model.most_batches_per_second is None else min(found, model.most_batches_per_second)


def what_if(observed: Observed, *, takes_turns: bool = False) -> tuple[Prediction, ...]:
    """Every change that can be predicted from the observation, best first.

    `takes_turns`: the workers wait for one another; then more of them do not help, and no such change is predicted.
    """
    model = model_of(observed)
    if model is None or observed.loader is None:
        return ()
    found = [
        *([] if takes_turns else [_workers(model, observed, observed.loader), _prefetch(model, observed.loader)]),
        _preprocessing(model, observed),
        _staging(model, observed),
        _packing(model, observed),
        _prediction(
            model, "accelerator", observed.faster_model,
            lambda one: replace(one, steps=tuple(ThreadWork(s.cpu_s / 2, s.blocked_s / 2) for s in one.steps)),
        ),
    ]  # fmt: skip
    known = [prediction for prediction in found if prediction is not None]
    return tuple(sorted(known, key=lambda prediction: -prediction.speedup.expected))


def _prediction(
    model: LoaderModel,
    name: str,
    label: str,
    change: Change,
    settings: tuple[tuple[str, int | bool | str], ...] = (),
    error: float = MODEL_ERROR,
) -> Prediction:
    gain = speed_up(model, change, error=error)
    now = model.images_per_second
    return Prediction(name, label, gain, Estimate(gain.low * now, gain.expected * now, gain.high * now), settings)


def with_loader(workers: int, prefetch: int | None = None) -> Change:
    """The same loader with another number of workers, or more batches in flight."""
    return lambda model: replace(
        model, setup=replace(model.setup, workers=workers, prefetch=prefetch or model.setup.prefetch)
    )


def _workers(model: LoaderModel, observed: Observed, shape: LoaderShape) -> Prediction | None:
    cores = max(1, round(model.setup.cores))
    fit = workers_that_fit(observed)
    most = min(MOST_WORKERS, WORKERS_PER_CORE * cores, MOST_WORKERS if fit is None else fit)
    counts = sorted({count for count in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, cores) if count <= most})
    rates = {count: rate_of(with_loader(count)(model)) for count in counts}
    best = max(rates.values())
    wanted = min(count for count, rate in rates.items() if rate >= ENOUGH * best)
    now = rate_of(model)
    if wanted == shape.workers or (wanted > shape.workers and rates[wanted] < WORTH_SAYING * now):
        return None
    if wanted < shape.workers and rates[wanted] < ENOUGH * now:
        return None
    if wanted > shape.workers and filling(observed) is not None:
        return None  # each of them would fill the memory too
    label = f"num_workers {shape.workers} -> {wanted}"
    return _prediction(model, "workers", label, with_loader(wanted), (("num_workers", wanted),))


def _prefetch(model: LoaderModel, shape: LoaderShape) -> Prediction | None:
    if shape.workers == 0:
        return None
    now, more = model.setup.prefetch, model.setup.prefetch * 2
    change = with_loader(shape.workers, more)
    if rate_of(change(model)) < WORTH_SAYING * rate_of(model):
        return None
    return _prediction(model, "prefetch", f"prefetch_factor {now} -> {more}", change, (("prefetch_factor", more),))


def _staging(model: LoaderModel, observed: Observed) -> Prediction | None:
    """Reading from a local disk: the blocked time of fetching becomes what that disk, or the page cache, takes."""
    storage = observed.storage
    if model.fetching is None or storage is None or storage.remote is False:
        return None
    nearby = storage.local_bytes_per_second or storage.warm_bytes_per_second
    if model.fetched_bytes is None or not nearby:
        return None
    local = [size / nearby for size in model.fetched_bytes]
    batches = tuple(
        ThreadWork(
            work.cpu_s - fetch.cpu_s, work.blocked_s - fetch.blocked_s + min(fetch.cpu_s + fetch.blocked_s, there)
        )
        for work, fetch, there in zip(model.batches, model.fetching, local, strict=True)
    )
    return _prediction(
        model, "staging", "staging to local disk",
        lambda one: replace(one, batches=batches, most_batches_per_second=None),
        error=math.hypot(MODEL_ERROR, STAGING_ERROR),
    )  # fmt: skip


def _packing(model: LoaderModel, observed: Observed) -> Prediction | None:
    """Smaller images in shards: less to decode. Measured for our own decoding only."""
    decode, storage = observed.stages.get("decode"), observed.storage
    if observed.source == "script" or decode is None or storage is None or storage.packed is not False:
        return None
    whole = sum(stage.wall_s for stage in observed.stages.values())
    if whole <= 0 or (storage.bytes_per_sample is not None and storage.bytes_per_sample < PACKED_BYTES):
        return None
    factor = 1 - decode.wall_s / whole * (1 - 1 / PACKING_SPEEDUP)
    batches = tuple(ThreadWork(work.cpu_s * factor, work.blocked_s) for work in model.batches)
    return _prediction(
        model, "packing", "packing at 500 px", lambda one: replace(one, batches=batches),
        error=math.hypot(MODEL_ERROR, PACKING_ERROR),
    )  # fmt: skip


def _preprocessing(model: LoaderModel, observed: Observed) -> Prediction | None:
    """The same work on samples only, instead of on far more: what remains of it is what a sample needs."""
    found = oversized_work(observed)
    if found is None:
        return None
    factor = 1 - found.spot.share * (1 - 1 / found.times)
    batches = tuple(ThreadWork(work.cpu_s * factor, work.blocked_s) for work in model.batches)
    name = f"{found.spot.file}:{found.spot.line}" if found.spot.calls is None else found.spot.calls.split(".")[-1]
    return _prediction(
        model, "preprocessing", f"{name} on patches only", lambda one: replace(one, batches=batches, fetching=None),
        error=math.hypot(MODEL_ERROR, PREPROCESSING_ERROR),
    )  # fmt: skip


def model_of(observed: Observed) -> LoaderModel | None:
    """The observation as input of the simulation; None if too little was measured."""
    rate, shape = observed.images_per_second, observed.loader
    known = [b for b in observed.batches if b.cpu_s is not None and b.blocked_s is not None]
    if rate is None or shape is None or len(known) < FEWEST_BATCHES or not observed.times.steps_s:
        return None
    cpus = float(observed.host.cpus) if observed.host is not None else float(max(1, shape.workers))
    batches = tuple(ThreadWork(b.cpu_s or 0.0, b.blocked_s or 0.0) for b in known)
    worker_cpu = sum(work.cpu_s for work in batches) / len(batches)
    batches_per_second = observed.steps / observed.times.elapsed_s
    used_cpu = _step_cpu(observed, worker_cpu, cpus)
    mean_step = max(1e-9, statistics.fmean(observed.times.steps_s))
    step_cpu = _own_cpu(observed, shape, used_cpu, cpus * mean_step)
    # With batches that are already there nothing else uses the cores: the step by itself.
    alone = _alone(observed, mean_step)
    threads = max(1.0, step_cpu / mean_step)
    share = min(1.0, step_cpu / threads / mean_step)
    handover = _handover(observed)
    steps = tuple(
        ThreadWork(handover + alone * seconds * share, alone * seconds * (1 - share))
        for seconds in observed.times.steps_s
    )
    others = _others(observed, worker_cpu + used_cpu, batches_per_second)
    fetching = _fetching(known, used_cpu - step_cpu)
    if fetching is not None:
        # Threads that compute for a waiting worker do so on the core that it leaves.
        batches = tuple(
            ThreadWork(b.cpu_s + f.cpu_s, b.blocked_s - f.cpu_s) for b, f in zip(batches, fetching, strict=True)
        )
    size = None if observed.storage is None else observed.storage.bytes_per_sample
    return LoaderModel(
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
        fetched_bytes=None if size is None else tuple(size * b.samples for b in known),
        most_batches_per_second=_storage_limit(observed),
    )


def _own_cpu(observed: Observed, shape: LoaderShape, used_cpu: float, most_cpu: float) -> float:
    """What the loop itself computes in a step. Threads that fetch may be in the same process: the loop computes only
    while it does not wait, and a paced consumer not at all; the rest is theirs."""
    if shape.engine == "process":
        return used_cpu
    return 0.0 if observed.rates.pace is not None else min(used_cpu, most_cpu)


def _fetching(batches: Sequence[BatchTime], threads_cpu: float) -> tuple[ThreadWork, ...] | None:
    blocked = [min(batch.blocked_s or 0.0, batch.fetch_s) for batch in batches if batch.fetch_s is not None]
    if len(blocked) < len(batches):
        return None
    own = [min(threads_cpu, seconds) for seconds in blocked]
    return tuple(ThreadWork(cpu, seconds - cpu) for cpu, seconds in zip(own, blocked, strict=True))


def _alone(observed: Observed, mean_step: float) -> float:
    """How long a step takes by itself, according to the ceiling, relative to its time beside the workers."""
    if not observed.rates.ceiling or not observed.steps:
        return 1.0
    return min(1.0, observed.samples / observed.steps / observed.rates.ceiling / mean_step)


def _step_cpu(observed: Observed, worker_cpu: float, cpus: float) -> float:
    """CPU seconds of the loop itself in one step. If not measured: without an accelerator the loop computes on a core,
    with one it mostly waits."""
    steps = max(1, observed.steps)
    if observed.times.consumer_cpu_s is not None:
        return observed.times.consumer_cpu_s / steps
    device, busy = observed.accelerator, None if observed.host is None else observed.host.cpu_busy_share
    if busy is None or (device is not None and (device.name or device.count)):
        return 0.0
    used = busy * cpus * observed.times.elapsed_s / steps - worker_cpu
    return max(0.0, min(used, cpus * statistics.fmean(observed.times.steps_s)))


def _others(observed: Observed, ours_a_batch: float, batches_per_second: float) -> float:
    """Cores that other programs used meanwhile."""
    if observed.host is None or observed.host.cpu_busy_share is None or observed.times.consumer_cpu_s is None:
        return 0.0
    return max(0.0, observed.host.cpu_busy_share * observed.host.cpus - ours_a_batch * batches_per_second)


def _handover(observed: Observed) -> float:
    """What it costs to take a batch that is ready: the shortest waits, if they are short enough to be that."""
    if not observed.times.waits_s:
        return 0.0
    shortest = sorted(observed.times.waits_s)[len(observed.times.waits_s) // 10]
    return shortest if shortest < 0.1 * statistics.fmean(observed.times.steps_s) else 0.0


def _storage_limit(observed: Observed) -> float | None:
    storage = observed.storage
    if storage is None or not storage.parallel_bytes_per_second or not storage.bytes_per_sample or not observed.steps:
        return None
    if storage.remote is False:
        return None  # what is read twice comes from the page cache: the cold rate binds only the first epoch
    return storage.parallel_bytes_per_second / (storage.bytes_per_sample * observed.samples / observed.steps)
