"""A kind of data of another package works with every command: the contract of a task is all that they know about it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stoker.cli import main
from tests.conftest import PROJECT
from tests.support import toy_signals
from tests.support.tiny_training import assert_same_end, last_state, metrics

Train = Callable[..., Any]


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A config of slow and fast waves; the package that reads them is installed, also for child processes."""
    package = tmp_path / "site" / "toy_signals-1.0.dist-info"
    package.mkdir(parents=True)
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: toy-signals\nVersion: 1.0\n")
    (package / "entry_points.txt").write_text("[stoker.tasks]\nsignals = tests.support.toy_signals:Signals\n")
    monkeypatch.syspath_prepend(package.parent)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(package.parent), str(PROJECT)]))
    random = np.random.default_rng(0)
    for split, count in (("train", 64), ("val", 16)):
        for name, waves in (("fast", 9), ("slow", 2)):
            signal = np.sin(np.linspace(0, 2 * np.pi * waves, toy_signals.LENGTH)) + random.normal(
                0, 0.3, (count, toy_signals.LENGTH)
            )
            file = tmp_path / "signals" / split / f"{name}.npy"
            file.parent.mkdir(parents=True, exist_ok=True)
            np.save(file, signal.astype(np.float32))
    keys = {
        "task": "signals", "data_root": str(tmp_path / "signals"), "epochs": 4, "batch_size": 16, "lr": 0.01,
        "optimizer": "adamw", "num_workers": 1, "precision": "32", "log_every": 1, "run_name": "toy",
        "scale_lr": False, "warmup_epochs": 1, "model": "small",
    }  # fmt: skip
    path = tmp_path / "signals.yaml"
    path.write_text("".join(f"{key}: {json.dumps(value)}\n" for key, value in keys.items()))
    return path


def test_a_third_task_trains_and_resumes_bit_for_bit(config: Path, train_until: Train) -> None:
    runs = config.parent / "runs"
    whole = train_until(config, run_name="whole")
    (best,) = [line["val/acc1"] for line in metrics(runs / "whole", "epoch")][-1:]
    assert best > 90
    before, after = train_until(config, stop_at=13), train_until(config)
    assert before + after == whole
    assert_same_end(runs / "toy", runs / "whole")
    assert last_state(runs / "toy")["progress"]["finished"]


def test_a_third_task_is_planned(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(config), "--gpu", "a100-80", "--cpus", "8", "--ram", "64GB", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["unit"], found["steps_per_epoch"], found["volumes"]) == ("signals", 8, None)
    assert found["vram"]["parts"]["parameters"] > 0
    assert "reading: unknown, so no limit is assumed; --measure measures it on your signals" in found["assumptions"]


def test_a_third_task_is_verified(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["verify", str(config), "--json"])
    found = json.loads(capsys.readouterr().out)
    failed = [(check["name"], check["seen"]) for check in found["checks"] if check["status"] == "failed"]
    assert (failed, code) == ([], 0)


def test_a_third_task_is_diagnosed_from_its_config_and_from_a_run(
    config: Path, train_until: Train, capsys: pytest.CaptureFixture[str]
) -> None:
    train_until(config)
    capsys.readouterr()
    for target in ([str(config.parent / "runs" / "toy")], [str(config), "--seconds", "8"]):
        assert main(["doctor", *target, "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert found["images_per_second"] > 0
        assert set(found["stages"]) == {"decode", "other"}
    expected = ("no time for it", "for images only")
    assert [line for line in found["not_seen"] if not any(words in line for words in expected)] == []
