"""Runs real scripts, unmodified, with the doctor attached."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from stoker.doctor.script.run_script import AttachResult, run_attached

SCRIPTS = Path(__file__).parents[2] / "support" / "foreign_scripts"
Attached = Callable[..., AttachResult]


def attach(script: str, *arguments: str, steps: int | None = None, seconds: float | None = None) -> AttachResult:
    return run_attached([sys.executable, str(SCRIPTS / script), *arguments], steps=steps, seconds=seconds)


@pytest.fixture
def attached() -> Attached:
    """Runs one of the foreign scripts until it ends or is stopped."""
    return attach
