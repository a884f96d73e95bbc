"""How the weights move."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from stoker.config.field import KeyGroup, key

Fraction = Annotated[float, Field(ge=0, lt=1)]


class OptimizationKeys(KeyGroup):
    """Optimization: how the weights move."""

    epochs: int = key(90, unit="epochs", ge=1)
    """Passes over the training data."""

    steps_per_epoch: int | None = key(None, unit="steps", ge=1)
    """Steps that count as one epoch, where an epoch is not one pass over the data (random patches)."""

    batch_size: int = key(256, unit="samples", ge=1)
    """Samples of one step on each GPU."""

    val_batch_size: int | None = key(None, unit="samples", ge=1)
    """Samples of one validation step on each GPU; `batch_size` when not given."""

    gradient_accumulation: int = key(1, unit="steps", ge=1)
    """Batches whose gradients are added up for one update."""

    loss: Literal["cross_entropy", "bce"] = key("cross_entropy")
    """Cross-entropy over the classes, or binary cross-entropy for each class."""

    bce_target_threshold: float | None = key(None, gt=0, lt=1)
    """With `bce`: targets above it count as 1, others as 0; off when not given. It is applied after label
    smoothing and cancels it."""

    optimizer: Literal["sgd", "adamw", "lamb"] = key("sgd")
    """Optimizer."""

    lr: float = key(0.1, gt=0)
    """Learning rate for a total batch of `lr_reference_batch` samples."""

    scale_lr: bool = key(True)
    """Scale `lr` with the total batch: lr × total batch / `lr_reference_batch`."""

    lr_reference_batch: int = key(256, unit="samples", ge=1)
    """Total batch for which `lr` is meant."""

    lr_scheduler: Literal["cosine", "step", "constant"] = key("cosine")
    """Course of the learning rate after the warmup."""

    lr_update: Literal["step", "epoch"] = key("step")
    """Whether the learning rate changes with every step, or stays for a whole epoch."""

    lr_step_epochs: int = key(30, unit="epochs", ge=1)
    """With `step`: epochs between two reductions."""

    lr_step_factor: float = key(0.1, gt=0, lt=1)
    """With `step`: what each reduction multiplies by."""

    min_lr: float = key(0.0, ge=0)
    """Where the cosine ends."""

    warmup_epochs: int = key(0, unit="epochs", ge=0)
    """Epochs over which the learning rate rises linearly."""

    warmup_start: float = key(0.01, gt=0, le=1)
    """Share of the learning rate with which the warmup begins."""

    momentum: float = key(0.9, ge=0, lt=1)
    """Momentum of SGD."""

    nesterov: bool = key(False)
    """Nesterov's form of momentum."""

    betas: tuple[Fraction, Fraction] = key((0.9, 0.999))
    """Decay of the two moments, for AdamW and LAMB."""

    weight_decay: float = key(1e-4, ge=0)
    """Weight decay."""

    decay_bias_and_norm: bool = key(True)
    """Whether biases and normalisation weights decay too."""

    clip_grad_norm: float | None = key(None, gt=0)
    """Largest norm of the gradient; off when not given."""

    max_bad_steps: int = key(10, unit="steps", ge=0)
    """Steps in a row with a loss that is no number before the run stops; each one is skipped."""
