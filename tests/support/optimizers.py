"""Optimizers by name, and their steps as the training step makes them."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from stoker.config import Config
from stoker.train import optimizers


def build_optimizer(model: nn.Module, name: str, lr: float, **keys: Any) -> torch.optim.Optimizer:
    return optimizers.build_optimizer(Config(optimizer=name, **{"weight_decay": 0.0, **keys}), model, lr)  # type: ignore[arg-type]


def update(optimizer: torch.optim.Optimizer, *, skip: bool) -> None:
    """One step as the training step makes it."""
    optimizer.grad_scale = None  # type: ignore[attr-defined]
    optimizer.found_inf = torch.full((), float(skip))  # type: ignore[attr-defined]
    optimizer.step()
    del optimizer.grad_scale, optimizer.found_inf  # type: ignore[attr-defined]
