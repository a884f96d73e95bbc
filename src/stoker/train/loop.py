"""The loop: epochs, steps, validation, checkpoints. Images and volumes differ in their task, never here."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, NoReturn, Protocol

import torch
from torch import nn

from stoker.clock.steps import StepClock
from stoker.data.batch import Batch
from stoker.errors import UserError
from stoker.train.checkpoint.saver import Saver
from stoker.train.ema import WeightAverage
from stoker.train.evaluate import Accumulator, evaluate, named_scores
from stoker.train.launch import LeaveValidation, StopRequest
from stoker.train.observer import Observer, Silence
from stoker.train.optimization import set_lr
from stoker.train.ranks import Ranks, agree, any_rank, gather
from stoker.train.schedule import Horizon, Progress, learning_rate
from stoker.train.step import Prepared, StepResult, TrainStep

NAMED_SAMPLES = 10


class Loader(Protocol):
    """Batches of any epoch from any position."""

    def epoch(self, epoch: int, start: int = 0) -> Iterator[Batch]: ...

    def steps(self, start: int = 0) -> int: ...


@dataclass(frozen=True)
class Run:
    """Everything that is trained and trained with, as its task builds it; a variation is made with `replace`."""

    model: nn.Module
    """The bare model, as checkpoints hold it; `step.model` is compiled and wrapped for several ranks."""
    ema: WeightAverage | None
    step: TrainStep
    prepare: Callable[[Batch, int, int], Prepared]
    """Moves a batch to the device and augments it: (batch, epoch, step)."""
    prepare_val: Callable[[Batch], Prepared]
    train_loader: Callable[[int], Loader]
    """The loader of an epoch: progressive resizing changes it."""
    val_loader: Loader | None
    val_loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    horizon: Horizon
    peak_lr: float
    accumulation: int
    total_batch: int
    """Samples of one update, over all ranks."""
    max_bad_steps: int
    ranks: Ranks
    device: torch.device
    progress: Progress
    train_metrics: Accumulator
    stop: StopRequest
    clock: StepClock
    close: Callable[[], None]
    """Ends the loaders' workers."""
    config: dict[str, Any]
    """Every config key with its value, as checkpoints hold it."""
    classes: tuple[str, ...]
    """What the model's outputs stand for, in order."""
    name_samples: Callable[[Sequence[int]], list[str]]
    """The names of samples, from their indices in the data set."""
    guard_memory: Callable[[Any], None]
    """Called with the loader of each batch: if memory runs low, makes the loader hold fewer batches."""


def train(run: Run, observer: Observer | None = None, saver: Saver | None = None) -> Progress:
    """Trains from the run's progress to its end; if `run.stop` asks to leave, saves a checkpoint and raises."""
    observer, saver = observer or Silence(), saver or Saver(run, checkpoints=None)
    progress = run.progress
    while progress.epoch < run.horizon.epochs:
        began = time.monotonic()
        _train_epoch(run, observer, saver)
        metrics: dict[str, Any] = dict(named_scores("train", run.train_metrics.result()))
        metrics["train/lr"] = learning_rate(max(0, progress.step - 1), run.horizon, run.peak_lr)
        if run.val_loader is not None:
            try:
                saver.wait_for_copy()  # the average and the weights change places
                with run.clock.validating(), run.ema.swapped() if run.ema is not None else nullcontext():
                    metrics |= evaluate(run, run.val_loader, observer)
            except LeaveValidation:
                _leave(run, saver)
        metrics |= {"seconds": time.monotonic() - began, "clock": run.clock}
        observer.epoch_ends(progress.step, progress.epoch, metrics)
        _close_epoch(run, saver, metrics.get("val/acc1"))
        if not progress.finished and any_rank(run.stop.wanted, run.ranks):
            _leave(run, saver)
    return progress


def _train_epoch(run: Run, observer: Observer, saver: Saver) -> None:
    """The remaining steps of an epoch."""
    progress, clock = run.progress, run.clock
    loader = run.train_loader(progress.epoch)
    steps = loader.steps(progress.position) // run.accumulation
    observer.epoch_begins(progress.epoch, run.horizon.steps_per_epoch, run.horizon.steps_per_epoch - steps)
    run.step.model.train()
    batches = loader.epoch(progress.epoch, progress.position)
    clock.epoch_begins()
    for _ in range(steps):
        with clock.waiting():
            group = list(islice(batches, run.accumulation))
        lr = learning_rate(progress.step, run.horizon, run.peak_lr)
        set_lr(run.step.optimizer, lr)
        with clock.transferring():
            moved = _on_device(group, run.device)
        with clock.computing():
            prepared = [run.prepare(batch, progress.epoch, progress.step) for batch in moved]
            result = run.step(prepared, progress.step, before_update=saver.wait_for_copy)
            if not result.skipped:
                _count(run, result, sum(len(batch) for batch in group))
        progress.position, progress.step = group[-1].next_position, progress.step + 1
        progress.micro_batch = run.step.micro_batch
        clock.step_ends(group)
        run.guard_memory(loader)
        _check_loss(run, observer, result, group)
        observer.step(progress.step, progress.epoch, {"train/loss": result.loss, "train/lr": lr, "clock": clock})
        del moved, prepared, result  # else the next step computes beside the inputs and logits of this one
        stopping, due = agree((run.stop.wanted, saver.is_due()), run.ranks)
        if stopping:
            _leave(run, saver)
        saver.get_ready()
        if due:
            with clock.saving():
                saver.save(run.train_metrics.total())


def _on_device(group: list[Batch], device: torch.device) -> list[Batch]:
    """The batches with their images on the way to the device; `group` keeps the memory they are copied from."""
    if device.type == "cpu":
        return group
    return [replace(batch, images=batch.images.to(device, non_blocking=True)) for batch in group]


def _count(run: Run, result: StepResult, samples: int) -> None:
    """Counts an update that was made: in the average of the weights, and in the epoch's metrics."""
    if run.ema is not None:
        run.ema.update()
    run.train_metrics.add_loss(result.loss, samples)
    for logits, chunk in result.outputs:
        if not chunk.mixed:  # a mixed image has no single correct label
            run.train_metrics.add_hits(logits, chunk.labels)


def _leave(run: Run, saver: Saver) -> NoReturn:
    """Saves, and raises the ending that all ranks agree on."""
    (interrupted,) = agree((run.stop.interrupted,), run.ranks)
    saved = saver.save(run.train_metrics.total(), now=True)
    # Together: a launcher that sees one rank leave may give the others little time.
    any_rank(True, run.ranks)
    raise run.stop.ending(run.progress.step, interrupted=interrupted, saved=saved)


def _check_loss(run: Run, observer: Observer, result: StepResult, group: list[Batch]) -> None:
    """Counts skipped steps; too many in a row end the run with the names of the samples."""
    progress = run.progress
    if not result.skipped:
        progress.bad_steps = 0
        return
    progress.bad_steps += 1
    here = run.name_samples([int(index) for batch in group for index in batch.indices])
    gathered = gather((result.bad_here, here), run.ranks)
    # If every loss was finite and only the gradient was not, any rank's samples may be the cause.
    samples = [name for bad, names in gathered if bad for name in names]
    samples = samples or [name for _, names in gathered for name in names]
    observer.event("bad_step", progress.step, {"samples": samples, "in_a_row": progress.bad_steps})
    if progress.bad_steps > run.max_bad_steps:
        more = f" and {len(samples) - NAMED_SAMPLES} more" if len(samples) > NAMED_SAMPLES else ""
        raise UserError(
            "loss-is-no-number",
            f"the loss was NaN or infinite for {progress.bad_steps} steps in a row, up to step {progress.step}; "
            f"last for {', '.join(samples[:NAMED_SAMPLES])}{more}",
            why="every one of these steps was skipped, so the model no longer learns",
            hint="lr= lower, clip_grad_norm=1.0, or precision=bf16-mixed; metrics.jsonl lists all samples",
        )


def _close_epoch(run: Run, saver: Saver, acc1: float | None) -> None:
    progress, epoch = run.progress, run.progress.epoch
    progress.epoch, progress.position = epoch + 1, 0
    progress.finished = progress.epoch >= run.horizon.epochs
    run.train_metrics.reset()
    if acc1 is not None:
        progress.best = acc1 if progress.best is None else max(progress.best, acc1)
    best = None if acc1 is None else (epoch, acc1)
    with run.clock.saving():
        saved = saver.save(run.train_metrics.total(), best=best, now=progress.finished)
    if progress.finished and not saved:
        raise UserError(
            "end-not-saved",
            f"training ended at step {progress.step}, but its last checkpoint could not be saved",
            why="the weights of the last steps are lost with this process",
            hint="free some disk space and run the same command again: it repeats the steps since the last save",
        )
