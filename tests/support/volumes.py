"""A small trained network for volumes and its data, for commands that take a checkpoint or a config."""

from __future__ import annotations

from pathlib import Path

import pytest

from stoker.cli import main
from stoker.core.errors import UserError
from stoker.tasks.demo import write_scrolls
from stoker.tasks.volumes.scores.topology import load_matcher
from tests.support.tiny_volumes import write_volume_config


def _has_matcher() -> bool:
    try:
        load_matcher()
    except UserError:
        return False
    return True


needs_matcher = pytest.mark.skipif(not _has_matcher(), reason="pip install --no-deps topolosses")
"""For tests of TopoScore, which only Betti-Matching-3D defines."""


def write_scroll_config(folder: Path, **keys: object) -> Path:
    """Six scrolls of 24³ voxels in the competition's layout, and a config that trains on them for a moment."""
    data = folder / "scrolls"
    write_scrolls(data, volumes=6, shape=(24, 24, 24), seed=1)
    return write_volume_config(
        folder, data, **{"epochs": 1, "steps_per_epoch": 6, "runs_dir": str(folder / "runs")} | keys
    )


def train_on_scrolls(folder: Path, **keys: object) -> Path:
    """Trains for a few steps and returns the run folder."""
    assert main(["train", str(write_scroll_config(folder, **keys))]) == 0
    return folder / "runs" / "tiny"
