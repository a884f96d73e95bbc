"""Runs real scripts, unmodified, with the doctor attached."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from stoker.cli import main
from stoker.doctor.script.run_script import AttachResult, run_attached

SCRIPTS = Path(__file__).parents[2] / "support" / "foreign_scripts"


def attached(script: str, *arguments: str, **limits: float) -> AttachResult:
    """Runs one of the foreign scripts until it ends or is stopped."""
    return run_attached([sys.executable, str(SCRIPTS / script), *arguments], **limits)


def diagnosed(capfd: pytest.CaptureFixture[str], script: Path, *arguments: str) -> dict[str, Any]:
    """What `stoker doctor --json` says of a script."""
    assert main(["doctor", "--json", "--", sys.executable, str(script), *arguments]) == 0
    return json.loads(capfd.readouterr().out)


def line_of(script: Path, text: str) -> str:
    """file:line of the only line of the script with this text."""
    (number,) = (n for n, line in enumerate(script.read_text().splitlines(), 1) if text in line)
    return f"{script.name}:{number}"
