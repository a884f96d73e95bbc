"""Progress: the line of a training loop, a bar on a terminal, lines elsewhere, nothing on stdout."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from stoker.core import console
from stoker.core.console import bar_line, finding_lines, progress_bar
from stoker.core.finding import Estimate, Finding, as_json
from tests.support.terminal import on_a_terminal

PROGRAM = (
    "import time\n"
    "from stoker.core.console import progress_bar\n"
    "with progress_bar('packing', 200, unit='images') as advance:\n"
    "    for done in range(0, 201, 20):\n"
    "        advance(done, 200); time.sleep(0.05)\n"
)


def test_the_lines_match_the_documentation() -> None:
    assert (
        bar_line("Epoch 0", 33, 3336, 30, 3303 / 3000, {"train/loss": 6.9, "wait_share": 0.03})
        == "Epoch 0:   1%|▏| 33/3336 [00:30<50:00, 1.10it/s, train/loss=6.9, wait=3%]"
    )
    assert (
        bar_line("Epoch 5", 501, 5004, 500, 1.0007, {"train/loss": 6.2, "val/acc1": 2.3})
        == "Epoch 5:  10%|█| 501/5004 [08:20<1:15:00, 1.00it/s, train/loss=6.2, val/acc1=2.3%]"
    )
    assert (
        bar_line("Validation", 196, 196, 135, 196 / 135)
        == "Validation: 100%|██████████| 196/196 [02:15<00:00, 1.45it/s]"
    )
    # Only finished work shows 100 %, and an unknown value is a question mark.
    assert bar_line("Epoch 0", 9999, 10_000, 1, 1).startswith("Epoch 0:  99%|█████████▉| ")
    assert bar_line("Epoch 0", 0, 10, 0, None) == "Epoch 0:   0%|| 0/10 [00:00<?, ?it/s]"
    assert bar_line("Epoch 0", 12, None, 61, 2.0) == "Epoch 0: 12it [01:01, 2.00it/s]"
    assert bar_line("Epoch 0", 5, 10, 90, 1 / 18, blocks=False) == (
        "Epoch 0:  50%|#####| 5/10 [01:30<01:30, 18.00s/it]"
    )


def test_lines_show_progress_and_speed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with progress_bar("packing", unit="images") as advance:
        monkeypatch.setattr(console, "LINE_EVERY_S", 1000)
        advance(400, 2000)  # too soon
        monkeypatch.setattr(console, "LINE_EVERY_S", 0)
        advance(500, 2000)
        advance(600, None)
    said = capsys.readouterr()
    first, second = said.err.splitlines()
    assert first.startswith("packing: 500 of 2,000 (25%) ")
    assert " images/s, " in first
    assert first.endswith(" left")
    assert second.startswith("packing: 600 ")
    assert said.out == ""


def test_a_terminal_gets_a_bar(tmp_path: Path) -> None:
    code, shown = on_a_terminal("sh", "-c", 'exec "$0" -c "$1" >"$2"', sys.executable, PROGRAM, tmp_path / "out")
    assert code == 0, shown
    assert (tmp_path / "out").read_text() == ""
    assert "packing" in shown
    assert "images/s" in shown


def test_a_finding_shows_its_fix_and_its_details_below_what_was_seen() -> None:
    found = Finding("8 cores are too few", "more cores", Estimate(1.2, 1.4, 1.6), details=("a table",))
    assert finding_lines(found, "  ! ") == [
        "  ! 8 cores are too few   1.4x (1.2-1.6)", "    fix: more cores", "    a table",
    ]  # fmt: skip
    unknown = Finding("the driver does not answer", "install it", status="unknown")
    assert finding_lines(unknown)[1] == "    to check it: install it"
    assert finding_lines(Finding("many words " * 4), width=30) == [
        "  - many words many words many",
        "    words many words",
    ]


def test_documents_name_the_parts_of_a_finding_as_they_always_have() -> None:
    found = Finding("too slow", name="slow", status="failed", facts={"rate": float("nan"), "path": Path("a")})
    assert as_json(found, "id", "message", "fix", "speedup", "refuses") == {
        "id": "slow", "message": "too slow", "fix": None, "speedup": None, "refuses": True,
    }  # fmt: skip
    assert as_json(found, "facts", "details") == {"facts": {"rate": None, "path": "a"}, "details": []}
