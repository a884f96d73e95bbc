"""What a change would bring: 'num_workers 2 -> 6: 2.1x (1.8-2.3)', from a simulation fed with measured times.

Each prediction is the ratio of two simulations, with the change and without, so that what the simulation does not know
cancels out. The interval is of 80 %: batches drawn again and again from those that were measured, and the error that
the model itself showed when its predictions were measured (results/what_if).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from stoker.clock.observed import LoaderShape, Observed
from stoker.data.images.pack.packing import PACKING_SPEEDUP
from stoker.doctor.records import Prediction
from stoker.doctor.simulation import Model, Work, model_of, simulate
from stoker.plan.records import Estimate

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
STAGING_ERROR = 0.18
"""With the model's own error, the root mean square of the logarithm of (predicted / measured) in results/cures: 0.19
over six trials, all of them too low."""
PACKING_ERROR = 0.12
"""How far PACKING_SPEEDUP moved between rounds, as a standard deviation of its logarithm."""


Change = Callable[[Model], Model]
Drawn = NDArray[np.int64]


def speed_up(model: Model, change: Change, *, error: float = MODEL_ERROR, seed: int = 0) -> Estimate:
    """How much faster the loop would be with the change: 80 % interval and expectation."""
    changed = change(model)
    ratios = [_ratio(model, changed, np.random.default_rng(seed + number)) for number in range(BOOTSTRAPS)]
    logs = [math.log(value) for value in ratios]
    middle = statistics.fmean(logs)
    # Predicting no change at all is nearly always right; the error grows with how much is changed.
    size = min(1.0, 0.5 + abs(middle) / math.log(1.5))
    spread = NORMAL_80 * math.hypot(statistics.stdev(logs), error * size)
    return Estimate(math.exp(middle - spread), math.exp(middle), math.exp(middle + spread))


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
    return Prediction(name, label, gain, Estimate(gain.low * now, gain.expected * now, gain.high * now), settings)


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
    """Bytes from a local disk: the blocked time of fetching becomes what that disk, or the page cache, takes."""
    storage = observed.storage
    if model.fetching is None or storage is None or storage.remote is False:
        return None
    nearby = storage.local_bytes_per_second or storage.warm_bytes_per_second
    if model.fetched_bytes is None or not nearby:
        return None
    local = [size / nearby for size in model.fetched_bytes]
    batches = tuple(
        Work(work.cpu_s - fetch.cpu_s, work.blocked_s - fetch.blocked_s + min(fetch.cpu_s + fetch.blocked_s, there))
        for work, fetch, there in zip(model.batches, model.fetching, local, strict=True)
    )
    return _prediction(
        model,
        "staging",
        "staging to local disk",
        lambda one: replace(one, batches=batches, most_batches_per_second=None),
        error=math.hypot(MODEL_ERROR, STAGING_ERROR),
    )


def _packing(model: Model, observed: Observed) -> Prediction | None:
    """Smaller images in shards: less to decode. Measured for our own decoding only."""
    decode, storage = observed.stages.get("decode"), observed.storage
    if observed.source == "script" or decode is None or storage is None or storage.packed is not False:
        return None
    whole = sum(stage.wall_s for stage in observed.stages.values())
    if whole <= 0:
        return None
    factor = 1 - decode.wall_s / whole * (1 - 1 / PACKING_SPEEDUP)
    batches = tuple(Work(work.cpu_s * factor, work.blocked_s) for work in model.batches)
    return _prediction(
        model,
        "packing",
        "packing at 500 px",
        lambda one: replace(one, batches=batches),
        error=math.hypot(MODEL_ERROR, PACKING_ERROR),
    )


def _faster_accelerator(model: Model) -> Model:
    return replace(model, steps=tuple(Work(step.cpu_s / 2, step.blocked_s / 2) for step in model.steps))
