"""Listens to a run and tells everybody: the metrics file, the trackers, the progress line."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from stoker.output.clock_file import ClockFile
from stoker.output.metrics_file import MetricsFile
from stoker.output.trackers import Trackers
from stoker.output.train_progress import TrainProgress


class RunObserver:
    """What the first rank passes to the loop."""

    def __init__(
        self,
        metrics: MetricsFile,
        trackers: Trackers,
        progress: TrainProgress,
        *,
        log_every: int,
        world: int,
        clock_file: ClockFile | None = None,
        utilisation: Callable[[float, int], float | None] | None = None,
    ) -> None:
        self._metrics = metrics
        self._trackers = trackers
        self._progress = progress
        self._log_every = log_every
        self._world = world
        self._utilisation = utilisation
        self._clock_file = clock_file
        self._loss: float | None = None

    def epoch_begins(self, epoch: int, steps: int, done: int) -> None:
        self._progress.epoch_begins(epoch, steps, done)

    def step(self, step: int, epoch: int, metrics: dict[str, Any]) -> None:
        clock = metrics["clock"]
        # By the step's number alone: a resumed run has the lines of one that never stopped.
        due = step == 1 or step % self._log_every == 0
        if due or self._loss is None:
            # The one place where the loss is fetched from the device: every `log_every` steps.
            self._loss = float(metrics["train/loss"])
        if due:
            costs = {f"batch/{name}_s": value for name, value in clock.cost.per_image().items()}
            speeds = self._speeds(clock, epoch)
            measured = {"train/loss": self._loss, "train/lr": metrics["train/lr"], **speeds, **costs}
            self._trackers.log(self._metrics.step(step, epoch, measured))
            if self._clock_file is not None:
                self._clock_file.step(step, epoch, clock.take_interval())
        self._progress.step(step, self._loss, lambda: {"wait": clock.wait_share})

    def validation_begins(self, steps: int) -> None:
        self._progress.validation_begins(steps)

    def validation_step(self) -> None:
        self._progress.validation_step()

    def epoch_ends(self, step: int, epoch: int, metrics: dict[str, Any]) -> None:
        figures = {name: value for name, value in metrics.items() if name != "clock"}
        figures |= self._speeds(metrics["clock"], epoch)
        self._trackers.log(self._metrics.epoch(step, epoch, figures))
        if self._clock_file is not None:
            self._clock_file.epoch(step, epoch, metrics["clock"].take_interval())
        self._progress.epoch_ends(figures)

    def event(self, name: str, step: int, details: dict[str, Any]) -> None:
        self._metrics.event(name, step, **details)
        if name == "bad_step":
            samples = details["samples"]
            self._progress.say(
                f"warning: step {step} was skipped, its loss is no finite number; metrics.jsonl names its "
                f"{len(samples)} samples, {samples[0]} the first"
            )

    def say(self, text: str) -> None:
        """A line for people, kept in the log."""
        self._progress.say(text)

    def close(self) -> None:
        # Trackers first: what they have to say at the end belongs into the log.
        self._trackers.close()
        self._progress.close()
        self._metrics.close()
        if self._clock_file is not None:
            self._clock_file.close()

    def _speeds(self, clock: Any, epoch: int) -> dict[str, float | None]:
        rate = clock.images_per_second if clock.steps > 0 else None
        total = None if rate is None else rate * self._world
        return {
            "images_per_second": total,
            "wait_share": clock.wait_share if clock.steps > 0 else None,
            "mfu": None if total is None or self._utilisation is None else self._utilisation(total, epoch),
        }
