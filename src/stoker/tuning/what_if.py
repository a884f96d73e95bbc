"""What a change would bring: 'num_workers 2 -> 6: 2.1x (1.8-2.3)', from a simulation fed with measured times.

Each prediction is the ratio of two simulations, with the change and without, so that what the simulation does not know
cancels out. The interval is of 80 %: batches drawn again and again from those that were measured, and the error that
the model itself showed when its predictions were measured (results/what_if).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from stoker.facts.diagnosis import Prediction
from stoker.facts.finding import Interval
from stoker.facts.observed import LoaderShape, Observed
from stoker.tuning.loader_simulation import Setup, Work, simulate

FEWEST_BATCHES = 8
"""Below that a mean says little; the doctor stays silent."""
DRAWN = 160
"""Batches of one simulation, or a round more for each worker: 3 ms, and steady from the fiftieth on."""
TOGETHER = 8
"""Neighbours that are drawn together."""
BOOTSTRAPS = 12
MODEL_ERROR = 0.06
"""Standard deviation of the logarithm of (predicted / measured): 0.05 on a quiet machine (results/what_if), and a
little for what is not quiet."""
NORMAL_80 = 1.2816
"""80 % of a normal distribution lie within so many standard deviations."""
ENOUGH = 0.95
"""The smallest setting that reaches this share of the best one is advised: workers cost memory."""
MOST_WORKERS = 32
WORKERS_PER_CORE = 4
"""Waiting workers need no core, but each needs memory: beyond that we advise other cures."""
WORTH_SAYING = 1.02
PACKED_CPU = 1 / 1.5
"""CPU of an image from a shard of 500 px and quality 90, beside the original (results/loaders: 1,864 and 1,236
images/s with two workers)."""
PACKED_ERROR = 0.12
"""How far that ratio moved between rounds (1.30 to 1.66), as a standard deviation of its logarithm."""


@dataclass(frozen=True)
class Model:
    """What the simulation needs to know, from an observation."""

    setup: Setup
    batches: tuple[Work, ...]
    steps: tuple[Work, ...]
    images_per_second: float
    fetch_blocked: tuple[float, ...] | None = None
    """Of each batch the blocked time that went into getting bytes; None where the stages are not known."""
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
    step_cpu = _step_cpu(observed, worker_cpu, cpus)
    mean_step = max(1e-9, statistics.fmean(observed.steps_s))
    # With batches that are there already nobody else uses the cores: the step as it is by itself.
    alone = _alone(observed, mean_step)
    threads = max(1.0, step_cpu / mean_step)
    share = min(1.0, step_cpu / threads / mean_step)
    handover = _handover(observed)
    steps = tuple(
        Work(handover + alone * seconds * share, alone * seconds * (1 - share)) for seconds in observed.steps_s
    )
    others = _others(observed, worker_cpu + step_cpu, batches_per_second)
    fetch = [min(b.blocked_s or 0.0, b.fetch_s) for b in known if b.fetch_s is not None]
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
        fetch_blocked=tuple(fetch) if len(fetch) == len(known) else None,
        fetched_bytes=_fetched_bytes(observed, [b.samples for b in known]),
        most_batches_per_second=_storage_limit(observed),
    )


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


Change = Callable[[Model], Model]
Drawn = NDArray[np.int64]


def speed_up(model: Model, change: Change, *, error: float = MODEL_ERROR, seed: int = 0) -> Interval:
    """How much faster the loop would be with the change: 80 % interval and expectation."""
    changed = change(model)
    ratios = [_ratio(model, changed, np.random.default_rng(seed + number)) for number in range(BOOTSTRAPS)]
    logs = [math.log(value) for value in ratios]
    middle = statistics.fmean(logs)
    # Predicting no change at all is nearly always right; the error grows with how much is changed.
    size = min(1.0, 0.5 + abs(middle) / math.log(1.5))
    spread = NORMAL_80 * math.hypot(statistics.stdev(logs), error * size)
    return Interval(math.exp(middle - spread), math.exp(middle), math.exp(middle + spread))


def rate_of(model: Model) -> float:
    """Batches a second of one simulation."""
    count = DRAWN + 4 * model.setup.workers
    rng = np.random.default_rng(0)
    return _rate(model, _draw(rng, len(model.batches), count), _draw(rng, len(model.steps), count))


def _ratio(model: Model, changed: Model, rng: np.random.Generator) -> float:
    count = DRAWN + 4 * max(model.setup.workers, changed.setup.workers)
    # The same draws for both: what is unusual about a draw cancels out.
    batches, steps = _draw(rng, len(model.batches), count), _draw(rng, len(model.steps), count)
    return _rate(changed, batches, steps) / _rate(model, batches, steps)


def _draw(rng: np.random.Generator, of: int, count: int) -> Drawn:
    """Numbers of measured batches, neighbours together: a hiccup of the machine hits all workers at once, and would
    hold up the queue once for each of them if they were drawn apart."""
    starts = rng.integers(of, size=-(-count // TOGETHER))
    return ((starts[:, None] + np.arange(TOGETHER)) % of).ravel()[:count]


def _rate(model: Model, batches: Drawn, steps: Drawn) -> float:
    found = simulate(
        model.setup, [model.batches[i] for i in batches], [model.steps[i] for i in steps]
    ).batches_per_second
    return found if model.most_batches_per_second is None else min(found, model.most_batches_per_second)


def what_if(observed: Observed, *, takes_turns: bool = False) -> tuple[Prediction, ...]:
    """Every change that can be judged from the observation, with what it would bring, best first.

    `takes_turns`: the workers wait for one another; then more of them bring nothing, and none is predicted.
    """
    model = model_of(observed)
    if model is None or observed.loader is None:
        return ()
    found = [
        *([] if takes_turns else [_workers(model, observed.loader), _prefetch(model, observed.loader)]),
        _staging(model, observed),
        _packing(model, observed),
        _prediction(model, "accelerator", "a 2x faster accelerator", _faster_accelerator),
    ]
    known = [prediction for prediction in found if prediction is not None]
    return tuple(sorted(known, key=lambda prediction: -prediction.speedup.expected))


def _prediction(
    model: Model,
    name: str,
    label: str,
    change: Change,
    settings: tuple[tuple[str, int | bool | str], ...] = (),
    error: float = MODEL_ERROR,
) -> Prediction:
    gain = speed_up(model, change, error=error)
    now = model.images_per_second
    return Prediction(name, label, gain, Interval(gain.low * now, gain.expected * now, gain.high * now), settings)


def with_loader(workers: int, prefetch: int | None = None) -> Change:
    """The same loader with another number of workers, or more batches in flight."""
    return lambda model: replace(
        model, setup=replace(model.setup, workers=workers, prefetch=prefetch or model.setup.prefetch)
    )


def _workers(model: Model, shape: LoaderShape) -> Prediction | None:
    cores = max(1, round(model.setup.cores))
    most = min(MOST_WORKERS, WORKERS_PER_CORE * cores)
    counts = sorted({count for count in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, cores) if count <= most})
    rates = {count: rate_of(with_loader(count)(model)) for count in counts}
    best = max(rates.values())
    wanted = min(count for count, rate in rates.items() if rate >= ENOUGH * best)
    now = rate_of(model)
    if wanted == shape.workers or (wanted > shape.workers and rates[wanted] < WORTH_SAYING * now):
        return None
    if wanted < shape.workers and rates[wanted] < ENOUGH * now:
        return None
    label = f"num_workers {shape.workers} -> {wanted}"
    return _prediction(model, "workers", label, with_loader(wanted), (("num_workers", wanted),))


def _prefetch(model: Model, shape: LoaderShape) -> Prediction | None:
    if shape.workers == 0:
        return None
    now, more = model.setup.prefetch, model.setup.prefetch * 2
    change = with_loader(shape.workers, more)
    if rate_of(change(model)) < WORTH_SAYING * rate_of(model):
        return None
    return _prediction(model, "prefetch", f"prefetch_factor {now} -> {more}", change, (("prefetch_factor", more),))


def _staging(model: Model, observed: Observed) -> Prediction | None:
    """Bytes from a local disk: the blocked time of fetching becomes what the page cache or a local disk takes."""
    storage = observed.storage
    if model.fetch_blocked is None or storage is None or storage.remote is False:
        return None
    if model.fetched_bytes is None or not storage.warm_bytes_per_second:
        return None
    local = [size / storage.warm_bytes_per_second for size in model.fetched_bytes]
    batches = tuple(
        Work(work.cpu_s, work.blocked_s - fetch + min(fetch, there))
        for work, fetch, there in zip(model.batches, model.fetch_blocked, local, strict=True)
    )
    return _prediction(
        model,
        "staging",
        "staging to local disk",
        lambda one: replace(one, batches=batches, most_batches_per_second=None),
    )


def _packing(model: Model, observed: Observed) -> Prediction | None:
    """Smaller images in shards: less to decode. Measured for our own decoding only."""
    decode, storage = observed.stages.get("decode"), observed.storage
    if observed.source == "script" or decode is None or storage is None or storage.packed is not False:
        return None
    whole = sum(stage.wall_s for stage in observed.stages.values())
    if whole <= 0:
        return None
    factor = 1 - decode.wall_s / whole * (1 - PACKED_CPU)
    batches = tuple(Work(work.cpu_s * factor, work.blocked_s) for work in model.batches)
    return _prediction(
        model,
        "packing",
        "packing at 500 px",
        lambda one: replace(one, batches=batches),
        error=math.hypot(MODEL_ERROR, PACKED_ERROR),
    )


def _faster_accelerator(model: Model) -> Model:
    return replace(model, steps=tuple(Work(step.cpu_s / 2, step.blocked_s / 2) for step in model.steps))
