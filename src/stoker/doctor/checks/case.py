"""What every check is given: the observation, what changes would bring, and the sums that several checks need."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from functools import cached_property

from stoker.clock.observed import Observed, StageTime
from stoker.doctor.records import Prediction
from stoker.plan.records import Estimate

STARVED = 0.10
"""Share of the time from which waiting is worth a cure: below it no change of the data path could bring more than
1.11x. TraceML draws the same line."""
SPEED_UP_SURE = 0.9
"""Of a speed-up that a share of the time allows, what is reached at least: some of every cure is eaten elsewhere."""


@dataclass(frozen=True)
class Split:
    """How the workers spent the making of batches, in shares of its wall time."""

    cpu: float
    runq: float
    blocked: float
    cpu_s: float
    """Of one batch."""
    wall_s: float

    @property
    def queueing(self) -> float:
        """Of the time in which a worker wanted a core, the share in which it got none."""
        wanted = self.cpu + self.runq
        return self.runq / wanted if wanted > 0 else 0.0


@dataclass(frozen=True)
class Case:
    """An observation with predictions about it."""

    observed: Observed
    predictions: tuple[Prediction, ...] = ()

    @property
    def starved(self) -> bool:
        """Whether the loop waits for data so much that it matters."""
        share = self.observed.wait_share
        return share is not None and share >= STARVED

    @cached_property
    def split(self) -> Split | None:
        """From the newest batches, or from the stages of all; None where the kernel did not tell."""
        known = [
            (b.wall_s, b.cpu_s, b.runq_s, b.blocked_s)
            for b in self.observed.batches
            if b.cpu_s is not None and b.runq_s is not None and b.blocked_s is not None
        ]
        if known:
            wall, cpu, runq, blocked = (sum(part) for part in zip(*known, strict=True))
            return _split(wall, cpu, runq, blocked, len(known))
        stages = list(self.observed.stages.values())
        if not stages or any(s.cpu_s is None or s.runq_s is None or s.blocked_s is None for s in stages):
            return None
        return _split(
            sum(s.wall_s for s in stages),
            sum(s.cpu_s or 0.0 for s in stages),
            sum(s.runq_s or 0.0 for s in stages),
            sum(s.blocked_s or 0.0 for s in stages),
            self.observed.steps,
        )

    @cached_property
    def busy_workers(self) -> float | None:
        """Share of the time in which a worker makes a batch; low while the loop waits means that batches get lost
        between them."""
        shape, elapsed = self.observed.loader, self.observed.elapsed_s
        if shape is None or shape.workers == 0 or elapsed <= 0:
            return None
        if self.observed.batches:
            wall_s = statistics.fmean(b.wall_s for b in self.observed.batches) * self.observed.steps
        elif self.observed.stages:
            wall_s = sum(s.wall_s for s in self.observed.stages.values())
        else:
            return None
        return min(1.0, wall_s / (shape.workers * elapsed))

    @property
    def busy_workers_at_most(self) -> float | None:
        """The same, with a batch for each worker that was begun and not finished when the observation ended: of few
        and slow batches these are most of the work."""
        busy, steps, shape = self.busy_workers, self.observed.steps, self.observed.loader
        if busy is None or shape is None or not steps:
            return busy
        return min(1.0, busy * (steps + shape.workers) / steps)

    @cached_property
    def cores_used(self) -> float | None:
        """By making batches."""
        if self.split is None or self.observed.elapsed_s <= 0:
            return None
        return self.split.cpu_s * self.observed.steps / self.observed.elapsed_s

    def stage(self, name: str) -> StageTime | None:
        return self.observed.stages.get(name)

    def stage_share(self, name: str) -> float | None:
        """Of the wall time of making batches; None where the stages are not known."""
        named = {key: stage.wall_s for key, stage in self.observed.stages.items()}
        total = sum(named.values())
        if total <= 0 or set(named) <= {"other"}:
            return None
        return named.get(name, 0.0) / total

    def gain(self, prediction_id: str) -> Estimate | None:
        """What a predicted change would bring; None where it was not predicted."""
        found = self.prediction(prediction_id)
        return None if found is None else found.speedup

    def prediction(self, prediction_id: str) -> Prediction | None:
        return next((p for p in self.predictions if p.id == prediction_id), None)

    @property
    def config_line(self) -> bool:
        """Whether fixes are lines of our config, rather than arguments of somebody's DataLoader."""
        return self.observed.source != "script"

    def setting(self, key: str, value: object) -> str:
        """What to type for one setting of the loader."""
        if self.config_line:
            return f"{key}={str(value).lower() if isinstance(value, bool) else value}"
        return f"DataLoader(..., {key}={value})"


def without(share: float) -> Estimate:
    """The speed-up when this share of the time is gone, at most; a quarter of it may stay."""
    share = min(share, 0.99)
    return Estimate(1 / (1 - 0.75 * share), 1 / (1 - SPEED_UP_SURE * share), 1 / (1 - share))


def _split(wall: float, cpu: float, runq: float, blocked: float, batches: int) -> Split | None:
    if wall <= 0 or batches == 0:
        return None
    return Split(cpu / wall, runq / wall, blocked / wall, cpu / batches, wall / batches)
