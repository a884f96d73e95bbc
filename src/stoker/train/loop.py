"""The loop: epochs, steps, validation, checkpoints. Images and volumes differ in their task, never here."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
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
from stoker.train.observer import Observer
from stoker.train.optimization import set_lr
from stoker.train.ranks import Ranks, agree, any_rank, gather
from stoker.train.schedule import Horizon, Progress, learning_rate
from stoker.train.step import Prepared, StepResult, TrainStep

# The loop: epochs, steps, validation, checkpoints. Images and volumes differ in their task, never here.

NAMED_SAMPLES = 10


class Loader(Protocol):
    """Batches of any epoch from any position."""

    def epoch(self, epoch: int, start: int = 0) -> Iterator[Batch]: ...

    def steps(self, start: int = 0) -> int: ...


@dataclass
class Run:
    """Everything that a run consists of, put together by its task."""

    model: nn.Module
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
    observer: Observer
    saver: Saver
    progress: Progress
    train_metrics: Accumulator
    stop: StopRequest
    close: Callable[[], None]
    """Ends workers."""
    name_samples: Callable[[Sequence[int]], list[str]] = lambda samples: [str(sample) for sample in samples]
    """What people know samples by, from their numbers in the index."""
    guard_memory: Callable[[Any], None] = lambda _loader: None
    """Called with the loader of each batch: where memory falls, it has the loader hold fewer batches."""
    clock: StepClock = field(init=False)

    def __post_init__(self) -> None:
        self.clock = StepClock(self.device)


def train(run: Run) -> Progress:
    """Trains from where the run stands to its end; where `run.stop` asks to leave, raises after a checkpoint."""
    progress = run.progress
    while progress.epoch < run.horizon.epochs:
        began = time.monotonic()
        clock = _train_epoch(run)
        metrics: dict[str, Any] = dict(named_scores("train", run.train_metrics.result()))
        metrics["train/lr"] = learning_rate(max(0, progress.step - 1), run.horizon, run.peak_lr)
        if run.val_loader is not None:
            try:
                run.saver.wait_for_copy()  # the average and the weights change places
                with clock.validating(), run.ema.swapped() if run.ema is not None else nullcontext():
                    metrics |= evaluate(run.model, run.val_loader, run)
            except LeaveValidation:
                _leave(run)
        metrics |= {"seconds": time.monotonic() - began, "clock": clock}
        run.observer.epoch_ends(progress.step, progress.epoch, metrics)
        _close_epoch(run, metrics)
        if not progress.finished and any_rank(run.stop.wanted, run.ranks):
            _leave(run)
    return progress


def _train_epoch(run: Run) -> StepClock:
    """The steps of an epoch that are left."""
    progress, clock = run.progress, run.clock
    loader = run.train_loader(progress.epoch)
    steps = loader.steps(progress.position) // run.accumulation
    run.observer.epoch_begins(progress.epoch, run.horizon.steps_per_epoch, run.horizon.steps_per_epoch - steps)
    run.model.train()
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
            result = run.step(prepared, progress.step)
            if not result.skipped:
                _count(run, result, sum(len(batch) for batch in group))
        progress.position, progress.step = group[-1].next_position, progress.step + 1
        progress.micro_batch = run.step.micro_batch
        clock.step_ends(group)
        run.guard_memory(loader)
        _judge(run, result, group)
        run.observer.step(progress.step, progress.epoch, {"train/loss": result.loss, "train/lr": lr, "clock": clock})
        del moved, prepared, result  # else the next step computes beside the inputs and logits of this one
        stopping, due = agree((run.stop.wanted, run.saver.is_due(progress.step)), run.ranks)
        if stopping:
            _leave(run)
        run.saver.get_ready(progress)
        if due:
            with clock.saving():
                run.saver.save(progress, run.train_metrics.total())
    return clock


def _on_device(group: list[Batch], device: torch.device) -> list[Batch]:
    """The batches with their images on the way to the device; `group` keeps the memory that they are copied from."""
    if device.type == "cpu":
        return group
    return [replace(batch, images=batch.images.to(device, non_blocking=True)) for batch in group]


def _count(run: Run, result: StepResult, samples: int) -> None:
    """An update that was made counts: for the average of the weights, and for the epoch's figures."""
    if run.ema is not None:
        run.ema.update()
    run.train_metrics.add_loss(result.loss, samples)
    for logits, chunk in result.outputs:
        if not chunk.mixed:  # a mixed image has no one label to be right about
            run.train_metrics.add_hits(logits, chunk.labels)


def _leave(run: Run) -> NoReturn:
    """Saves, and raises the ending that all ranks agree on."""
    (interrupted,) = agree((run.stop.interrupted,), run.ranks)
    saved = run.saver.save(run.progress, run.train_metrics.total(), now=True)
    # Together: a launcher that sees one rank leave may give the others little time.
    any_rank(True, run.ranks)
    raise run.stop.ending(run.progress.step, interrupted=interrupted, saved=saved)


def _judge(run: Run, result: StepResult, group: list[Batch]) -> None:
    """Counts skipped steps; too many in a row end the run with the names of the samples."""
    progress = run.progress
    if not result.skipped:
        progress.bad_steps = 0
        return
    progress.bad_steps += 1
    here = run.name_samples([int(index) for batch in group for index in batch.indices])
    told = gather((result.bad_here, here), run.ranks)
    # Where every loss was a number, and only the gradient was not, it may have been anybody.
    samples = [name for bad, names in told if bad for name in names] or [name for _, names in told for name in names]
    run.observer.event("bad_step", progress.step, {"samples": samples, "in_a_row": progress.bad_steps})
    if progress.bad_steps > run.max_bad_steps:
        more = f" and {len(samples) - NAMED_SAMPLES} more" if len(samples) > NAMED_SAMPLES else ""
        raise UserError(
            "loss-is-no-number",
            f"the loss was no finite number {progress.bad_steps} steps in a row, up to step {progress.step}; "
            f"last for {', '.join(samples[:NAMED_SAMPLES])}{more}",
            why="skipping more of them would only train on nothing",
            hint="lr= lower, clip_grad_norm=1.0, or precision=bf16-mixed; all samples are in metrics.jsonl",
        )


def _close_epoch(run: Run, metrics: dict[str, Any]) -> None:
    progress = run.progress
    score, epoch = metrics.get("val/acc1"), progress.epoch
    progress.epoch, progress.position = epoch + 1, 0
    progress.finished = progress.epoch >= run.horizon.epochs
    run.train_metrics = Accumulator(run.device)
    if score is not None:
        progress.best = score if progress.best is None else max(progress.best, score)
    best = None if score is None else (epoch, score)
    with run.clock.saving():
        saved = run.saver.save(progress, run.train_metrics.total(), best=best, now=progress.finished)
    if progress.finished and not saved:
        raise UserError(
            "end-not-saved",
            f"the run is at its end, step {progress.step}, and its last checkpoint could not be saved",
            why="the weights of the last steps are lost with this process",
            hint="make room, and run the same command again: it repeats what came after the save before",
        )
