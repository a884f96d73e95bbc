"""A small training state with everything a real one contains, and a comparison of two states."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch


def training_state(seed: int, width: int = 8) -> dict[str, Any]:
    """Model, optimizer, EMA, progress and RNG states; a different seed changes every value."""
    torch.manual_seed(seed)
    random.seed(seed)
    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, width, 3), torch.nn.BatchNorm2d(width), torch.nn.Flatten(), torch.nn.Linear(width * 4, 5)
    ).to(memory_format=torch.channels_last)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1 / seed)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    return {
        "model": model.state_dict(),
        "ema": {name: tensor.clone() for name, tensor in model.state_dict().items()},
        "optimizer": optimizer.state_dict(),
        "progress": {"epoch": 3, "step": 100 + seed, "position": 7 * seed},
        "metrics": {"val/acc1": 1 / (seed + 2), "train/acc1": None},
        "config": {"model_name": "resnet50", "lr": 0.1, "img_size": 176},
        "rng": {
            "torch": torch.get_rng_state(),
            "numpy": np.random.RandomState(seed).get_state(),
            "python": random.getstate(),
        },
    }


def same(a: Any, b: Any) -> bool:
    """Whether two states agree in every bit, type, key and layout."""
    if isinstance(a, torch.Tensor):
        return (
            isinstance(b, torch.Tensor)
            and (a.dtype, a.shape, a.stride()) == (b.dtype, b.shape, b.stride())
            and bits(a) == bits(b)
        )
    if isinstance(a, np.ndarray):
        return isinstance(b, np.ndarray) and (a.dtype, a.shape) == (b.dtype, b.shape) and a.tobytes() == b.tobytes()
    if isinstance(a, dict):
        return isinstance(b, dict) and list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and repr(a) == repr(b)


def bits(tensor: torch.Tensor) -> bytes:
    """A tensor's exact content, including NaNs and signed zeros."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
