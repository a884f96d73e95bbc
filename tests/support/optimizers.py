"""Optimizers by name, without a config of their own."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from stoker.config import Config
from stoker.train import optimizers


def build_optimizer(model: nn.Module, name: str, lr: float, **keys: Any) -> torch.optim.Optimizer:
    return optimizers.build_optimizer(Config(optimizer=name, **{"weight_decay": 0.0, **keys}), model, lr)  # type: ignore[arg-type]
