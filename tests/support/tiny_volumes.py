"""Trainings on volumes that take a second or two: three small scrolls, a small network."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from stoker.tasks.demo import scroll_volume, write_scrolls

KEYS: dict[str, Any] = {
    "task": "segment3d",
    "model": "small_unet",
    "patch_size": [16, 16, 16],
    "folds": 3,
    "epochs": 2,
    "steps_per_epoch": 3,
    "batch_size": 2,
    "optimizer": "adamw",
    "lr": 0.01,
    "scale_lr": False,
    "num_workers": 0,
    "log_every": 1,
    "runs_dir": "runs",
    "run_name": "tiny",
}


def write_volumes(root: Path) -> Path:
    """Three volumes of three scrolls, in the competition's layout; each is a fold."""
    write_scrolls(root, volumes=3, shape=(24, 32, 28), tests=0)
    return root


def write_volume_config(folder: Path, data: Path, **keys: Any) -> Path:
    """A config file with these keys added to the usual ones."""
    path = folder / "tiny.yaml"
    values = KEYS | {"data_root": str(data)} | keys
    path.write_text("".join(f"{key}: {json.dumps(value)}\n" for key, value in values.items()))
    return path


def write_list(folder: Path, volumes: int = 4, **of_the_last: Any) -> Path:
    """A list of .npy volumes in float32; `image` and `label` change those of the last one."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = ["classes: 2", "ignore_label: 2", "cases:"]
    for number in range(volumes):
        image, label = scroll_volume((20, 20, 20), number)
        parts: dict[str, Any] = {"image": image.astype(np.float32), "label": label}
        if number == volumes - 1:
            parts |= of_the_last
        for name, voxels in parts.items():
            np.save(folder / f"{number}-{name}.npy", voxels)
        lines.append(f"  - {{id: case{number}, image: {number}-image.npy, label: {number}-label.npy}}")
    path = folder / "cases.yaml"
    path.write_text("\n".join(lines) + "\n")
    return path
