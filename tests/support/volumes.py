"""A small trained network for volumes and its data, for commands that take a checkpoint or a config."""

from __future__ import annotations

from pathlib import Path

import pytest

from stoker.cli import main
from stoker.data.volumes.scrolls import write_scrolls
from stoker.errors import UserError
from stoker.scores.topology import load_matcher


def _has_matcher() -> bool:
    try:
        load_matcher()
    except UserError:
        return False
    return True


needs_matcher = pytest.mark.skipif(not _has_matcher(), reason="pip install --no-deps topolosses")
"""For tests of TopoScore, which only Betti-Matching-3D defines."""


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
