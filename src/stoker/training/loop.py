"""The loop: epochs, steps, validation, checkpoints. Images and volumes differ in their task, never here."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import islice
from typing import Any, Protocol

import torch
from torch import nn

from stoker.clock.steps import StepClock
from stoker.data.batch import Batch
from stoker.errors import UserError
from stoker.training.ema import WeightAverage
from stoker.training.evaluate import evaluate, named_scores
from stoker.training.metrics import Accumulator
from stoker.training.observer import Observer
from stoker.training.optimizers import set_lr
from stoker.training.progress import Progress
from stoker.training.ranks import Ranks, agree
from stoker.training.saving import Saver
from stoker.training.schedule import Horizon, learning_rate
from stoker.training.step import Prepared, TrainStep
from stoker.training.stopping import StopRequest


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


def train(run: Run) -> Progress:
    """Trains from where the run stands to its end; raises Preempted or Interrupted after a checkpoint."""
    progress = run.progress
    with run.stop.listening():
        while progress.epoch < run.horizon.epochs:
            began = time.monotonic()
            _train_epoch(run)
            metrics = named_scores("train", run.train_metrics.result())
            metrics["train/lr"] = learning_rate(max(0, progress.step - 1), run.horizon, run.peak_lr)
            if run.val_loader is not None:
                with run.ema.swapped() if run.ema is not None else nullcontext():
                    metrics |= evaluate(run.model, run.val_loader, run)
            metrics["epoch_s"] = time.monotonic() - began
            run.observer.epoch_ends(progress.step, progress.epoch, metrics)
            _close_epoch(run, metrics)
    return progress


def _train_epoch(run: Run) -> None:
    """The steps of an epoch that are left."""
    progress, clock = run.progress, StepClock(run.device)
    loader = run.train_loader(progress.epoch)
    steps = loader.steps(progress.position) // run.accumulation
    run.observer.epoch_begins(progress.epoch, run.horizon.steps_per_epoch, run.horizon.steps_per_epoch - steps)
    run.model.train()
    batches = loader.epoch(progress.epoch, progress.position)
    for _ in range(steps):
        with clock.waiting():
            group = list(islice(batches, run.accumulation))
        lr = learning_rate(progress.step, run.horizon, run.peak_lr)
        set_lr(run.step.optimizer, lr)
        with clock.computing():
            prepared = [run.prepare(batch, progress.epoch, progress.step) for batch in group]
            result = run.step(prepared, progress.step)
            if run.ema is not None and not result.skipped:
                run.ema.update()
            run.train_metrics.add_loss(result.loss, sum(len(batch) for batch in group))
            for logits, chunk in result.outputs:
                if not chunk.mixed:  # a mixed image has no one label to be right about
                    run.train_metrics.add_hits(logits, chunk.labels)
        progress.position, progress.step = group[-1].next_position, progress.step + 1
        progress.micro_batch = run.step.micro_batch
        clock.step_ends(group)
        _judge(run, result.skipped, group)
        run.observer.step(progress.step, progress.epoch, {"train/loss": result.loss, "train/lr": lr, "clock": clock})
        stopping, due = agree((run.stop.wanted, run.saver.is_due(progress.step)), run.ranks)
        if stopping or due:
            run.saver.save(progress, run.train_metrics.total(), now=stopping)
        if stopping:
            raise run.stop.ending(progress.step)


def _judge(run: Run, skipped: bool, group: list[Batch]) -> None:
    """Counts skipped steps; too many in a row end the run with the names of the samples."""
    progress = run.progress
    progress.bad_steps = progress.bad_steps + 1 if skipped else 0
    if not skipped:
        return
    samples = [int(sample) for batch in group for sample in batch.samples]
    run.observer.event("bad_step", progress.step, {"samples": samples})
    if progress.bad_steps > run.max_bad_steps:
        raise UserError(
            "loss-is-no-number",
            f"the loss was no finite number {progress.bad_steps} steps in a row, up to step {progress.step}",
            why="skipping more of them would only train on nothing",
            hint="lr= lower, clip_grad_norm=1.0, or precision=bf16-mixed; the samples are in metrics.jsonl",
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
    run.saver.save(progress, run.train_metrics.total(), best=best, now=progress.finished)
