"""Trackers: what each one writes, and that none can delay or stop a step."""

from __future__ import annotations

import csv
import threading
import time
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from stoker.config import load_config
from stoker.run.folder import RunFolder
from stoker.run.metrics import MetricsFile, truncate_after
from stoker.run.trackers import Trackers, trackers_for
from tests.support.waiting import wait_until


class Recorder:
    """A tracker that stores what it receives and can be made to hang or fail."""

    name = "recorder"

    def __init__(self, *, hangs: bool = False, fails_at: int | None = None) -> None:
        self.steps: list[int] = []
        self.closed = False
        self.abandoned = threading.Event()
        self.hangs = hangs
        self.fails_at = fails_at

    def open(self) -> None:
        if self.hangs:
            self.abandoned.wait()

    def log(self, record: Mapping[str, Any]) -> None:
        if record["step"] == self.fails_at:
            raise ValueError("the line is dead\nand this is the rest")
        self.steps.append(record["step"])

    def close(self) -> None:
        self.closed = True

    def abandon(self) -> str | None:
        self.abandoned.set()
        return None


def record(step: int) -> dict[str, Any]:
    return {"kind": "step", "time": time.time(), "step": step, "epoch": 0, "train/loss": 1.0}


def test_every_record_arrives_in_order_before_close_returns() -> None:
    recorder = Recorder()
    with closing(Trackers([recorder])) as trackers:
        for step in range(1000):
            trackers.log(record(step))
        trackers.log({"kind": "event", "time": 0, "event": "checkpoint", "step": 3})
    assert recorder.steps == list(range(1000))
    assert recorder.closed


def test_a_tracker_that_hangs_delays_no_step_and_loses_the_oldest() -> None:
    said: list[str] = []
    recorder = Recorder(hangs=True)
    trackers = Trackers([recorder], said.append, queued=100)
    for step in range(1000):
        trackers.log(record(step))
    assert recorder.steps == []  # it hung all the while
    recorder.abandoned.set()
    trackers.close()
    assert recorder.steps == list(range(900, 1000))
    assert said == ["note: recorder was too slow and missed 900 records; metrics.jsonl has them"]


def test_closing_a_tracker_that_hangs_ends_with_the_timeout() -> None:
    said: list[str] = []
    hanging, fine = Recorder(hangs=True), Recorder()
    trackers = Trackers([hanging, fine], said.append)
    trackers.log(record(1))
    wait_until(lambda: fine.steps == [1])
    trackers.close(timeout=2)
    assert hanging.abandoned.is_set()
    assert said == ["note: recorder did not finish in time; 1 record was not delivered; metrics.jsonl has everything"]


def test_a_failing_tracker_is_reported_once_and_switched_off() -> None:
    said: list[str] = []
    failing, fine = Recorder(fails_at=3), Recorder()
    with closing(Trackers([failing, fine], said.append)) as trackers:
        for step in range(10):
            trackers.log(record(step))
    assert failing.steps == [0, 1, 2]
    assert fine.steps == list(range(10))
    assert said == ["warning: recorder is disabled: the line is dead; metrics.jsonl has everything"]


def test_without_a_key_in_the_config_there_are_no_trackers(tmp_path: Path) -> None:
    with closing(trackers_for(load_config(None).config, RunFolder(tmp_path))) as trackers:
        trackers.log(record(1) | {"kind": "epoch"})
    assert list(tmp_path.iterdir()) == []


def train(folder: RunFolder, first: int, last: int, *, resumed_at: int | None = None, loss: float = 1.0) -> None:
    config = load_config(None, ["csv=true", "tensorboard=true"]).config
    with (
        closing(MetricsFile(folder.metrics_file)) as metrics,
        closing(trackers_for(config, folder, scores=["val/loss", "val/acc1"], resumed_at=resumed_at)) as trackers,
    ):
        for step in range(first, last + 1):
            trackers.log(metrics.step(step, (step - 1) // 5, {"train/loss": loss, "images_per_second": 100 + step}))
            if step % 5 == 0:
                epoch = step // 5 - 1
                trackers.log(metrics.epoch(step, epoch, {"val/acc1": 10.0 * step, "val/loss": None, "seconds": 2.5}))
        trackers.close(timeout=60)


def test_csv_has_a_row_for_each_epoch_and_survives_a_resume(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    train(folder, 1, 13)
    header = folder.metrics_csv_file.read_text().splitlines()[0]
    assert header.startswith("epoch,step,val/loss,val/acc1,seconds,images_per_second,wait_share")
    truncate_after(folder.metrics_file, 7)
    train(folder, 8, 15, resumed_at=7)
    with folder.metrics_csv_file.open() as stream:
        rows = list(csv.DictReader(stream))
    assert folder.metrics_csv_file.read_text().splitlines()[0] == header
    assert [(row["epoch"], row["step"], row["val/acc1"], row["val/loss"]) for row in rows] == [
        ("0", "5", "50.0", ""),
        ("1", "10", "100.0", ""),
        ("2", "15", "150.0", ""),
    ]


def test_tensorboard_reads_back_what_was_written_and_forgets_the_lost_part(tmp_path: Path) -> None:
    reading = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    folder = RunFolder(tmp_path)
    train(folder, 1, 12, loss=1.0)
    truncate_after(folder.metrics_file, 7)
    train(folder, 8, 15, resumed_at=7, loss=2.0)
    events = reading.EventAccumulator(str(folder.tensorboard))
    events.Reload()
    losses = {event.step: event.value for event in events.Scalars("train/loss")}
    assert losses == {step: 1.0 if step <= 7 else 2.0 for step in range(1, 16)}
    assert [event.step for event in events.Scalars("train/loss")] == list(range(1, 16))
    assert [(event.step, event.value) for event in events.Scalars("val/acc1")] == [(5, 50), (10, 100), (15, 150)]
    assert "val/loss" not in events.Tags()["scalars"]
