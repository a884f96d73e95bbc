"""Bad input from users: every problem is named, with what to do about it, and never shows a traceback."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.ready_process import ReadyProcess, Started
from tests.support.tiny_training import last_state, metrics, write_config, write_images


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return write_images(tmp_path / "data", train=8, val=2)


@pytest.fixture
def train(ready: ReadyProcess, tmp_path: Path, data: Path) -> Any:
    def run(*arguments: str, **keys: Any) -> Started:
        done = ready.run("train", write_config(tmp_path, data, **({"epochs": 1} | keys)), *arguments, cwd=tmp_path)
        assert "Traceback" not in done.err
        assert "error: bug" not in done.err
        return done

    return run


def test_a_single_class_is_refused(train: Any, data: Path) -> None:
    for split in ("train", "val"):
        for name in ("class1", "class2"):
            shutil.rmtree(data / split / name)
    done = train()
    assert done.code == 1
    assert "train has only one class, class0" in done.err


def test_a_checkpoint_of_another_model_names_what_differs(train: Any) -> None:
    assert train().code == 0
    done = train("model=test_convnext2", "ema_decay=0.9")
    assert done.code == 1
    assert "last.ckpt was made by another model or config" in done.err
    assert "model: test_convnext in the checkpoint, test_convnext2 in this run" in done.err
    assert "--fresh starts over" in done.err


def test_a_checkpoint_of_other_classes(train: Any, data: Path) -> None:
    assert train().code == 0
    for split in ("train", "val"):
        (data / split / "class0").rename(data / split / "zebra")
    shutil.rmtree(data / ".stoker", ignore_errors=True)
    assert train().code == 0, "a finished run has nothing left to read"
    done = train("epochs=2", "--replan")
    assert done.code == 1
    assert "class 0: class0 in the checkpoint, class1 in this run" in done.err


def test_a_corrupt_last_checkpoint_falls_back_to_the_one_before(train: Any, tmp_path: Path) -> None:
    assert train(epochs=2).code == 0
    run = tmp_path / "runs" / "tiny"
    whole = metrics(run, "epoch")
    last = run / "checkpoints" / "last.ckpt"
    content = bytearray(last.read_bytes())
    content[-100] ^= 1
    last.write_bytes(content)
    done = train(epochs=2)
    assert done.code == 0, done.err
    assert "last.ckpt" in done.err
    assert "resuming from previous.ckpt instead" in done.err
    assert last_state(run)["progress"]["finished"]
    again = metrics(run, "epoch")
    assert [(line["epoch"], line["val/loss"]) for line in again] == [
        (line["epoch"], line["val/loss"]) for line in whole
    ]


def test_a_missing_or_invalid_checkpoint_to_resume_from(train: Any, tmp_path: Path) -> None:
    done = train("--resume", "nowhere.ckpt")
    assert done.code == 1
    assert "nowhere.ckpt cannot be read: No such file or directory" in done.err
    (tmp_path / "some.ckpt").write_bytes(b"PK\x03\x04 what torch.save writes")
    done = train("--resume", "some.ckpt")
    assert done.code == 1
    assert "is a zip file, as torch.save writes it" in done.err


def test_a_full_disk_keeps_the_saved_checkpoint_and_training_continues(
    train: Any, disk_of: Callable[[str], Path]
) -> None:
    small_disk = disk_of("6m")
    keys = {"runs_dir": str(small_disk), "save_top_k": 0, "checkpoint_every_steps": 2, "batch_size": 4}
    first = train("--force", **keys)
    assert first.code == 0, first.err
    saved = (small_disk / "tiny" / "checkpoints" / "last.ckpt").stat().st_size
    shutil.rmtree(small_disk / "tiny")
    # Leaves room for one checkpoint but not for a second one next to it.
    (small_disk / "filler").write_bytes(b"\0" * (6_000_000 - int(1.6 * saved)))
    refused = train(**keys)
    assert refused.code == 1
    assert "error: does-not-fit" in refused.err
    assert "of disk (checkpoints" in refused.err
    full = train("--force", **keys)
    assert "No space left on device" in full.err
    assert "training continues, and the next save tries again" in full.err
    assert "Epoch 0: 100%" in full.err
    assert full.code == 1
    assert "error: end-not-saved" in full.err
    assert last_state(small_disk / "tiny")["progress"]["step"] == 2, "the first one is whole"
    (small_disk / "filler").unlink()
    rest = train("--force", **keys)
    assert rest.code == 0, rest.err
    assert last_state(small_disk / "tiny")["progress"]["finished"]


def test_a_folder_that_cannot_be_written(train: Any, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    done = train("runs_dir=file/runs")
    assert done.code == 2
    assert "error: run-folder-not-writable" in done.err
    assert "hint: runs_dir=/path/to/a/writable/folder" in done.err


def test_a_file_that_is_not_an_image_is_named_and_replaced(train: Any, data: Path, tmp_path: Path) -> None:
    (data / "train" / "class1" / "003.jpg").write_bytes(b"no image at all, of no kind whatever")
    done = train("max_bad_fraction=0.5")
    assert done.code == 0, done.err
    assert "003.jpg" in (tmp_path / "runs" / "tiny" / "quarantine.jsonl").read_text()
