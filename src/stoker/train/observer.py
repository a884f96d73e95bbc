"""What the loop tells to whoever listens: metrics file, trackers, progress line, the clock's file."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn

from stoker.clock.file import ClockFile, clock_header
from stoker.clock.observed import AcceleratorFacts, LoaderShape
from stoker.config import Config
from stoker.data.images.sample_index import SampleSet
from stoker.data.loader import DEFAULT_PREFETCH, choose_engine
from stoker.machine.storage import describe_storage
from stoker.run.metrics import MetricsFile
from stoker.run.trackers import Trackers
from stoker.train.progress_line import TrainProgress

if TYPE_CHECKING:
    from stoker.train.loop import Run


# What the loop tells to whoever listens: progress, trackers, the clock's file. The loop prints nothing.


class Observer(Protocol):
    """Listens to a run; nothing that it does may delay a step."""

    def epoch_begins(self, epoch: int, steps: int, done: int) -> None: ...

    def step(self, step: int, epoch: int, metrics: dict[str, Any]) -> None:
        """After each step; values may be device tensors, read only when they are shown."""

    def validation_begins(self, steps: int) -> None: ...

    def validation_step(self) -> None: ...

    def epoch_ends(self, step: int, epoch: int, metrics: dict[str, float]) -> None: ...

    def event(self, name: str, step: int, details: dict[str, Any]) -> None:
        """Something happened that is no metric: resumed, saved, a bad step, memory ran out."""


class Silence:
    """Listens to nothing: for ranks that do not speak, and for measuring."""

    def epoch_begins(self, epoch: int, steps: int, done: int) -> None: ...

    def step(self, step: int, epoch: int, metrics: dict[str, Any]) -> None: ...

    def validation_begins(self, steps: int) -> None: ...

    def validation_step(self) -> None: ...

    def epoch_ends(self, step: int, epoch: int, metrics: dict[str, float]) -> None: ...

    def event(self, name: str, step: int, details: dict[str, Any]) -> None: ...


# How the training loader of a config is set up, as the checks want to know it.


def loader_shape(config: Config, samples: int, workers: int, world: int = 1) -> LoaderShape:
    """The shape of one rank's loader; `samples` are those of all ranks."""
    engine = choose_engine(config.loader, workers)
    processes = engine == "process" and workers > 0
    start = "forkserver" if config.worker_start == "auto" else config.worker_start
    return LoaderShape(
        workers=workers,
        prefetch=(config.prefetch_factor or DEFAULT_PREFETCH) if workers else None,
        engine=engine if workers else "main",
        start_method=start if processes else None,
        # Threads are kept from epoch to epoch in any case.
        persistent=config.persistent_workers if processes else None,
        pin_memory=config.pin_memory,
        batch_size=config.batch_size,
        samples=samples // world,
        threads_per_worker=1 if processes else None,
    )


# What a run writes at the head of its clock's file: how its loader, device and storage are set up.


def run_header(config: Config, samples: SampleSet, run: Run, *, workers: int, cpus: int) -> dict[str, Any]:
    """The header of a run that is about to train."""
    return clock_header(
        loader_shape(config, len(samples), workers, run.ranks.world),
        cpus=cpus,
        world=run.ranks.world,
        torch_version=torch.__version__,
        device=run.device.type,
        accelerator=name_accelerator(run.device),
        storage=describe_storage(samples),
        convolves_3d=convolves_3d(run.model),
    )


def convolves_3d(model: nn.Module) -> bool:
    """Whether the network convolves volumes."""
    return any(isinstance(module, nn.Conv3d) for module in model.modules())


def name_accelerator(device: torch.device) -> AcceleratorFacts | None:
    """What the device calls itself; None on a CPU."""
    if device.type != "cuda":
        return None
    return AcceleratorFacts(name=torch.cuda.get_device_name(device), count=torch.cuda.device_count())


# Listens to a run and tells everybody: the metrics file, the trackers, the progress line.


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
