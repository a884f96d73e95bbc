"""Losses over classes: of labels (samples,) or soft targets (samples, classes), as the mean in float32."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import Tensor
from torch.nn import functional

from stoker.config import Config
from stoker.tasks.images.augment.mixing import soft_targets


def cross_entropy(logits: Tensor, targets: Tensor, smoothing: float = 0.0) -> Tensor:
    """Cross-entropy. `smoothing` applies to labels only: soft targets are already smoothed."""
    # Float32 even under autocast: a sum over a thousand classes needs the digits.
    if targets.ndim == 1:
        return functional.cross_entropy(logits.float(), targets, label_smoothing=smoothing)
    return functional.cross_entropy(logits.float(), targets.float())


def binary_cross_entropy(
    logits: Tensor, targets: Tensor, smoothing: float = 0.0, threshold: float | None = None
) -> Tensor:
    """Binary cross-entropy over each class separately; with a threshold, targets above it count as 1, others as 0."""
    rows = soft_targets(targets, logits.shape[1], smoothing) if targets.ndim == 1 else targets.float()
    if threshold is not None:
        rows = present_classes(rows, threshold)
    return functional.binary_cross_entropy_with_logits(logits.float(), rows)


def present_classes(rows: Tensor, threshold: float) -> Tensor:
    """Soft targets as the binary loss with a threshold takes them: 1 above it, else 0."""
    # After smoothing, which it cancels; both classes of a mixed sample can then count as fully present.
    return rows.gt(threshold).float()


def build_loss(config: Config) -> Callable[[Tensor, Tensor], Tensor]:
    """The config's training loss. Validation uses `cross_entropy`, which is comparable between recipes."""
    if config.loss == "bce":
        return partial(binary_cross_entropy, smoothing=config.label_smoothing, threshold=config.bce_target_threshold)
    return partial(cross_entropy, smoothing=config.label_smoothing)
