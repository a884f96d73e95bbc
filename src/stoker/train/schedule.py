"""Learning rate and image size as pure functions of the step, so that a checkpoint only needs the horizon; and the
progress of a run as integers."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from stoker.core.units import count
from stoker.run.metrics import ACC1, Metric

# torchvision's second recipe for ResNet-50 (its issue 3995): SGD with 0.5 for a total batch of 1024, 80.86 %.
PUBLISHED_SGD_LR = 0.5
PUBLISHED_SGD_BATCH = 1024
FAR_ABOVE_PUBLISHED = 2.0
# Share of a run with growing images if `resize_epochs` is not given.
GROWING_SHARE = 0.8
SIZE_STEP = 32


@dataclass(frozen=True)
class Horizon:
    """The schedule of the learning rate over a whole run.

    Checkpoints hold it (`dataclasses.asdict`, and `Horizon(**record)` back): a config with another one is refused, or
    replaces it from that step on (`--replan`).
    """

    steps_per_epoch: int
    """Optimizer steps; with gradient accumulation fewer than batches."""
    epochs: int
    warmup_epochs: int = 0
    warmup_start: float = 0.01
    """Share of the peak at which the warmup begins."""
    min_lr: float = 0.0
    """Where the cosine ends."""
    scheduler: Literal["cosine", "step", "constant"] = "cosine"
    update: Literal["step", "epoch"] = "step"
    """Whether the rate changes at every step, or only at the start of an epoch."""
    step_epochs: int = 30
    """With `step`: epochs between two reductions, counted from the start of the run, not from the end of the warmup."""
    step_factor: float = 0.1

    def __post_init__(self) -> None:
        assert self.steps_per_epoch >= 1
        assert 0 <= self.warmup_epochs < self.epochs
        assert self.step_epochs >= 1

    @property
    def total_steps(self) -> int:
        return self.steps_per_epoch * self.epochs


def learning_rate(step: int, horizon: Horizon, peak_lr: float) -> float:
    """The learning rate of optimizer step `step`, counted from 0; after the end, that of the last step."""
    step = min(max(step, 0), horizon.total_steps - 1)
    epoch = step // horizon.steps_per_epoch
    if epoch < horizon.warmup_epochs:
        return _warmup(step, epoch, horizon, peak_lr)
    if horizon.scheduler == "constant":
        return peak_lr
    if horizon.scheduler == "step":
        return float(peak_lr * horizon.step_factor ** (epoch // horizon.step_epochs))
    # A peak scaled down for a small batch may be below min_lr; the rate then stays constant.
    end = min(horizon.min_lr, peak_lr)
    return end + (peak_lr - end) * (1 + math.cos(math.pi * _cosine_progress(step, epoch, horizon))) / 2


def _warmup(step: int, epoch: int, horizon: Horizon, peak_lr: float) -> float:
    if horizon.update == "epoch":
        # The first warmup epoch has the smallest share and the last one the peak: one interval fewer than epochs. A
        # single warmup epoch has the smallest share.
        done = epoch / max(horizon.warmup_epochs - 1, 1)
    else:
        # The first step has the smallest share, and the first one after the warmup the peak.
        done = step / (horizon.warmup_epochs * horizon.steps_per_epoch)
    return peak_lr * (horizon.warmup_start + (1 - horizon.warmup_start) * done)


def _cosine_progress(step: int, epoch: int, horizon: Horizon) -> float:
    """0 where the cosine begins, 1 in the last epoch or, if the rate changes at every step, in the last step."""
    if horizon.update == "epoch":
        done, length = epoch - horizon.warmup_epochs, horizon.epochs - 1 - horizon.warmup_epochs
    else:
        begin = horizon.warmup_epochs * horizon.steps_per_epoch
        done, length = step - begin, horizon.total_steps - 1 - begin
    return done / length if length > 0 else 0.0


def scaled_lr(lr: float, total_batch: int, reference_batch: int, scale: bool) -> float:
    """The peak learning rate for a total batch (over all ranks and accumulation)."""
    return lr * total_batch / reference_batch if scale else lr


def lr_warning(optimizer: str, peak_lr: float, total_batch: int) -> str | None:
    """A warning if SGD's learning rate for this total batch is far above the published recipe, else None."""
    published = PUBLISHED_SGD_LR * total_batch / PUBLISHED_SGD_BATCH
    ratio = peak_lr / published
    if optimizer != "sgd" or ratio <= FAR_ABOVE_PUBLISHED:
        return None
    return (
        f"the learning rate {peak_lr:g} for a total batch of {total_batch} is {ratio:.1f} times that of torchvision's "
        f"published recipe ({PUBLISHED_SGD_LR:g} for {PUBLISHED_SGD_BATCH}, so {published:g} here); if it was meant "
        f"for a total batch of {PUBLISHED_SGD_BATCH}, set lr_reference_batch={PUBLISHED_SGD_BATCH}; any value in the "
        "config says that it is meant, and ends this warning"
    )


def image_size(epoch: int, start: int | None, final: int, epochs_until: int) -> int:
    """The side of the training images in an epoch: `start` in epoch 0, `final` from epoch `epochs_until` on.

    In between it grows linearly, rounded to multiples of 32: every size costs a compilation, and a network's
    strides should divide it. `start` and `final` are used as given.
    """
    assert epochs_until >= 1
    if start is None or epoch >= epochs_until:
        return final
    assert start <= final
    # In integers, so that it is the same on every machine. x / epochs_until is the size; halves are rounded up.
    x = start * epochs_until + (final - start) * max(epoch, 0)
    rounded = (2 * x + SIZE_STEP * epochs_until) // (2 * SIZE_STEP * epochs_until) * SIZE_STEP
    return min(max(rounded, start), final) if epoch > 0 else start


def default_resize_epochs(epochs: int) -> int:
    """Epochs until the full size if the config does not say."""
    return max(1, round(GROWING_SHARE * epochs))


@dataclass
class Progress:
    """Where a run is, between two steps."""

    epoch: int = 0
    position: int = 0
    """Samples of this epoch that have been trained on, over all ranks."""
    step: int = 0
    """Updates since the beginning, including skipped ones: the learning rate is a function of it."""
    bad_steps: int = 0
    """Skipped steps in a row."""
    micro_batch: int | None = None
    """How many samples fit into the device's memory at a time; None until the first step."""
    best: float | None = None
    """Best value of the run's metric so far."""
    finished: bool = False
    origin: str | None = None
    """The checkpoint of `--resume` that the run began from: path, size and modification time."""
    to_beat: float | None = None
    """The value that counts for early stopping: the last that was a sufficient improvement."""
    stale_epochs: int = 0
    """Epochs since then."""

    def add_score(self, value: float, min_delta: float, metric: Metric = ACC1) -> None:
        if metric.improves(value, self.best):
            self.best = value
        if metric.improves(value, self.to_beat, min_delta):
            self.to_beat, self.stale_epochs = value, 0
        else:
            self.stale_epochs += 1


@dataclass(frozen=True)
class EarlyStopping:
    """When a run ends before its last epoch."""

    patience: int
    """Epochs in a row without an improvement."""
    min_delta: float = 0.0
    """What an improvement of the metric has to exceed; percentage points, unless it is the loss."""
    metric: Metric = ACC1

    def reason(self, progress: Progress) -> str | None:
        """Why the run ends here, as a sentence; None if it continues."""
        if progress.stale_epochs < self.patience or progress.to_beat is None:
            return None
        by = f" by more than {self.min_delta:g}" if self.min_delta else ""
        return (
            f"{self.metric.key} has not improved{by} on {self.metric.text(progress.to_beat)} "
            f"for {count(progress.stale_epochs, 'epoch')} (early_stopping: {self.patience})"
        )


@dataclass(frozen=True)
class Schedule:
    """How long a run trains, at which rates, and in which portions."""

    horizon: Horizon
    peak_lr: float
    stopping: EarlyStopping | None
    total_batch: int
    """Samples of one update, over all ranks."""
    accumulation: int
    """Batches of one update on each rank."""
    max_bad_steps: int

    def lr_at(self, step: int) -> float:
        return learning_rate(step, self.horizon, self.peak_lr)

    def is_over(self, progress: Progress) -> bool:
        """Whether a run has no epoch left: a function of where it is, so that other settings can continue it."""
        return progress.epoch >= self.horizon.epochs or (
            self.stopping is not None and self.stopping.reason(progress) is not None
        )
