"""Importing and building networks: what it does not import, and that it prints nothing."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.support.waiting import DEADLINE_S

PROGRAM = """
import sys, warnings
import torch
import stoker.tasks.images.models, timm
from stoker.config import Config
from stoker.tasks.volumes.networks import ARCHITECTURES, build_volume_model

assert "wandb" not in sys.modules
assert timm.is_model("resnet50")
for name in ARCHITECTURES:
    with torch.device("meta"):
        build_volume_model(Config(task="segment3d", model=name, patch_size=(64, 64, 64)), 1, 2)
warnings.simplefilter("ignore")  # what wandb itself warns of is not ours
import wandb
assert wandb.__version__
"""


@pytest.mark.release
def test_networks_load_without_importing_wandb_and_print_nothing_and_wandb_can_still_be_imported() -> None:
    command = [sys.executable, "-W", "default", "-c", PROGRAM]
    done = subprocess.run(command, check=False, capture_output=True, timeout=DEADLINE_S)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")
