"""The learning rate range test (Smith, 2015): steps with a growing rate, and the rate that their losses suggest."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count, islice
from typing import TYPE_CHECKING

from stoker.console import Advance

if TYPE_CHECKING:
    from stoker.data.batch import Batch
    from stoker.train.loop import Run

DIVERGED = 4.0
"""The test ends at this multiple of the best smoothed loss, as in fastai."""
MEMORY = 0.9
"""Decay of the running mean that decides when to stop; unlike the smoothing, it cannot look ahead."""
SMOOTHING = 0.03
"""Standard deviation of the curve's smoothing, as a share of all steps."""
LEAST_DESCENT = 0.03
"""The loss has to fall by this share of its first value; less is noise."""


@dataclass(frozen=True)
class LrCurve:
    """The loss at each rate; both lists have the same length."""

    lrs: list[float]
    """As the optimizer used them, after all scaling."""
    losses: list[float | None]
    """None: NaN or infinite."""
    diverged_at: float | None
    """The rate at which the loss diverged; None if it did not."""


@dataclass(frozen=True)
class LrSuggestion:
    """Two suggestions from one curve, as rates of the optimizer."""

    steepest: float
    """Where the smoothed loss falls fastest."""
    tenth_of_lowest: float
    lowest: float
    """The rate at the lowest smoothed loss."""


def growing_rates(lowest: float, highest: float, steps: int) -> list[float]:
    """Rates with equal ratios between them, both ends included."""
    assert 0 < lowest < highest
    assert steps >= 2
    return [lowest * (highest / lowest) ** (number / (steps - 1)) for number in range(steps)]


def measure_range(run: Run, lrs: Sequence[float], progress: Advance) -> LrCurve:
    """Trains the run's model one step with each rate, until the loss diverges. The model is of no use afterwards."""
    from stoker.train.loop import pending  # imports torch, which the rest does not need
    from stoker.train.optimization import set_lr

    losses: list[float | None] = []
    running, best, diverged = RunningMean(), math.inf, False
    run.step.model.train()
    groups = _groups(run)
    for number, (lr, (epoch, group)) in enumerate(zip(lrs, groups, strict=False)):
        set_lr(run.step.optimizer, lr)
        parts = [pending(run, batch, epoch, number, place) for place, batch in enumerate(group)]
        loss = float(run.step(parts, number).loss)  # waits for the device
        losses.append(loss if math.isfinite(loss) else None)
        progress(number + 1, len(lrs))
        mean = running.add(loss)
        diverged = not math.isfinite(loss) or mean > DIVERGED * best
        if diverged:
            break
        best = min(best, mean)
    used = list(lrs[: len(losses)])
    return LrCurve(used, losses, used[-1] if diverged else None)


def suggest(curve: LrCurve) -> LrSuggestion | None:
    """The rates to try; None if the loss never fell."""
    points = [(lr, loss) for lr, loss in zip(curve.lrs, curve.losses, strict=True) if loss is not None]
    if len(points) < 5:
        return None
    rates = [lr for lr, _ in points]
    smoothed = smooth([loss for _, loss in points])
    lowest = min(range(len(smoothed)), key=lambda at: smoothed[at])
    if lowest < 2 or smoothed[lowest] > smoothed[0] * (1 - LEAST_DESCENT):
        return None
    # The rates are evenly spaced on a log scale, so differences of neighbours are slopes. Only before the minimum.
    slopes = {at: smoothed[at + 1] - smoothed[at - 1] for at in range(1, lowest)}
    steepest = min(slopes, key=lambda at: slopes[at])
    return LrSuggestion(rates[steepest], rates[lowest] / 10, rates[lowest])


def smooth(losses: Sequence[float]) -> list[float]:
    """The curve without its noise; averages on both sides, so that nothing shifts towards higher rates."""
    deviation = max(1.0, SMOOTHING * len(losses))
    reach = math.ceil(3 * deviation)
    weights = {offset: math.exp(-0.5 * (offset / deviation) ** 2) for offset in range(-reach, reach + 1)}
    smoothed = []
    for at in range(len(losses)):
        near = [(weight, losses[at + off]) for off, weight in weights.items() if 0 <= at + off < len(losses)]
        smoothed.append(sum(weight * loss for weight, loss in near) / sum(weight for weight, _ in near))
    return smoothed


class RunningMean:
    """An exponential moving mean, corrected for its start at zero."""

    def __init__(self) -> None:
        self._sum = 0.0
        self._weight = 0.0

    def add(self, value: float) -> float:
        self._sum = MEMORY * self._sum + (1 - MEMORY) * value
        self._weight = MEMORY * self._weight + (1 - MEMORY)
        return self._sum / self._weight


def _groups(run: Run) -> Iterator[tuple[int, list[Batch]]]:
    """The batches of each update, over as many epochs as needed."""
    for epoch in count():
        loader = run.train_loader(epoch)
        batches = loader.epoch(epoch)
        for _ in range(loader.steps() // run.accumulation):
            yield epoch, list(islice(batches, run.accumulation))
