"""What a search maximises: samples per second, the time of an epoch, or what the whole run costs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from stoker.tune.records import Measured

Goal = Literal["throughput", "epoch-time", "cost"]
GOALS: tuple[Goal, ...] = ("throughput", "epoch-time", "cost")
ALSO = ("precision", "img_size", "batch_size", "mixing")
"""Changes that would alter the training: measured only on request."""
HOUR_S = 3600.0


@dataclass(frozen=True)
class Objective:
    """A goal, with what is needed to compute it from a trial."""

    goal: Goal = "throughput"
    epochs: int = 1
    validates: bool = False
    """Whether each epoch ends with a validation, whose loader has to start as well."""

    def score(self, measured: Measured) -> float | None:
        """Larger is better; None if the trial failed."""
        if self.goal == "throughput":
            return measured.samples_per_second
        seconds = self.epoch_s(measured) if self.goal == "epoch-time" else self.run_s(measured)
        return 1 / seconds if seconds else None

    def epoch_s(self, measured: Measured) -> float | None:
        """One epoch with its first batch, and the start of validation; None if unknown."""
        rate, samples = steady_rate(measured), measured.epoch_samples
        if not rate or not samples:
            return None
        starts = 2 if self.validates else 1
        return samples / rate + starts * (measured.first_batch_s or 0.0)

    def run_s(self, measured: Measured) -> float | None:
        """The whole run: its start, with compiling, and its epochs."""
        epoch_s = self.epoch_s(measured)
        return None if epoch_s is None else (measured.start_s or 0.0) + self.epochs * epoch_s


def steady_rate(measured: Measured) -> float | None:
    """Samples per second within an epoch, without the wait for its first batch."""
    if measured.result != "measured":
        return None
    if measured.observed is not None and measured.observed.images_per_second:
        return measured.observed.images_per_second
    return measured.samples_per_second


def run_facts(
    objective: Objective, before: Measured | None, after: Measured | None, price_per_hour: float | None
) -> dict[str, float | None]:
    """Hours and money of the whole run, before and after."""
    found: dict[str, float | None] = {}
    for name, measured in (("before", before), ("after", after)):
        seconds = None if measured is None else objective.run_s(measured)
        found[f"hours_{name}"] = None if seconds is None else seconds / HOUR_S
        found[f"cost_{name}"] = None if seconds is None or price_per_hour is None else seconds / HOUR_S * price_per_hour
    return found
