"""Training output: a line redrawn in place on a terminal, plain lines elsewhere, everything in the log."""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import pytest

from stoker.run.metrics import MetricsFile
from stoker.train.observer import RunObserver
from stoker.train.progress_line import TrainLog, TrainProgress
from tests.support.terminal import on_a_terminal

PROGRAM = """
import sys, time
from pathlib import Path
from stoker.train.progress_line import TrainLog
from stoker.train.progress_line import TrainProgress
progress = TrainProgress(TrainLog(Path(sys.argv[1])))
progress.epoch_begins(1, 40)
for step in range(41, 81):
    progress.step(step, 6.9, lambda: {"wait_share": 0.03})
    time.sleep(0.01)
    if step == 60:
        time.sleep(0.15)
        progress.step(61, 6.8)
        progress.say("W&B: offline")
progress.validation_begins(4)
for _ in range(4):
    progress.validation_step()
progress.epoch_ends({"train/loss": 6.234, "train/acc1": None, "val/acc1": 1.2, "val/acc5": 5.4})
progress.epoch_begins(2, 1)
progress.step(81, 6.5)
progress.close()
"""


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """What the program shows on a terminal, and its log."""
    logs = tmp_path_factory.mktemp("logs")
    code, text = on_a_terminal(sys.executable, "-c", PROGRAM, logs)
    assert code == 0, text
    (log,) = logs.glob("train_*.log")
    return text, log.read_text()


def screen(shown: str) -> list[str]:
    """What the terminal shows at the end."""
    lines = [""]
    for part in re.split(r"(\r\n|\r|\x1b\[K)", shown):
        if part == "\r\n":
            lines.append("")
        elif part not in ("", "\r", "\x1b[K"):
            lines[-1] = part
    return lines


def test_a_terminal_shows_one_moving_line_below_the_messages_and_then_the_figures(shown: tuple[str, str]) -> None:
    lines = screen(shown[0])
    assert lines[0] == "W&B: offline"
    assert re.search(r"W&B: offline\r\nEpoch 1:  5\d%", shown[0])
    assert re.fullmatch(r"Epoch 1: 100%\|██████████\| 40/40 \[\d\d:\d\d<00:00, [\d.]+it/s.*\]", lines[1])
    assert re.fullmatch(r"Validation: 100%\|██████████\| 4/4 \[\d\d:\d\d<00:00, [\d.]+it/s\]", lines[2])
    assert lines[3:8] == ["", "Epoch 1 metrics:", "  train/loss: 6.234", "  val/acc1: 1.2%", "  val/acc5: 5.4%"]
    assert re.fullmatch(r"Epoch 2: 100%.*, train/loss=6.5, val/acc1=1.2%\]", lines[8])
    assert lines[9:] == [""]


def test_without_a_terminal_there_are_plain_lines(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM, str(tmp_path)], capture_output=True, text=True, check=True)
    assert done.stdout == ""
    assert "\r" not in done.stderr
    assert "\x1b" not in done.stderr
    lines = done.stderr.splitlines()
    assert lines[0] == "W&B: offline"
    assert lines[1].startswith("Epoch 1: 100%")
    assert "  train/loss: 6.234" in lines


def test_the_train_steps_can_be_found_in_the_log(shown: tuple[str, str]) -> None:
    text = shown[1]
    assert "\r" not in text
    assert "\x1b" not in text
    steps = [line for line in text.splitlines() if "Train step" in line]
    assert re.fullmatch(
        r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d Train step 81  Epoch 2: 100%\|█+\| 1/1 \[.*it/s, train/loss=6.5.*\]", steps[-1]
    )
    assert re.search(r"^[\d-]+ [\d:]+   val/acc1: 1.2%$", text, re.MULTILINE)
    assert "W&B: offline" in text


def test_lines_come_by_the_clock_and_the_log_has_them_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    log, stream = TrainLog(tmp_path), io.StringIO()
    progress = TrainProgress(log, stream, line_every_s=0.5)
    progress.epoch_begins(0, 1000, done=100)
    asked = 0

    def extra() -> dict[str, float | None]:
        nonlocal asked
        asked += 1
        return {"wait_share": 0.5, "train/acc1": None}

    for step in range(101, 111):
        progress.step(step, 1.5, extra)
    assert (stream.getvalue(), asked) == ("", 0)
    now_s += 0.55
    progress.step(111, 1.5, extra)
    assert asked == 1
    assert re.fullmatch(
        r"Epoch 0:  11%\|█\| 111/1000 \[00:\d\d<.*, 20\.00it/s, train/loss=1.5, wait=50%\]\n", stream.getvalue()
    )
    assert "Train step 111  Epoch 0:  11%" in log.path.read_text()


def test_a_closed_pipe_does_not_stop_training(tmp_path: Path) -> None:
    ours, theirs = os.pipe()
    os.close(ours)
    log = TrainLog(tmp_path)
    with os.fdopen(theirs, "w", closefd=False) as stream:
        progress = TrainProgress(log, stream, line_every_s=0)
        progress.epoch_begins(0, 2)
        progress.step(1, 1.0)
        progress.step(2, 1.0)
        progress.epoch_ends({"train/loss": 1.0})
        progress.close()
        os.dup2(os.open(os.devnull, os.O_WRONLY), theirs)  # so that the rest of the buffer can be flushed
    os.close(theirs)
    assert "Train step 2" in log.path.read_text()


def test_two_logs_from_the_same_second_are_two_files_without_secrets(tmp_path: Path) -> None:
    first, second = TrainLog(tmp_path), TrainLog(tmp_path)
    assert first.path != second.path
    first.write("data from https://user:very-secret@host/x")
    assert "very-secret" not in first.path.read_text()
    first.close()
    second.close()


def test_the_loss_moves_between_the_lines_of_the_metrics_file(tmp_path: Path) -> None:
    shown: list[float] = []
    progress = SimpleNamespace(step=lambda _step, loss, _extra: shown.append(loss))
    clock = SimpleNamespace(wait_share=0.0)
    with closing(MetricsFile(tmp_path / "metrics.jsonl")) as file:
        observer = RunObserver(file, SimpleNamespace(), progress, log_every=100, world=1)  # type: ignore[arg-type]
        for step in range(2, 6):
            observer.step(step, 0, {"train/loss": 1.0 / step, "train/lr": 0.1, "clock": clock})
    assert shown == [1 / 2, 1 / 3, 1 / 4, 1 / 5]
