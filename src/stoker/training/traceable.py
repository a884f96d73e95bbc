"""A training step described well enough to be traced: what it is made of, never a tensor."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from stoker.training.step import Prepared


@dataclass(frozen=True)
class TraceableStep:
    """Everything a step needs, as functions that are called only when it is traced, on a device without memory."""

    build_model: Callable[[], nn.Module]
    """On the CPU, in its final memory format; nothing moves it afterwards."""
    build_optimizer: Callable[[nn.Module], torch.optim.Optimizer]
    loss: Callable[[Any, Tensor], Tensor]
    make_batch: Callable[[int], Prepared]
    """A batch of so many samples, from the bytes that arrive on the device to what the model takes."""
    batch_size: int
    precision: str = "32"
    """32, 16-mixed or bf16-mixed."""
    ema_decay: float | None = None
    accumulation: int = 1
    clip_grad_norm: float | None = None
    checkpointed: TraceableStep | None = None
    """The same step with gradient checkpointing; None where it already checkpoints, or the model has none."""


def plain_batch(
    sample: tuple[int, ...],
    *,
    target: tuple[int, ...] = (),
    num_classes: int | None = None,
    dtype: torch.dtype = torch.float32,
    memory_format: torch.memory_format = torch.contiguous_format,
) -> Callable[[int], Prepared]:
    """A `make_batch` for data that arrives as the model takes it: no augmentation on the device.

    `sample` is the shape of one input, (3, 224, 224) or (1, 128, 128, 128); `target` that of one target of class
    numbers, () for one label a sample. With `num_classes` targets are soft: a float for each class.
    """

    def make(batch: int) -> Prepared:
        inputs = torch.empty((batch, *sample), dtype=dtype, memory_format=memory_format)
        labels = torch.empty(batch, dtype=torch.int64)
        targets = labels if target == () else torch.empty((batch, *target), dtype=torch.int64)
        if num_classes is not None:
            targets = torch.empty((batch, num_classes, *target))
        return Prepared(inputs, targets, labels, mixed=False)

    return make
