"""Progress: lines where nobody sees a bar, a bar on a terminal, nothing on stdout."""

from __future__ import annotations

import os
import pty
import subprocess
import sys

import pytest

from stoker import console as progress
from stoker.console import progress_bar

PROGRAM = (
    "import time\n"
    "from stoker.console import progress_bar\n"
    "with progress_bar('packing', 200, unit='images') as advance:\n"
    "    for done in range(0, 201, 20):\n"
    "        advance(done, 200); time.sleep(0.05)\n"
)


def test_lines_tell_how_far_and_how_fast(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(progress, "LINE_EVERY_S", 0)
    with progress_bar("packing", unit="images") as advance:
        advance(500, 2000)
        advance(600, None)
    said = capsys.readouterr()
    first, second = said.err.splitlines()
    assert first.startswith("packing: 500 of 2,000 (25%) ")
    assert first.endswith(" images/s")
    assert second.startswith("packing: 600 ")
    assert said.out == ""


def test_short_work_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with progress_bar("packing", 10) as advance:
        for done in range(11):
            advance(done, 10)
    assert capsys.readouterr().err == ""


def test_a_terminal_gets_a_bar() -> None:
    ours, theirs = pty.openpty()
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], stderr=theirs, stdout=subprocess.PIPE,
        env=os.environ | {"TERM": "xterm", "COLUMNS": "100"},
    )  # fmt: skip
    os.close(theirs)
    shown = os.read(ours, 100_000).decode()
    os.close(ours)
    assert done.returncode == 0
    assert done.stdout == b""
    assert "packing" in shown
    assert "images/s" in shown
