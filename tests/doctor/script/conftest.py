"""Runs real scripts, unmodified, with the doctor attached."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from stoker.cli import main
from stoker.doctor.script.run_script import AttachResult, run_attached

SCRIPTS = Path(__file__).parents[2] / "support" / "foreign_scripts"
Attached = Callable[..., AttachResult]


def attach(script: str, *arguments: str, steps: int | None = None, seconds: float | None = None) -> AttachResult:
    return run_attached([sys.executable, str(SCRIPTS / script), *arguments], steps=steps, seconds=seconds)


def diagnosed(capfd: pytest.CaptureFixture[str], script: Path, *arguments: str) -> dict[str, Any]:
    """What `stoker doctor --json` says of a script."""
    assert main(["doctor", "--json", "--", sys.executable, str(script), *arguments]) == 0
    document: dict[str, Any] = json.loads(capfd.readouterr().out)
    return document


def line_of(script: Path, text: str) -> str:
    """file:line of the only line of the script with this text."""
    (number,) = (n for n, line in enumerate(script.read_text().splitlines(), 1) if text in line)
    return f"{script.name}:{number}"


@pytest.fixture
def attached() -> Attached:
    """Runs one of the foreign scripts until it ends or is stopped."""
    return attach
