"""Checkpoints of small networks for volumes, as a run writes them, without training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from stoker.config import config_values, load_config
from stoker.tasks.volumes.networks import build_volume_model
from stoker.train.checkpoint.format import write_checkpoint

PATCH = (16, 16, 16)


def write_untrained_volumes(
    path: Path, *, channels: int = 1, classes: int = 2, seed: int = 0, patch: tuple[int, int, int] = PATCH, **keys: Any
) -> Path:
    """A checkpoint of a network with random weights."""
    settings = {
        "task": "segment3d", "model": "small_unet", "patch_size": f"[{','.join(map(str, patch))}]", "num_workers": 1,
        "batch_size": 2, "channels_last": "false",
    } | keys  # fmt: skip
    config = load_config(None, [f"{key}={value}" for key, value in settings.items()]).config
    model = build_volume_model(config.model_copy(update={"seed": seed}), channels, classes)
    state = {
        "model": model.state_dict(),
        "ema": None,
        "config": config_values(config),
        "classes": tuple(map(str, range(classes))),
        "data": {"classes": classes, "ignore": None, "channels": channels},
        "progress": {"epoch": 3, "step": 12},
    }
    write_checkpoint(path, state)
    return path
