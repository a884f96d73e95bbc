"""`python train.py` with the flags familiar from other scripts."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import PROJECT
from tests.support.ready_process import ReadyProcess
from tests.support.tiny_training import metrics, write_config
from tests.support.waiting import DEADLINE_S

sys.path.insert(0, str(PROJECT))
from train import arguments_for_stoker


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--config c.yaml", "train c.yaml"),
        ("--config c.yaml --epochs 3 --devices 4 --num_nodes 2", "train c.yaml epochs=3 devices=4 num_nodes=2"),
        ("--config c.yaml --wandb_project p --wandb_name n", "train c.yaml wandb_project=p wandb_name=n"),
        ("--config c.yaml --wandb_project p --no_wandb", "train c.yaml wandb=false wandb_project=null"),
        ("--config c.yaml --resume last.ckpt", "train c.yaml --resume last.ckpt"),
        ("--config c.yaml --from model.pth", "train c.yaml --from model.pth"),
        ("--config c.yaml lr=1 --fresh", "train c.yaml lr=1 --fresh"),
        ("seed=1 --config c.yaml lr=1 --fresh momentum=0.5", "train c.yaml seed=1 lr=1 momentum=0.5 --fresh"),
        (
            "--config c.yaml --data_root /d --batch_size 8 --lr 0.1 --precision 16-mixed --max_classes 3 "
            "--max_samples_per_class 5",
            "train c.yaml data_root=/d batch_size=8 lr=0.1 precision=16-mixed subset_classes=3 "
            "subset_train_per_class=5",
        ),
    ],
)
def test_flags_mean_the_same_as_stokers_settings(flags: str, words: str) -> None:
    assert arguments_for_stoker(flags.split()) == words.split()


def run_script(folder: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(PROJECT / "train.py"), *flags], cwd=folder, capture_output=True, text=True,
        timeout=DEADLINE_S, env=os.environ | {"HOME": str(folder), "WANDB_MODE": "offline", "WANDB_SILENT": "true"},
    )  # fmt: skip


def test_the_documented_flags_train(tmp_path: Path, images: Path, ready: ReadyProcess) -> None:
    config = write_config(tmp_path, images, batch_size=16, epochs=5)
    first = run_script(
        tmp_path, "--config", str(config), "--wandb_project", "tests", "--wandb_name", "one", "--epochs", "1",
        "--devices", "1", "--num_nodes", "1",
    )  # fmt: skip
    assert first.returncode == 0, first.stderr
    run = tmp_path / "runs" / "tiny"
    assert [line["step"] for line in metrics(run, "epoch")] == [3]
    assert (run / "wandb_id.txt").exists()  # what W&B keeps is in test_trackers.py
    # A checkpoint resumes elsewhere, without W&B.
    flags = [
        "run_name=two", "--config", str(config), "--resume", str(run / "checkpoints" / "last.ckpt"), "--no_wandb",
        "--devices", "1", "--batch_size", "16", "--epochs", "1",
    ]  # fmt: skip
    second = ready.run(*arguments_for_stoker(flags), cwd=tmp_path)
    assert second.code == 0, second.err
    assert "is finished: 3 steps" in second.err
    assert not (tmp_path / "runs" / "two" / "wandb_id.txt").exists()
    # As the documents print it, without the run folder's path.
    flags = ["--config", str(config), "--resume", "checkpoints/last.ckpt", "--no_wandb", "--batch_size", "16"]
    again = ready.run(*arguments_for_stoker([*flags, "--epochs", "1", "--devices", "1"]), cwd=tmp_path)
    assert "is finished: 3 steps" in again.err
    missing = ready.run(*arguments_for_stoker(["run_name=three", *flags]), cwd=tmp_path)
    assert (missing.code, "checkpoints/last.ckpt cannot be read" in missing.err) == (1, True)


def test_settings_may_come_before_between_and_after_the_other_words(
    tmp_path: Path, images: Path, ready: ReadyProcess
) -> None:
    config = write_config(tmp_path, images, batch_size=16, epochs=5, warmup_epochs=2)
    done = ready.run("train", "epochs=1", "--fresh", config, "run_name=anywhere", "--force", "seed=3", cwd=tmp_path)
    assert done.code == 0, done.err
    assert "note: warmup_epochs: 2 does not fit into epochs=1: using 0" in done.err
    assert [line["step"] for line in metrics(tmp_path / "runs" / "anywhere", "epoch")] == [3]
    assert "no config file given" in ready.run("train", "epochs=1", cwd=tmp_path).err
