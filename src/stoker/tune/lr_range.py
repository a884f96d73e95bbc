"""The learning rate range test (Smith, 2015): steps with a growing rate, and the rate that their losses suggest.

A single sweep is one draw of batches, and the steepest place of a noisy curve is anywhere. So the test sweeps several
times from the same state, estimates the noise, and gives an interval with its suggestion, or a reason why it has none.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count, islice
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from stoker.core.console import Advance

if TYPE_CHECKING:
    from stoker.train.loop import Batch, Run

Curve = NDArray[np.float64]

DIVERGED = 4.0
"""A sweep ends at this multiple of the best smoothed loss, as in fastai."""
MEMORY = 0.9
"""Decay of the running mean that decides when to stop; unlike the smoothing, it cannot look ahead."""
SMOOTHING = 0.03
"""Standard deviation of the curve's smoothing, as a share of all steps."""
LEAST_DESCENT = 0.002
"""The loss has to fall by this share of its first value, however small the noise."""
STANDARD_ERRORS = 4.0
"""And by this many standard errors: the lowest of some fifteen independent points is two below their mean by chance."""
LEAST_POINTS = 5
REDRAWS = 200
INTERVAL = (10, 90)
"""Percentiles of the interval."""
WIDEST = 100.0
"""An interval whose ends differ by more than this factor suggests nothing."""


@dataclass(frozen=True)
class LrCurve:
    """The loss of every sweep at each rate."""

    lrs: list[float]
    """As the optimizer used them, after all scaling; as many as the longest sweep has losses."""
    sweeps: list[list[float | None]]
    """None: NaN or infinite. A sweep that diverged is shorter than others."""
    diverged_at: float | None
    """The lowest rate at which a sweep diverged; None if none did."""


@dataclass(frozen=True)
class LrSuggestion:
    """Two suggestions from one curve, as rates of the optimizer."""

    steepest: float
    """Where the smoothed loss falls fastest."""
    low: float
    high: float
    """The interval in which the steepest place is found again if the curve is redrawn with its noise."""
    tenth_of_lowest: float
    lowest: float
    """The rate at the lowest smoothed loss."""


@dataclass(frozen=True)
class LrReading:
    """A curve, its noise, and what follows from both."""

    rates: list[float]
    losses: list[float]
    """Mean over the sweeps, up to where the first one ended."""
    smoothed: list[float]
    error: list[float]
    """Standard error of the smoothed loss at each rate."""
    noise: float | None
    """Standard deviation of the loss of a single step; None if there are too few."""
    suggestion: LrSuggestion | None
    reason: str | None
    """Why there is no suggestion."""
    rises_at: float | None
    """The lowest rate at which the loss is above its start by more than its noise; None if there is none."""


def growing_rates(lowest: float, highest: float, steps: int) -> list[float]:
    """Rates with equal ratios between them, both ends included."""
    assert 0 < lowest < highest
    assert steps >= 2
    return [lowest * (highest / lowest) ** (number / (steps - 1)) for number in range(steps)]


def measure_range(run: Run, lrs: Sequence[float], progress: Advance, *, sweeps: int = 1, epoch: int = 0) -> LrCurve:
    """Trains the run's model one step with each rate, until the loss diverges; each sweep begins with the weights and
    the optimizer state that the run has now, and with other batches. The model is useless afterwards.

    `epoch` is that of the first sweep: images have its size.
    """
    groups = _groups(run, epoch)
    parts: tuple[Any, ...] = (run.model, run.step.optimizer, run.step.precision.scaler)
    start = [copy.deepcopy(part.state_dict()) for part in parts]
    found: list[list[float | None]] = []
    diverged: list[float] = []
    for sweep in range(sweeps):
        for part, state in zip(parts, start, strict=True) if sweep > 0 else ():
            part.load_state_dict(copy.deepcopy(state))  # an optimizer keeps the tensors that it is given
        losses, end = _sweep(run, lrs, groups, sweep * len(lrs), lambda done: progress(done, sweeps * len(lrs)))
        found.append(losses)
        diverged += [] if end is None else [end]
    return LrCurve(list(lrs[: max(map(len, found))]), found, min(diverged, default=None))


def read_curve(curve: LrCurve) -> LrReading:
    """The noise of a curve and the rates to try, or why there are none."""
    sweeps = _common_part(curve)
    points = sweeps.shape[1]
    rates = curve.lrs[:points]
    mean = sweeps.mean(axis=0) if points else np.zeros(0)
    if points < LEAST_POINTS:
        too_few = f"a sweep diverged after {points} steps, too few to judge: try a smaller --min"
        return LrReading(rates, mean.tolist(), mean.tolist(), [0.0] * points, None, None, too_few, None)
    smoothed = smooth(mean)
    noise = _noise(sweeps)
    error = _standard_error(sweeps, noise)
    lowest = int(smoothed.argmin())
    fall = float(smoothed[0] - smoothed[lowest])
    needed = STANDARD_ERRORS * math.hypot(error[0], error[lowest])
    above = np.flatnonzero(smoothed - smoothed[0] > STANDARD_ERRORS * np.hypot(error, error[0]))
    rises_at = rates[int(above[0])] if len(above) else None
    suggestion: LrSuggestion | None = None
    reason: str | None = None
    if lowest < 2 or fall <= max(needed, LEAST_DESCENT * abs(float(smoothed[0]))):
        reason = f"the loss never fell by more than its noise: by {fall:.2g}, and up to {needed:.2g} is chance"
    else:
        suggestion = _suggest(rates, sweeps, smoothed, noise)
        if suggestion.high > WIDEST * suggestion.low:
            reason = f"the noise puts it anywhere between {suggestion.low:.1g} and {suggestion.high:.1g}"
            suggestion = None
    return LrReading(rates, mean.tolist(), smoothed.tolist(), error.tolist(), noise, suggestion, reason, rises_at)


def smooth(losses: Sequence[float] | Curve) -> Curve:
    """The curve without its noise; averages on both sides, so that nothing shifts towards higher rates."""
    weights, reach = _kernel(len(losses))
    inside = slice(reach, reach + len(losses))
    ones = np.convolve(np.ones(len(losses)), weights)[inside]
    return np.convolve(np.asarray(losses, np.float64), weights)[inside] / ones


def _sweep(
    run: Run,
    lrs: Sequence[float],
    groups: Iterator[tuple[int, list[Batch]]],
    done: int,
    advance: Callable[[int], None],
) -> tuple[list[float | None], float | None]:
    """The losses, and the rate at which they diverged."""
    from stoker.train.loop import pending  # imports torch, which the rest does not need
    from stoker.train.optimizers import set_lr

    losses: list[float | None] = []
    total, weight, best = 0.0, 0.0, math.inf
    run.step.model.train()
    # The rates first: zip then takes no batches for a step that is not made.
    for number, (lr, (epoch, group)) in enumerate(zip(lrs, groups, strict=False)):
        set_lr(run.step.optimizer, lr)
        parts = [pending(run, batch, epoch, done + number, place) for place, batch in enumerate(group)]
        loss = float(run.step(parts, done + number).loss)  # waits for the device
        losses.append(loss if math.isfinite(loss) else None)
        advance(done + number + 1)
        total, weight = MEMORY * total + (1 - MEMORY) * loss, MEMORY * weight + (1 - MEMORY)
        mean = total / weight  # corrected for its start at zero
        if not math.isfinite(loss) or mean > DIVERGED * best:
            return losses, lr
        best = min(best, mean)
    return losses, None


def _groups(run: Run, first: int) -> Iterator[tuple[int, list[Batch]]]:
    """The batches of each update, over as many epochs as needed, in the image size of the first."""
    loader = run.input.train_loader(first)
    for epoch in count(first):
        batches = loader.epoch(epoch)
        for _ in range(loader.steps() // run.schedule.accumulation):
            yield epoch, list(islice(batches, run.schedule.accumulation))


def _common_part(curve: LrCurve) -> Curve:
    """The losses (sweeps, rates) up to where the first sweep ended or was not finite."""
    lengths = [next((at for at, loss in enumerate(losses) if loss is None), len(losses)) for losses in curve.sweeps]
    points = min(lengths, default=0)
    return np.array([losses[:points] for losses in curve.sweeps], np.float64).reshape(len(curve.sweeps), points)


def _noise(sweeps: Curve) -> float:
    """The standard deviation of a single loss, from the distance of each to its neighbours' mean, so that a slope does
    not count. Uses the median, which the few points that diverge do not change."""
    apart = sweeps[:, 1:-1] - (sweeps[:, :-2] + sweeps[:, 2:]) / 2
    # The variance of the difference is 1.5 times that of a loss; 1.4826 times the median is a normal deviation.
    return float(1.4826 * np.median(np.abs(apart)) / math.sqrt(1.5))


def _standard_error(sweeps: Curve, noise: float) -> Curve:
    """Standard error of the smoothed mean: from the steps' noise or the spread of the sweeps, whichever is larger."""
    number, points = sweeps.shape
    weights, reach = _kernel(points)
    inside = slice(reach, reach + points)
    ones = np.ones(points)
    share = np.sqrt(np.convolve(ones, weights**2)[inside]) / np.convolve(ones, weights)[inside]
    within: Curve = noise * share / math.sqrt(number)
    if number == 1:
        return within
    between = np.array([smooth(losses) for losses in sweeps]).var(axis=0, ddof=1)
    across: Curve = np.maximum(within, np.sqrt(smooth(between) / number))
    return across


def _suggest(rates: list[float], sweeps: Curve, smoothed: Curve, noise: float) -> LrSuggestion:
    lowest = int(smoothed.argmin())
    redrawn = []
    chance = np.random.default_rng(0)  # the same curve gives the same interval
    number, points = sweeps.shape
    for _ in range(REDRAWS):
        of_sweeps = sweeps[chance.integers(number, size=number)].mean(axis=0) if number > 1 else smoothed
        redrawn.append(_steepest(smooth(smooth(of_sweeps) + chance.normal(0, noise / math.sqrt(number), points))))
    low, high = np.percentile(redrawn, INTERVAL, method="nearest").astype(int)
    steepest = _steepest(smoothed)
    return LrSuggestion(
        steepest=rates[steepest], low=rates[min(low, steepest)], high=rates[max(high, steepest)],
        tenth_of_lowest=rates[lowest] / 10, lowest=rates[lowest],
    )  # fmt: skip


def _steepest(smoothed: Curve) -> int:
    """Where the curve falls fastest before its lowest point; the rates are evenly spaced on a log scale, so differences
    of neighbours are slopes."""
    lowest = max(2, int(smoothed.argmin()))
    return 1 + int((smoothed[2 : lowest + 1] - smoothed[: lowest - 1]).argmin())


def _kernel(points: int) -> tuple[Curve, int]:
    deviation = max(1.0, SMOOTHING * points)
    reach = math.ceil(3 * deviation)
    return np.exp(-0.5 * (np.arange(-reach, reach + 1) / deviation) ** 2), reach
