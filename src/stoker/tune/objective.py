"""What a search maximises: samples per second, or the inverse of the time of an epoch or of the whole run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from stoker.tune.records import Goal, Measured

Score = Callable[[Measured], float | None]
"""The value that is maximised; None if the run does not have it."""


@dataclass(frozen=True)
class Objective:
    """A goal, with what is needed to compute it from a trial."""

    goal: Goal = "throughput"
    epochs: int = 1
    validates: bool = False
    """Whether each epoch ends with a validation, whose loader has to start as well."""
    price_per_hour: float | None = None

    def score(self, measured: Measured) -> float | None:
        """Larger is better; None if the trial failed."""
        if self.goal == "throughput":
            return measured.samples_per_second
        seconds = self.epoch_s(measured) if self.goal == "epoch-time" else self.run_s(measured)
        return 1 / seconds if seconds else None

    def epoch_s(self, measured: Measured) -> float | None:
        """One epoch with its first batch, and the start of validation; None if unknown."""
        observed, samples = measured.observed, measured.epoch_samples
        # Within an epoch, without the wait for its first batch.
        rate = (observed and observed.images_per_second) or measured.samples_per_second
        if measured.result != "measured" or not rate or not samples:
            return None
        starts = 2 if self.validates else 1
        return samples / rate + starts * (measured.first_batch_s or 0.0)

    def run_s(self, measured: Measured) -> float | None:
        epoch_s = self.epoch_s(measured)
        return None if epoch_s is None else (measured.start_s or 0.0) + self.epochs * epoch_s

    def run_facts(self, before: Measured | None, after: Measured | None) -> dict[str, float | None]:
        """Hours and money of the whole run, before and after."""
        found: dict[str, float | None] = {}
        for name, measured in (("before", before), ("after", after)):
            seconds = None if measured is None else self.run_s(measured)
            hours, price = None if seconds is None else seconds / 3600, self.price_per_hour
            found[f"hours_{name}"] = hours
            found[f"cost_{name}"] = None if hours is None or price is None else hours * price
        return found
