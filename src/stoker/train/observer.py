"""What the loop reports, and where it goes: metrics file, trackers, progress line, the clock's file."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from stoker.profile.clock_file import ClockFile
from stoker.run.metrics import MetricsFile
from stoker.run.trackers import Trackers
from stoker.train.loader_changes import outcome_text
from stoker.train.progress_line import TrainProgress


class Observer:
    """Gets the reports of a run, which prints nothing itself; must not delay a step.

    This one ignores them all: for ranks other than the first, and for measuring.
    """

    def epoch_begins(self, epoch: int, steps: int, done: int) -> None: ...

    def step(self, step: int, epoch: int, metrics: dict[str, Any]) -> None:
        """After each step; values may be tensors on the device, to be read only when they are shown."""

    def validation_begins(self, steps: int) -> None: ...

    def validation_step(self) -> None: ...

    def epoch_ends(self, step: int, epoch: int, metrics: dict[str, Any]) -> None: ...

    def event(self, name: str, step: int, details: dict[str, Any], text: str | None = None) -> None:
        """Something other than a metric: resumed, a checkpoint, a bad step, labels in doubt; `text` is for people."""

    def sync(self) -> None:
        """Called before a checkpoint is written, in the writer's thread: what it relies on must be on the disk."""


class RunObserver(Observer):
    """The first rank's observer: passes every report on to the files, the trackers and the progress line."""

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
        unit: str = "images",
    ) -> None:
        self._unit = unit
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
        # By the step's number alone: a resumed run has the same lines as one that never stopped.
        due = step == 1 or step % self._log_every == 0
        if due or self._loss is None:
            # The only place that fetches the loss from the device, every `log_every` steps.
            self._loss = float(metrics["train/loss"])
        if due:
            costs = {f"batch/{name}_s": value for name, value in clock.cost.per_image().items()}
            speeds = self._speeds(clock, epoch)
            measured = {"train/loss": self._loss, "train/lr": metrics["train/lr"], **speeds, **costs}
            self._trackers.log(self._metrics.step(step, epoch, measured))
            if self._clock_file is not None:
                self._clock_file.step(step, epoch, clock.take_interval())
        # The host has read the outcome of every step it reports: showing the newest costs nothing.
        self._progress.step(step, metrics["train/loss"], lambda: {"wait": clock.wait_share})

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
        # Files keep one name for the rate of every task; the terminal names the unit.
        self._progress.epoch_ends({name.replace("images_per", f"{self._unit}_per"): v for name, v in figures.items()})

    def event(self, name: str, step: int, details: dict[str, Any], text: str | None = None) -> None:
        self._metrics.event(name, step, **details)
        if text is not None:
            self._progress.say(text)
        elif name == "bad_step":
            samples = details["samples"]
            self._progress.say(
                f"warning: step {step} was skipped: its loss is NaN or infinite; metrics.jsonl lists its "
                f"{len(samples)} samples, the first is {samples[0]}"
            )
        elif name == "stopped_early":
            self._progress.say(f"stopped after epoch {details['epoch']}: {details['why']}")
        elif name == "loader_adjusted":
            if self._clock_file is not None and details["knob"] in ("workers", "prefetch"):
                now = details["from" if details["decision"] == "undone" else "to"]
                self._clock_file.loader_changed(step, **{details["knob"]: now})
            if (line := outcome_text(details, self._unit)) is not None:
                self._progress.say(line)

    def sync(self) -> None:
        self._metrics.sync()

    def close(self) -> None:
        # Trackers first: their last messages belong in the log.
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
