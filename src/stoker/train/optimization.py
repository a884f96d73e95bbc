"""Losses over classes, and optimizers over a model's parameters in an order that checkpoints can rely on."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from stoker.augment.mixing import soft_targets
from stoker.config import Config

# Losses over classes, for labels (samples,) and soft targets (samples, classes) alike; the mean, in float32.

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


# Optimizers over a model's parameters, in an order that checkpoints can rely on.

# Where torch has one kernel for all parameters. Elsewhere it picks by itself.
_FUSED_DEVICES = {"cpu", "cuda"}


def build_optimizer(
    model: nn.Module,
    name: str,
    lr: float,
    *,
    momentum: float = 0.9,
    nesterov: bool = False,
    betas: tuple[float, float] = (0.9, 0.999),
    weight_decay: float = 0.0,
    decay_bias_and_norm: bool = True,
) -> torch.optim.Optimizer:
    """The optimizer called `sgd`, `adamw` or `lamb`. The model has to be on its device already."""
    groups = parameter_groups(model, weight_decay, decay_bias_and_norm)
    if name == "sgd":
        return torch.optim.SGD(groups, lr=lr, momentum=momentum, nesterov=nesterov, fused=_fused(groups))
    if name == "adamw":
        return torch.optim.AdamW(groups, lr=lr, betas=betas, fused=_fused(groups))
    assert name == "lamb", name
    from timm.optim import Lamb

    # timm's LAMB would clip the norm of the whole gradient at 1.0 by itself, unseen by whoever reads the config;
    # None switches that off, so that `clip_grad_norm`, before the step, is the only clip.
    lamb: torch.optim.Optimizer = Lamb(groups, lr=lr, betas=betas, max_grad_norm=None)
    return lamb


def parameter_groups(model: nn.Module, weight_decay: float, decay_bias_and_norm: bool) -> list[dict[str, Any]]:
    """Always two groups, weights and then biases with norms, each sorted by name; frozen parameters are left out.

    Two also where both decay alike: what a checkpoint holds does not depend on that key. Sorted because the order
    in which a model registers its layers is its own business, and an optimizer's state knows them by number only.
    """
    trained = sorted((name, value) for name, value in model.named_parameters() if value.requires_grad)
    # All 1-D parameters are biases or scales (norms, layer scale); a weight has an input and an output.
    weights = [value for _, value in trained if value.ndim > 1]
    others = [value for _, value in trained if value.ndim <= 1]
    return [
        {"params": weights, "weight_decay": weight_decay},
        {"params": others, "weight_decay": weight_decay if decay_bias_and_norm else 0.0},
    ]


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Sets the learning rate of every group."""
    for group in optimizer.param_groups:
        group["lr"] = lr


def _fused(groups: list[dict[str, Any]]) -> bool | None:
    parameters = [parameter for group in groups for parameter in group["params"]]
    fits = all(value.device.type in _FUSED_DEVICES and value.is_floating_point() for value in parameters)
    return True if fits else None
