"""`stoker train` as a user sees it: its output, its files, and what it learns."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from tests.support.ready_process import ReadyProcess
from tests.support.tiny_training import last_state, metrics, write_config, write_images

EVERY_EPOCH = {
    "train/loss", "train/acc1", "train/acc5", "train/lr", "val/loss", "val/acc1", "val/acc5", "seconds",
    "images_per_second", "wait_share",
}  # fmt: skip


def test_a_run_reports_every_epoch_completely(ready: ReadyProcess, tmp_path: Path, images: Path) -> None:
    config = write_config(tmp_path, images, epochs=3, lr=2.0)
    done = ready.run("train", config, "--json", cwd=tmp_path)
    assert done.code == 0, done.err
    run = tmp_path / "runs" / "tiny"
    epochs = metrics(run, "epoch")
    assert [(line["epoch"], line["step"]) for line in epochs] == [(0, 6), (1, 12), (2, 18)]
    assert all(line.keys() >= EVERY_EPOCH for line in epochs)
    assert epochs[-1]["train/loss"] < epochs[0]["train/loss"]
    assert epochs[-1]["val/acc1"] == 100, "three colours are easy"
    for line in ("total batch 8 (8), 6 steps an epoch, 3 epochs", "learning rate 0.0625 = 2 x 8 / 256, sgd, cosine"):
        assert line in done.err
    logs = list((run / "logs").glob("train_*.log"))
    assert len(logs) == 1
    text = logs[0].read_text()
    for words in ("Epoch 2: 100%|", "val/acc1: 100.0%", "48 training images, 15 validation images"):
        assert words in text
    assert '"best_val_acc1": 100.0' in done.out
    best = sorted(path.name for path in (run / "checkpoints").glob("epoch=*"))
    assert best
    assert all(name.partition("-")[2].startswith("val_acc1=") for name in best)


def test_another_programs_config_trains_once_imported_with_its_own_learning_rate(
    ready: ReadyProcess, tmp_path: Path, images: Path
) -> None:
    (tmp_path / "theirs.yaml").write_text(
        f"data_root: {images}\nmodel_name: test_convnext\nimg_size: 32\nmax_epochs: 9\nwarmup_epochs: 2\nlr: 0.5\n"
        "lr_scheduler: none\nbatch_size: 8\nnum_workers: 0\naccumulate_grad_batches: 2\ngradient_clip_val: 1.0\n"
        "log_every_n_steps: 1\nmonitor: val/acc1\nrandom_horizontal_flip: false\nsomething_else: 3\n"
    )
    refused = ready.run("train", "theirs.yaml", cwd=tmp_path)
    assert refused.code == 2
    assert "hint: stoker config import theirs.yaml -o ours.yaml" in refused.err
    imported = ready.run("config", "import", "theirs.yaml", "-o", "ours.yaml", "--accept", cwd=tmp_path)
    assert imported.code == 0, imported.err
    assert "unknown: something_else" in imported.err
    done = ready.run("train", "ours.yaml", "epochs=1", cwd=tmp_path)
    assert done.code == 0, done.err
    steps = metrics(tmp_path / "runs" / "ours", "step")
    assert [line["step"] for line in steps] == [1, 2, 3]  # 48 images, 2 x 8 for each update
    assert {line["train/lr"] for line in steps} == {0.5}


def test_mixed_batches_have_no_accuracy_rather_than_zero(ready: ReadyProcess, tmp_path: Path, images: Path) -> None:
    config = write_config(tmp_path, images, epochs=1)
    for name, overrides, there in (
        ("all", ["mixup_alpha=0.8", "mix_probability=1.0"], False),
        ("none", ["mixup_alpha=0.8", "mix_probability=0.0"], True),
    ):
        done = ready.run("train", config, f"run_name={name}", *overrides, cwd=tmp_path)
        assert done.code == 0, done.err
        (epoch,) = metrics(tmp_path / "runs" / name, "epoch")
        assert ("train/acc1" in epoch, "train/acc5" in epoch) == (there, there)
        assert {"train/loss", "val/acc1"} <= epoch.keys()


def test_the_learning_rate_of_every_step_follows_warmup_and_cosine(
    ready: ReadyProcess, tmp_path: Path, images: Path
) -> None:
    # As in common recipes: LinearLR from 1 % over the warmup epochs, then CosineAnnealingLR, both stepped per epoch.
    keys = {"epochs": 7, "warmup_epochs": 3, "lr_update": "epoch", "lr": 0.5, "batch_size": 16}
    done = ready.run("train", write_config(tmp_path, images, **keys), cwd=tmp_path)
    assert done.code == 0, done.err
    peak = 0.5 * 16 / 256
    warmup = [peak * (0.01 + 0.99 * epoch / 2) for epoch in range(3)]
    cosine = [peak * (1 + math.cos(math.pi * epoch / 3)) / 2 for epoch in range(4)]
    expected = [rate for rate in warmup + cosine for _ in range(3)]
    trace = [line["train/lr"] for line in metrics(tmp_path / "runs" / "tiny", "step")]
    assert trace == pytest.approx(expected, abs=1e-12)


def test_training_works_without_validation_images(ready: ReadyProcess, tmp_path: Path) -> None:
    data = write_images(tmp_path / "data", train=8, val=0)
    for folder in (data / "val").iterdir():
        folder.rmdir()
    (data / "val").rmdir()
    done = ready.run("train", write_config(tmp_path, data, epochs=1), cwd=tmp_path)
    assert done.code == 0, done.err
    assert "no validation: " in done.err
    (epoch,) = metrics(tmp_path / "runs" / "tiny", "epoch")
    assert not any(name.startswith("val/") for name in epoch)
    assert last_state(tmp_path / "runs" / "tiny")["progress"]["best"] is None


@pytest.mark.parametrize("said", [False, True])
def test_a_rate_far_above_the_published_one_is_warned_about_unless_it_is_said_to_be_meant(
    ready: ReadyProcess, tmp_path: Path, images: Path, said: bool
) -> None:
    keys = {"lr": 2.0, "lr_scheduler": "constant"} | ({"lr_reference_batch": 256} if said else {})
    done = ready.run("train", write_config(tmp_path, images, epochs=1, **keys), "scale_lr=false", cwd=tmp_path)
    assert done.code == 0, done.err
    assert ("times that of torchvision's published recipe" in done.err) != said


@pytest.mark.release
def test_a_compiled_model_trains(ready: ReadyProcess, tmp_path: Path, images: Path) -> None:
    data = tmp_path / "data"  # without validation, which would be compiled too
    (data / "train").parent.mkdir()
    (data / "train").symlink_to(images / "train")
    config = write_config(tmp_path, data, epochs=1, compile_model=True, model="test_vit")
    cache = str(tmp_path / "compiled")
    done = ready.start("train", config, cwd=tmp_path, TORCHINDUCTOR_CACHE_DIR=cache)
    assert done.wait() == 0, done.err
    assert "compile_model: torch.compile failed" not in done.err
    assert "cpu, precision 32, compiled" in done.err
    assert "compiled for training in" in done.err
    (epoch,) = metrics(tmp_path / "runs" / "tiny", "epoch")
    assert 0 < epoch["train/loss"] < 5
    assert all(not name.startswith(("plain", "_orig")) for name in last_state(tmp_path / "runs" / "tiny")["model"])
