"""The loop: epochs, steps, validation, checkpoints. Images and volumes differ in their task, never here."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any, NamedTuple, NoReturn, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from stoker.core.errors import UserError
from stoker.profile.batch_costs import BatchCost
from stoker.profile.step_clock import StepClock
from stoker.run.metrics import Metric
from stoker.train.checkpoint.saver import Saver
from stoker.train.ema import WeightAverage
from stoker.train.evaluate import Accumulator, Scoring, evaluate
from stoker.train.launch import LeaveValidation, LeaveWait, StopRequest
from stoker.train.observer import Observer
from stoker.train.optimizers import set_lr
from stoker.train.ranks import Agreement, Ranks, agree, any_rank, gather
from stoker.train.schedule import Progress, Schedule
from stoker.train.step import Pending, Prepared, StepResult, TrainStep
from stoker.train.transfers import Uploader

NAMED_SAMPLES = 10


class Batch(Protocol):
    """What the loop needs to know about a batch, whether of images or of patches."""

    @property
    def indices(self) -> NDArray[np.int64]:
        """The samples' numbers in the data set."""

    @property
    def next_position(self) -> int:
        """The position at which a run resumes after this batch."""

    @property
    def cost(self) -> BatchCost: ...

    def __len__(self) -> int: ...


class Loader(Protocol):
    """Batches of any epoch from any position."""

    def epoch(self, epoch: int, start: int = 0) -> Iterator[Any]: ...

    def steps(self, start: int = 0) -> int: ...


@dataclass(frozen=True)
class InputPipeline:
    """Where batches come from, and how they become the model's inputs."""

    train_loader: Callable[[int], Loader]
    """The loader of an epoch: progressive resizing changes it."""
    val_loader: Loader | None
    uploader: Uploader
    prepare: Callable[[Any, int, int, int], Prepared]
    """Copies a batch to the device and augments it: (batch, epoch, step, its number within the step). Called by the
    uploader, whose `copy` it uses."""
    prepare_val: Callable[[Any], Prepared]
    name_samples: Callable[[Sequence[int]], list[str]]
    """The names of samples, from their indices in the data set."""
    close: Callable[[], None]
    """Ends the loaders' workers."""
    guard_memory: Callable[[Any], None] = lambda _loader: None
    """Called with the loader of each batch: if memory runs low, makes the loader hold fewer batches."""
    adjust_loader: Callable[[Any, StepClock], dict[str, Any] | None] = lambda _loader, _clock: None
    """Called with the training loader after each step: changes how it works, and returns what it decided."""


@dataclass(frozen=True)
class RunScores:
    """How well the model does."""

    val_loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    scoring: Scoring
    metric: Metric
    """What the best checkpoints are chosen by."""
    train_metrics: Accumulator


@dataclass(frozen=True)
class RunRecord:
    """What a checkpoint holds besides tensors and progress."""

    config: dict[str, Any]
    """Every config key with its value."""
    classes: tuple[str, ...]
    """The classes of the model's outputs, in order."""
    decoder: str | None = None
    """The library that decodes the images, so that a run keeps its pixels on another machine. None for volumes."""
    data: dict[str, Any] = field(default_factory=dict)
    """What is needed about the data to use the model again: for volumes classes, ignore label and channels."""
    branched_from: dict[str, Any] | None = None
    """Where a run of `--from` took its weights; None for any other."""


@dataclass(frozen=True)
class Run:
    """Everything that is trained and what it is trained with, as its task builds it; `replace` makes a variation."""

    model: nn.Module
    """The bare model, as checkpoints hold it; `step.model` is compiled and wrapped for several ranks."""
    ema: WeightAverage | None
    step: TrainStep
    input: InputPipeline
    scores: RunScores
    schedule: Schedule
    record: RunRecord
    ranks: Ranks
    device: torch.device
    progress: Progress
    stop: StopRequest
    clock: StepClock


def train(run: Run, observer: Observer | None = None, saver: Saver | None = None) -> Progress:
    """Trains from the run's progress to its end; if `run.stop` asks to leave, saves a checkpoint and raises."""
    observer, saver = observer or Observer(), saver or Saver(run, checkpoints=None)
    progress = run.progress
    loader: Loader | None = None
    reports = _Reports(run, observer)
    agreement = Agreement(run.ranks, lambda: (run.stop.wanted, saver.is_due_by_time()))
    try:
        while not run.schedule.is_over(progress):
            began = time.monotonic()
            run.input.uploader.finish()  # a loader of another size takes over the memory of the last one
            before, loader = loader, run.input.train_loader(progress.epoch)
            if before not in (None, loader):
                run.step.expect_new_shapes()
            _train_epoch(run, loader, observer, saver, reports, agreement)
            scores = run.scores.train_metrics.result()
            metrics: dict[str, Any] = {f"train/{name}": value for name, value in scores.items()}
            metrics["train/lr"] = run.schedule.lr_at(max(0, progress.step - 1))
            if run.input.val_loader is not None:
                try:
                    saver.wait_for_copy()  # the average and the weights change places
                    with run.clock.validating(), run.ema.swapped() if run.ema is not None else nullcontext():
                        metrics |= evaluate(run, run.input.val_loader, observer)
                except LeaveValidation:
                    _leave(run, saver)
                except LeaveWait:
                    _leave_waiting(run, saver, reports)
            metrics |= {"seconds": time.monotonic() - began, "clock": run.clock}
            observer.epoch_ends(progress.step, progress.epoch, metrics)
            if (seen := run.scores.scoring.look(metrics)) is not None:
                observer.event(seen.event, progress.step, seen.details, seen.text)
            _close_epoch(run, observer, saver, metrics.get(run.scores.metric.key))
            if not progress.finished and any_rank(run.stop.wanted, run.ranks):
                _leave(run, saver)
    finally:
        run.input.uploader.finish()
    return progress


def _train_epoch(
    run: Run, loader: Loader, observer: Observer, saver: Saver, reports: _Reports, agreement: Agreement
) -> None:
    progress, clock = run.progress, run.clock
    # Below zero if epochs have become shorter: then this one is over.
    left = max(0, run.schedule.horizon.steps_per_epoch - progress.position // run.schedule.total_batch)
    steps = min(loader.steps(progress.position) // run.schedule.accumulation, left)
    observer.epoch_begins(
        progress.epoch, run.schedule.horizon.steps_per_epoch, run.schedule.horizon.steps_per_epoch - steps
    )
    run.step.model.train()
    batches = run.stop.unless_leaving(loader.epoch(progress.epoch, progress.position))
    clock.epoch_begins()
    for _ in range(steps):
        try:
            with clock.waiting():
                group = list(islice(batches, run.schedule.accumulation))
        except LeaveWait:
            _leave_waiting(run, saver, reports)
        lr = run.schedule.lr_at(progress.step)
        set_lr(run.step.optimizer, lr)
        with clock.computing():
            parts = [pending(run, batch, progress.epoch, progress.step, i) for i, batch in enumerate(group)]
            result = run.step(parts, progress.step, before_update=saver.wait_for_copy)
            run.scores.train_metrics.add_step(result)
            if run.ema is not None:
                run.ema.update()
        progress.position, progress.step = group[-1].next_position, progress.step + 1
        progress.micro_batch = run.step.micro_batch
        clock.step_ends(group)
        run.input.guard_memory(loader)
        if (decided := run.input.adjust_loader(loader, clock)) is not None:
            observer.event("loader_adjusted", progress.step, decided)
        reports.add(result, group, lr)
        del group, parts, result  # otherwise the next step would compute beside the batches of this one
        stopping, due = agreement.flags()
        if stopping or due or saver.is_due_by_steps():
            reports.settle()
        if stopping:
            _leave(run, saver)
        saver.get_ready()
        if due or saver.is_due_by_steps():
            with clock.saving():
                saver.save(run.scores.train_metrics.total())
        agreement.send()
    reports.settle()


def pending(run: Run, batch: Batch, epoch: int, step: int, number: int = 0) -> Pending:
    """One of the batches of a step, copied and augmented beside the model's work when its turn comes."""

    def prepare() -> Prepared:
        prepared = run.input.uploader.prepare(
            partial(run.input.prepare, batch, epoch, step, number), run.clock.transferring
        )
        run.clock.data_is_there()
        return prepared

    return Pending(len(batch), prepare)


class _Step(NamedTuple):
    """A step whose outcome is on its way from the device."""

    number: int
    epoch: int
    lr: float
    read: Callable[[], list[float]]
    samples: int
    judged: int
    indices: list[NDArray[np.int64]]


class _Reports:
    """Reports each step once its outcome has arrived: on a device that works asynchronously, a step later.

    So the loop never waits for the step that it has just queued. All ranks read at the same step.
    """

    def __init__(self, run: Run, observer: Observer) -> None:
        self._run = run
        self._observer = observer
        self._lag = 0 if run.input.uploader.queue is None else 1
        self._waiting: deque[_Step] = deque()

    def add(self, result: StepResult, group: list[Batch], lr: float) -> None:
        """Takes a step, and reports the one before it."""
        progress, read = self._run.progress, self._run.input.uploader.fetch(result.report)
        indices = [batch.indices for batch in group]
        step = _Step(progress.step, progress.epoch, lr, read, result.samples, result.judged, indices)
        self._waiting.append(step)
        self.settle(self._lag)

    def settle(self, left: int = 0) -> None:
        """Reports all steps but the last `left`; waits for the device."""
        while len(self._waiting) > left:
            step = self._waiting.popleft()
            skipped, bad_here, loss = step.read()
            if skipped:
                self._run.scores.train_metrics.take_back(step.samples, step.judged)
            self._count_bad(step, skipped=bool(skipped), bad_here=bool(bad_here))
            self._observer.step(
                step.number, step.epoch, {"train/loss": loss, "train/lr": step.lr, "clock": self._run.clock}
            )

    def _count_bad(self, step: _Step, *, skipped: bool, bad_here: bool) -> None:
        """Counts skipped steps; too many in a row end the run with the names of the samples."""
        run, progress = self._run, self._run.progress
        if not skipped:
            progress.bad_steps = 0
            return
        here = run.input.name_samples([int(index) for indices in step.indices for index in indices])
        gathered = gather((bad_here, here), run.ranks)
        samples = [name for bad, names in gathered if bad for name in names]
        if not samples:
            if run.step.precision.scaler.is_enabled():
                progress.bad_steps = 0  # an occasional overflow in float16, which the scaler handles
                return
            # Every loss was finite and only the gradient was not: any rank's samples may be the cause.
            samples = [name for _, names in gathered for name in names]
        progress.bad_steps += 1
        self._observer.event("bad_step", step.number, {"samples": samples, "in_a_row": progress.bad_steps})
        if progress.bad_steps > run.schedule.max_bad_steps:
            more = f" and {len(samples) - NAMED_SAMPLES} more" if len(samples) > NAMED_SAMPLES else ""
            raise UserError(
                "loss-not-finite",
                f"the loss or its gradient was NaN or infinite for {progress.bad_steps} steps in a row, up to step "
                f"{step.number}; last for {', '.join(samples[:NAMED_SAMPLES])}{more}",
                why="every one of these steps was skipped, so the model no longer learns",
                hint="lr= lower, clip_grad_norm=1.0, or precision=bf16-mixed; metrics.jsonl lists all samples",
            )


def _leave(run: Run, saver: Saver) -> NoReturn:
    """Saves, and raises the exception that all ranks agree on."""
    (interrupted,) = agree((run.stop.interrupted,), run.ranks)
    saved = saver.save(run.scores.train_metrics.total(), now=True)
    # All ranks at once: a launcher that sees one rank leave may give the others little time.
    any_rank(True, run.ranks)
    raise run.stop.ending(run.progress.step, interrupted=interrupted, saved=saved)


def _leave_waiting(run: Run, saver: Saver, reports: _Reports) -> NoReturn:
    """The same in the middle of a wait for data, where several ranks cannot agree on anything: others may be in the
    step that this one has no data for. They leave without saving, and resume from the save before."""
    if run.ranks.world > 1:
        raise run.stop.ending(run.progress.step, interrupted=run.stop.interrupted, saved=False)
    reports.settle()
    _leave(run, saver)


def _close_epoch(run: Run, observer: Observer, saver: Saver, value: float | None) -> None:
    """Ends an epoch whose validation gave this value of the run's metric, and saves it."""
    progress, epoch = run.progress, run.progress.epoch
    progress.epoch, progress.position = epoch + 1, 0
    run.scores.train_metrics.reset()
    if value is not None:
        progress.add_score(
            value, 0.0 if run.schedule.stopping is None else run.schedule.stopping.min_delta, run.scores.metric
        )
    progress.finished = run.schedule.is_over(progress)
    if run.schedule.stopping is not None and progress.epoch < run.schedule.horizon.epochs and progress.finished:
        observer.event("stopped_early", progress.step, {"epoch": epoch, "why": run.schedule.stopping.reason(progress)})
    best = None if value is None or not math.isfinite(value) else (epoch, value)
    with run.clock.saving():
        saved = saver.save(run.scores.train_metrics.total(), best=best, now=progress.finished)
    if progress.finished and not saved:
        raise UserError(
            "end-not-saved",
            f"training ended at step {progress.step}, but its last checkpoint could not be saved",
            why="the weights of the last steps are lost with this process",
            hint="free some disk space and run the same command again: it repeats the steps since the last save",
        )
