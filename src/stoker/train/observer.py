"""What the loop reports, and where it goes: metrics file, trackers, progress line, the clock's file."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from stoker.io.stores import is_url
from stoker.loader.loader import DEFAULT_PREFETCH, choose_engine
from stoker.profile.clock_file import ClockFile, clock_header
from stoker.profile.host import HostConfig
from stoker.profile.observed import AcceleratorFacts, LoaderShape, StorageFacts
from stoker.run.metrics import MetricsFile
from stoker.run.trackers import Trackers
from stoker.train.loader_changes import outcome_text
from stoker.train.progress_line import TrainProgress

if TYPE_CHECKING:
    from stoker.train.loop import Run


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


def loader_shape(config: HostConfig, samples: int, world: int = 1, *, releases_gil: bool = False) -> LoaderShape:
    """How one rank's training loader is set up; `samples` counts those of all ranks."""
    workers = config.num_workers
    engine = choose_engine(config.loader, workers, volumes=releases_gil)
    processes = engine == "process" and workers > 0
    start = "forkserver" if config.worker_start == "auto" else config.worker_start
    return LoaderShape(
        workers=workers,
        prefetch=(config.prefetch_factor or DEFAULT_PREFETCH) if workers else None,
        engine=engine if workers else "main",
        start_method=start if processes else None,
        # Threads are always kept from epoch to epoch.
        persistent=config.persistent_workers if processes else None,
        pin_memory=config.pin_memory,
        batch_size=config.batch_size,
        samples=samples // world,
        threads_per_worker=1 if processes else None,
    )


def run_header(
    config: HostConfig,
    run: Run,
    samples: int,
    storage: StorageFacts | None,
    *,
    cpus: int,
    releases_gil: bool = False,
    kept_bytes: int = 0,
) -> dict[str, Any]:
    """The first line of a run's clock file: how its loader, device and storage are set up; `samples` are those of an
    epoch. The last two are what the task says about its loader."""
    accelerator = None
    if run.device.type == "cuda":
        accelerator = AcceleratorFacts(name=torch.cuda.get_device_name(run.device), count=torch.cuda.device_count())
    return clock_header(
        loader_shape(config, samples, run.ranks.world, releases_gil=releases_gil),
        cpus=cpus,
        world=run.ranks.world,
        torch_version=torch.__version__,
        device=run.device.type,
        accelerator=accelerator,
        storage=storage,
        convolves_3d=any(isinstance(module, nn.Conv3d) for module in run.model.modules()),
        may_grow_bytes=_may_grow_bytes(config, kept_bytes),
    )


def _may_grow_bytes(config: HostConfig, kept: int) -> int:
    """What the loader may keep while it runs: decoded data, and bytes of an object store that each process has read
    ahead."""
    if config.data_root is None or not is_url(config.data_root):
        return kept
    return kept + config.lookahead * (1 + (config.num_workers if config.loader == "process" else 0))


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
