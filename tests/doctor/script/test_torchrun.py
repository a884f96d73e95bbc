"""Several ranks under torchrun: the times are those of rank 0."""

from __future__ import annotations

import sys

from stoker.doctor.script.run_script import run_attached
from tests.doctor.script.conftest import SCRIPTS


def test_rank_0_of_two_is_reported() -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run"]  # warm
    script = [str(SCRIPTS / "plain.py"), "--workers", "1", "--epochs", "1"]
    result = run_attached([*torchrun, "--standalone", "--nproc-per-node", "2", *script])
    assert result.exit_code == 0
    assert any(note == "2 ranks trained; these are the times of rank 0" for note in result.notes)
    assert result.observed is not None
    assert result.observed.steps == 7
    assert len(result.observed.batches) == 8
