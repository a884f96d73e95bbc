"""The cost of importing networks."""

from __future__ import annotations

import subprocess
import sys

from tests.support.waiting import DEADLINE_S


def test_networks_load_without_importing_wandb_and_wandb_can_still_be_imported() -> None:
    program = (
        "import sys, stoker.models.build, timm; assert 'wandb' not in sys.modules; "
        "assert timm.is_model('resnet50'); import wandb; assert wandb.__version__"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=DEADLINE_S)
