"""The learning rate range test: a few steps with a rate that grows, and what the loss does (Smith, 2015)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count, islice
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from stoker.data.batch import Batch
    from stoker.train.loop import Run

DIVERGED = 4.0
"""Times the best smoothed loss so far: the test ends there, as in fastai's."""
MEMORY = 0.9
"""Of the running mean that decides when to stop: it must not look ahead."""
SMOOTHING = 0.03
"""Standard deviation of the curve's smoothing, as a share of all steps."""
LEAST_DESCENT = 0.03
"""Share of the first loss that has to be won somewhere; less is noise."""


@dataclass(frozen=True)
class LrCurve:
    """What the losses were; both lists have the same length."""

    lrs: list[float]
    """What the optimizer used, after all scaling."""
    losses: list[float | None]
    """None: no finite number."""
    diverged_at: float | None
    """The rate at which the loss ran away; None where it did not."""


@dataclass(frozen=True)
class LrSuggestion:
    """Two opinions about a curve, as rates of the optimizer."""

    steepest: float
    """Where the smoothed loss falls fastest."""
    tenth_of_lowest: float
    """A tenth of the rate at the lowest smoothed loss."""
    lowest: float


def growing_rates(lowest: float, highest: float, steps: int) -> list[float]:
    """Rates with equal ratios between them, both ends included."""
    assert 0 < lowest < highest
    assert steps >= 2
    return [lowest * (highest / lowest) ** (number / (steps - 1)) for number in range(steps)]


def measure_range(run: Run, lrs: Sequence[float], progress: Callable[[int, int | None], None]) -> LrCurve:
    """Trains the run's model one step with each rate, until the loss runs away. The model is spoilt afterwards."""
    from stoker.train.optimization import set_lr

    losses: list[float | None] = []
    running, best, diverged = RunningMean(), math.inf, False
    run.model.train()
    groups = _groups(run)
    for number, (lr, (epoch, group)) in enumerate(zip(lrs, groups, strict=False)):
        set_lr(run.step.optimizer, lr)
        prepared = [run.prepare(batch, epoch, number) for batch in group]
        loss = float(run.step(prepared, number).loss)  # waits for the device
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
    """The rates to try; None where the loss never fell."""
    points = [(lr, loss) for lr, loss in zip(curve.lrs, curve.losses, strict=True) if loss is not None]
    if len(points) < 5:
        return None
    rates = [lr for lr, _ in points]
    smoothed = smooth([loss for _, loss in points])
    lowest = min(range(len(smoothed)), key=lambda at: smoothed[at])
    if lowest < 2 or smoothed[lowest] > smoothed[0] * (1 - LEAST_DESCENT):
        return None
    # The rates are evenly spaced in their logarithm: differences of neighbours are slopes. Only on the way down.
    slopes = {at: smoothed[at + 1] - smoothed[at - 1] for at in range(1, lowest)}
    steepest = min(slopes, key=lambda at: slopes[at])
    return LrSuggestion(rates[steepest], rates[lowest] / 10, rates[lowest])


def smooth(losses: Sequence[float]) -> list[float]:
    """The curve with its noise averaged away; looks to both sides, so that nothing moves towards higher rates."""
    deviation = max(1.0, SMOOTHING * len(losses))
    reach = math.ceil(3 * deviation)
    weights = {offset: math.exp(-0.5 * (offset / deviation) ** 2) for offset in range(-reach, reach + 1)}
    smoothed = []
    for at in range(len(losses)):
        near = [(weight, losses[at + off]) for off, weight in weights.items() if 0 <= at + off < len(losses)]
        smoothed.append(sum(weight * loss for weight, loss in near) / sum(weight for weight, _ in near))
    return smoothed


class RunningMean:
    """A mean that forgets, without the pull towards zero of its first values."""

    def __init__(self) -> None:
        self._sum = 0.0
        self._weight = 0.0

    def add(self, value: float) -> float:
        self._sum = MEMORY * self._sum + (1 - MEMORY) * value
        self._weight = MEMORY * self._weight + (1 - MEMORY)
        return self._sum / self._weight


def _groups(run: Run) -> Iterator[tuple[int, list[Batch]]]:
    """The batches of one update after the other, for as many epochs as it takes."""
    for epoch in count():
        loader = run.train_loader(epoch)
        batches = loader.epoch(epoch)
        for _ in range(loader.steps() // run.accumulation):
            yield epoch, list(islice(batches, run.accumulation))
