"""Losses over classes, for labels (samples,) and soft targets (samples, classes) alike; the mean, in float32."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import Tensor
from torch.nn import functional

from stoker.augment.mixing import soft_targets
from stoker.config import Config

Loss = Callable[[Tensor, Tensor], Tensor]


def cross_entropy(logits: Tensor, targets: Tensor, smoothing: float = 0.0) -> Tensor:
    """Cross-entropy. `smoothing` is for labels: soft targets were smoothed when they were made."""
    # Float32 also under autocast: a sum over a thousand classes has no digits to give away.
    if targets.ndim == 1:
        return functional.cross_entropy(logits.float(), targets, label_smoothing=smoothing)
    return functional.cross_entropy(logits.float(), targets.float())


def binary_cross_entropy(
    logits: Tensor, targets: Tensor, smoothing: float = 0.0, threshold: float | None = None
) -> Tensor:
    """Binary cross-entropy for each class on its own; with a threshold, targets above it count as 1, others as 0."""
    rows = soft_targets(targets, logits.shape[1], smoothing) if targets.ndim == 1 else targets.float()
    if threshold is not None:
        # After smoothing, which it cancels; in a mixed sample both classes can so be wholly present.
        rows = rows.gt(threshold).float()
    return functional.binary_cross_entropy_with_logits(logits.float(), rows)


def build_loss(config: Config) -> Loss:
    """The training loss that the config asks for. Validation takes `cross_entropy`: comparable between recipes."""
    if config.loss == "bce":
        return partial(binary_cross_entropy, smoothing=config.label_smoothing, threshold=config.bce_target_threshold)
    return partial(cross_entropy, smoothing=config.label_smoothing)
