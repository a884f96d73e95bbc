"""What people stumble over in their first hour: each mistake is named, and each end says what comes next."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import stoker as package
from stoker import __version__
from stoker.cli import main
from stoker.core.errors import UserError
from stoker.plan.planning import cpu_caveats
from stoker.plan.records import PACKED_BYTES
from tests.support.ready_process import ReadyProcess
from tests.support.tiny_training import last_state, write_config


def test_training_ends_with_the_best_checkpoint_and_a_finished_run_answers_without_torch(
    ready: ReadyProcess, tmp_path: Path, images: Path
) -> None:
    config = write_config(tmp_path, images, epochs=1, log_every=4)
    ended = ready.run("train", config, cwd=tmp_path)
    assert ended.code == 0, ended.err
    best = next((tmp_path / "runs" / "tiny" / "checkpoints").glob("epoch=*.ckpt")).relative_to(tmp_path)
    assert f"best checkpoint: {best}\nnext: stoker eval {best}" in ended.err
    program = (
        "import sys; from stoker.cli import main; code = main(sys.argv[1:]);"
        "sys.exit(9 if 'torch' in sys.modules else code)"
    )
    again = subprocess.run(
        [sys.executable, "-c", program, "train", str(config), "--json"], cwd=tmp_path, capture_output=True, text=True
    )
    assert again.returncode == 0, again.stderr
    assert "runs/tiny is finished: 6 steps, best val/acc1" in again.stderr
    assert json.loads(again.stdout)["best_checkpoint"] == str(best)
    # Two lines of Python, with the run folder or the file.
    for place in (tmp_path / "runs" / "tiny", tmp_path / best):
        weights = package.load(place)["model"]
        assert weights.keys() == last_state(tmp_path / "runs" / "tiny")["model"].keys()
        assert all(isinstance(tensor, torch.Tensor) for tensor in weights.values())
    with pytest.raises(UserError, match=r"last\.ckpt"):
        package.load(tmp_path)
    # A damaged or another run is looked at by whoever resumes it.
    last = tmp_path / "runs" / "tiny" / "checkpoints" / "last.ckpt"
    last.write_bytes(last.read_bytes()[:-1] + b"?")
    damaged = ready.run("train", config, cwd=tmp_path)
    assert "last.ckpt" in damaged.err
    assert "hash mismatch" in damaged.err


def test_a_start_that_fails_leaves_no_run_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = tmp_path / "runs"
    config = tmp_path / "config.yaml"
    config.write_text(f"model: test_resnet\nruns_dir: {runs}\nbatch_size: 4000000\n")
    # Named before the plan speaks of the memory for such batches.
    assert main(["train", str(config)]) == 2
    assert "data_root is not set" in capsys.readouterr().err
    assert main(["train", str(config), "data_root=/nope", "batch_size=2", "--force"]) == 1
    said = capsys.readouterr().err
    assert "/nope does not exist" in said
    assert "did you mean" not in said
    assert not runs.exists() or list(runs.iterdir()) == []


def test_a_script_for_the_doctor_and_the_version_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "train.py"]) == 2
    assert "hint: stoker doctor -- python train.py" in capsys.readouterr().err
    for words in (["--version", "--json"], ["--json", "--version"]):
        assert main(words) == 0
        assert json.loads(capsys.readouterr().out) == {"version": __version__}


def test_a_plan_for_this_cpu_says_how_sure_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.getloadavg", lambda: (0.1, 0.1, 0.1))
    assert len(cpu_caveats(4)) == 1
    assert "may differ by 15 %" in cpu_caveats(4)[0]
    monkeypatch.setattr("os.getloadavg", lambda: (3.2, 3.0, 3.0))
    assert cpu_caveats(4)[1] == "this machine is busy (load 3.2 on 4 cores): idle, it would be faster"
    assert PACKED_BYTES < 113_000
