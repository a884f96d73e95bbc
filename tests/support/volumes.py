"""A small trained network for volumes and its data, for commands that take a checkpoint or a config."""

from __future__ import annotations

from pathlib import Path

from stoker.cli import main
from stoker.data.volumes.scrolls import write_scrolls


def write_scroll_config(folder: Path, **keys: object) -> Path:
    """Scrolls of 24³ voxels in the competition's layout, and a config that trains on them for a moment."""
    data = folder / "scrolls"
    if not data.exists():
        write_scrolls(data, volumes=6, shape=(24, 24, 24), seed=1)
    settings = {
        "task": "segment3d", "data_root": data, "model": "small_unet", "patch_size": "[16, 16, 16]", "batch_size": 2,
        "steps_per_epoch": 6, "epochs": 1, "folds": 3, "lr": 0.01, "num_workers": 0, "runs_dir": folder / "runs",
    } | keys  # fmt: skip
    config = folder / "scroll_run.yaml"
    config.write_text("".join(f"{key}: {value}\n" for key, value in settings.items()))
    return config


def train_on_scrolls(folder: Path, **keys: object) -> Path:
    """Trains for a few steps and returns the run folder."""
    assert main(["train", str(write_scroll_config(folder, **keys))]) == 0
    return folder / "runs" / "scroll_run"
