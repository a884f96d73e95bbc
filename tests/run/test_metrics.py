"""metrics.jsonl: whole lines, absent is not zero, and after a resume the same as an uninterrupted run's."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from stoker.run.metrics import MetricsFile, metrics_of, read_metrics, truncate_after
from tests.support.waiting import wait_until


def without_time(path: Path) -> list[dict[str, object]]:
    return [{name: item for name, item in record.items() if name != "time"} for record in read_metrics(path)]


def write_run(path: Path, first: int, last: int, steps_per_epoch: int = 10, every: int = 2) -> None:
    """Lines for the steps after `first` up to `last`, and for the epochs that end among them."""
    with closing(MetricsFile(path)) as metrics:
        for step in range(first + 1, last + 1):
            epoch = (step - 1) // steps_per_epoch
            if step % every == 0:
                metrics.step(step, epoch, {"train/loss": 7.0 - step / 100, "train/lr": 0.1})
            if step % steps_per_epoch == 0:
                metrics.epoch(step, epoch, {"train/loss": 6.0 - epoch, "val/acc1": 1.0 + epoch})


def test_a_line_contains_what_was_measured_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "new" / "metrics.jsonl"
    with closing(MetricsFile(path)) as metrics:
        written = metrics.step(50, 0, {"train/loss": np.float32(6.5), "train/acc1": None, "wait_share": 0.25})
    (line,) = path.read_text().splitlines()
    assert json.loads(line) == written
    assert metrics_of(written) == {"train/loss": 6.5, "wait_share": 0.25}
    assert "train/acc1" not in written
    assert (written["kind"], written["step"], written["epoch"]) == ("step", 50, 0)
    assert abs(written["time"] - time.time()) < 60


def test_a_nan_loss_is_null_and_an_event(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with closing(MetricsFile(path)) as metrics:
        metrics.step(3, 0, {"train/loss": float("nan"), "train/lr": 0.1})
        metrics.epoch(4, 0, {"val/loss": float("-inf")})
    assert without_time(path) == [
        {"kind": "event", "event": "not-finite", "step": 3, "metrics": {"train/loss": "nan"}},
        {"kind": "step", "step": 3, "epoch": 0, "train/loss": None, "train/lr": 0.1},
        {"kind": "event", "event": "not-finite", "step": 4, "metrics": {"val/loss": "-inf"}},
        {"kind": "epoch", "step": 4, "epoch": 0, "val/loss": None},
    ]
    assert "NaN" not in path.read_text()
    assert "Infinity" not in path.read_text()


def test_events_say_what_happened(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with closing(MetricsFile(path)) as metrics:
        metrics.event("oom", 7, micro_batch=32, was=64, hint=None)
        metrics.event("quarantine", samples=["a.jpg", "b.jpg"])
    assert without_time(path) == [
        {"kind": "event", "event": "oom", "step": 7, "micro_batch": 32, "was": 64},
        {"kind": "event", "event": "quarantine", "samples": ["a.jpg", "b.jpg"]},
    ]


@pytest.mark.parametrize(("checkpoint", "crashed_at"), [(0, 11), (5, 20), (10, 23), (11, 30)])
def test_a_resumed_run_leaves_the_file_of_an_uninterrupted_one(
    tmp_path: Path, checkpoint: int, crashed_at: int
) -> None:
    whole, broken = tmp_path / "whole.jsonl", tmp_path / "broken.jsonl"
    write_run(whole, 0, 40)
    write_run(broken, 0, crashed_at)
    truncate_after(broken, checkpoint)
    write_run(broken, checkpoint, 40)
    assert without_time(broken) == without_time(whole)


def test_an_epoch_not_yet_validated_at_the_checkpoint_is_removed(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write_run(path, 0, 20)
    assert truncate_after(path, 20, epochs_done=1) == 1
    assert [record["epoch"] for record in read_metrics(path, "epoch")] == [0]
    assert [record["step"] for record in read_metrics(path, "step")] == list(range(2, 21, 2))


def test_with_nothing_to_remove_the_file_is_untouched(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    assert truncate_after(path, 5) == 0
    assert not path.exists()
    write_run(path, 0, 20)
    before = path.stat().st_ino
    assert truncate_after(path, 20) == 0
    assert path.stat().st_ino == before


@pytest.mark.parametrize("torn", [b'{"kind": "st', b"\x00" * 100_000, b'{"kind": "step", "step": 9, "epoch": 0}'])
def test_half_a_line_does_not_spoil_the_next_one(tmp_path: Path, torn: bytes) -> None:
    path = tmp_path / "metrics.jsonl"
    write_run(path, 0, 4)
    whole = without_time(path)
    with path.open("ab") as stream:
        stream.write(torn)
    assert without_time(path) == whole
    with closing(MetricsFile(path)) as metrics:
        metrics.event("resumed", 4)
    assert without_time(path) == [*whole, {"kind": "event", "event": "resumed", "step": 4}]
    assert all(line.startswith(b"{") for line in path.read_bytes().splitlines())


def test_every_line_is_whole_after_a_kill(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    program = (
        "import sys; from pathlib import Path; from stoker.run.metrics import MetricsFile\n"
        "metrics = MetricsFile(Path(sys.argv[1])); step = 0\n"
        "while True:\n    step += 1; metrics.step(step, 0, {'train/loss': 1.0, 'name' * 50: 2.0})\n"
    )
    writer = subprocess.Popen([sys.executable, "-c", program, str(path)])
    wait_until(lambda: path.exists() and path.stat().st_size > 20_000)
    os.kill(writer.pid, signal.SIGKILL)
    writer.wait()
    MetricsFile(path).close()  # removes a partial line: the kernel writes page by page, so a kill may leave one
    data = path.read_bytes()
    assert data.endswith(b"\n")
    steps = [json.loads(line)["step"] for line in data.splitlines()]
    assert steps == list(range(1, len(steps) + 1))
    assert len(steps) > 10


@pytest.mark.parametrize("how", ["deleted", "renamed", "deleted at the end"])
def test_a_folder_that_was_deleted_or_renamed_is_written_again_with_every_line(tmp_path: Path, how: str) -> None:
    folder, said, restored = tmp_path / "run", list[str](), list[str]()
    file = folder / "metrics.jsonl"
    metrics = MetricsFile(file, said.append, lambda: restored.append("config"))
    for step in range(1, 4):
        metrics.step(step, 0, {"train/loss": 1.0})
        if (step, how) in ((2, "deleted"), (3, "deleted at the end")):
            shutil.rmtree(folder)
        elif (step, how) == (2, "renamed"):
            folder.rename(tmp_path / "elsewhere")
    metrics.close()
    assert [line["step"] for line in read_metrics(file)] == [1, 2, 3]
    assert restored == ["config"]
    (warning,) = said
    assert warning == f"warning: {file} was deleted or moved while the run was writing it; it is written again"
    if how == "renamed":
        assert [line["step"] for line in read_metrics(tmp_path / "elsewhere" / file.name)] == [1, 2]


def test_a_full_disk_does_not_stop_training_and_loses_no_line_once_there_is_room(tmp_path: Path) -> None:
    # A file size limit stands in for a full disk: the kernel accepts part of the line, then refuses.
    path = tmp_path / "metrics.jsonl"
    program = (
        "import resource, signal, sys; from pathlib import Path; from stoker.run.metrics import MetricsFile\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "metrics = MetricsFile(Path(sys.argv[1]))\n"
        "hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))\n"
        "for step in range(1, 101): metrics.step(step, 0, {'train/loss': 1.0})\n"
        "print(Path(sys.argv[1]).read_text().endswith(chr(10)), flush=True)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))\n"
        "metrics.step(101, 0, {'train/loss': 1.0}); metrics.close()\n"
    )
    done = subprocess.run([sys.executable, "-c", program, str(path)], capture_output=True, text=True, check=True)
    assert done.stdout == "True\n"
    assert done.stderr.count("cannot be written") == 1
    assert [record["step"] for record in read_metrics(path)] == list(range(1, 102))
