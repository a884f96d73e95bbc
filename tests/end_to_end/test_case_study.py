"""What cost a real ImageNet project its days, on small data: each is prevented, named, or one command away.

The alarm for wrong labels while training is in test_permuted_labels.py, files that a file system has released in
tests/tasks/images/test_data_checks.py.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from stoker.config import load_config
from stoker.tasks.images.layouts.imagenet import real_labels, synsets
from stoker.verify.run_checks import all_checks
from tests.support.ready_process import ReadyProcess
from tests.support.tiny_training import KEYS, metrics, steps_done, write_config, write_images

CLASSES = 3
NAMED_IN_A_CLASS = 8


def verified(
    ready: ReadyProcess, folder: Path, *arguments: object, checks: str, code: int
) -> dict[str, dict[str, Any]]:
    """The outcomes of these checks by name; others trace the network and time it, which takes seconds."""
    others = [word for check in all_checks() if check.name not in checks.split() for word in ("--skip", check.name)]
    done = ready.run("verify", *arguments, *others, "--json", "--out", folder / "pictures", cwd=folder)
    assert done.code == code, done.err
    return {check["name"]: check for check in json.loads(done.out)["checks"]}


def write_imagenet(root: Path, *, shift: int = 0) -> Path:
    """Three of ImageNet's classes, with the real names of validation files; `shift` moves them to other folders."""
    write_images(root, train=8, val=NAMED_IN_A_CLASS, classes=CLASSES)
    for split in ("train", "val"):
        for number in range(CLASSES):
            (root / split / f"class{number}").rename(root / split / synsets()[number])
    for number in range(CLASSES):
        folder = root / "val" / synsets()[(number + shift) % CLASSES]
        known = [image for image, labels in enumerate(real_labels(), 1) if labels == (number,)]
        for file, image in zip(sorted(folder.iterdir()), known[:NAMED_IN_A_CLASS], strict=True):
            file.rename(folder / f"ILSVRC2012_val_{image:08d}.JPEG")
    return root


def test_validation_labels_that_do_not_match_the_folders_are_found_before_the_run(
    ready: ReadyProcess, tmp_path: Path
) -> None:
    """There: 35 hours at 1 % accuracy, nine debugging scripts, the learning rate changed four times."""
    config = write_config(tmp_path, write_imagenet(tmp_path / "permuted", shift=1))
    found = verified(ready, tmp_path, config, checks="val-labels", code=1)["val-labels"]
    assert found["status"] == "failed"
    assert f"{synsets()[1]} holds {synsets()[0]} tench" in found["details"]
    warned = ready.run("train", config, "epochs=1", cwd=tmp_path)
    assert warned.code == 0, warned.err
    assert "val-labels" in warned.err
    config = write_config(tmp_path, write_imagenet(tmp_path / "right"), lr=0.1)
    assert verified(ready, tmp_path, config, checks="val-labels", code=0)["val-labels"]["status"] == "passed"


def test_a_validation_folder_that_cannot_be_seen_is_named(ready: ReadyProcess, tmp_path: Path) -> None:
    """There: 42 hours with a file system that loaded lazily and did not show `val/`."""
    data = write_images(tmp_path / "data")
    (data / "val").rename(data / "val.hidden")
    found = verified(ready, tmp_path, write_config(tmp_path, data), checks="validation-split storage-ready", code=1)
    assert found["validation-split"]["status"] == "failed"
    assert "val.hidden" in found["validation-split"]["seen"]
    assert found["storage-ready"]["status"] == "passed"


def test_a_cosine_that_is_shorter_than_the_run_does_not_rise_again(ready: ReadyProcess, tmp_path: Path) -> None:
    """There: `cosine_t_max` ended at epoch 125, and torch's cosine went up again; 44 hours with the next one."""
    theirs = tmp_path / "theirs.yaml"
    theirs.write_text("epochs: 6\nlr: 0.01\nlr_scheduler: cosine\nwarmup_epochs: 0\ncosine_t_max: 3\n")
    refused = ready.run("config", "show", theirs, cwd=tmp_path)
    assert refused.code == 2
    assert "cosine_t_max" in refused.err
    assert "stoker config import" in refused.err
    ours = tmp_path / "ours.yaml"
    done = ready.run("config", "import", theirs, "-o", ours, "--accept", cwd=tmp_path)
    assert done.code == 0, done.err
    images = write_images(tmp_path / "data")
    small = [f"{key}={value}" for key, value in KEYS.items() if key not in ("epochs", "lr")]
    done = ready.run("train", ours, f"data_root={images}", *small, cwd=tmp_path)
    assert done.code == 0, done.err
    rates = [line["train/lr"] for line in metrics(tmp_path / "runs" / "tiny", "step")]
    assert rates == sorted(rates, reverse=True)
    assert rates[0] == pytest.approx(0.01)
    assert rates[-1] == pytest.approx(0, abs=1e-5)


@pytest.mark.release
def test_another_learning_rate_optimizer_or_length_in_mid_run_takes_one_command(
    ready: ReadyProcess, tmp_path: Path, images: Path
) -> None:
    """There: five scripts that edited checkpoints, nine that resumed, range tests from two epochs."""
    config = write_config(tmp_path, images)
    assert ready.run("train", config, cwd=tmp_path).code == 0
    run = tmp_path / "runs" / "tiny"
    refused = ready.run("train", config, "lr=0.1", "epochs=3", cwd=tmp_path)
    assert refused.code == 1
    assert "--replan" in refused.err
    assert "--from" in refused.err
    longer = ready.run("train", config, "lr=0.1", "epochs=3", "--replan", cwd=tmp_path)
    assert longer.code == 0, longer.err
    assert "learning rate" in longer.err
    assert steps_done(run) == 18
    other = ready.run("train", config, "--from", run, "optimizer=adamw", "lr=0.01", "run_name=other", cwd=tmp_path)
    assert other.code == 0, other.err
    assert steps_done(tmp_path / "runs" / "other") == 12
    found = ready.run(
        "lr-find", config, "--from", run / "checkpoints" / "last.ckpt", "--steps", 12, "--json", cwd=tmp_path
    )
    assert found.code in (0, 1), found.err
    assert "suggestion" in found.out


def test_keys_that_another_program_swallowed_are_said(ready: ReadyProcess, tmp_path: Path) -> None:
    """There: `accumulate_grad_batches: 2` and `nesterov: true` went into **kwargs, and the run was something else."""
    theirs = tmp_path / "theirs.yaml"
    theirs.write_text("model_name: resnet50\naccumulate_grad_batches: 2\nnestrov: true\nscale_lr: false\n")
    refused = ready.run("train", theirs, cwd=tmp_path)
    assert refused.code == 2
    assert "nestrov" in refused.err
    assert "nesterov" in refused.err, "the nearest key"
    theirs.write_text(theirs.read_text().replace("nestrov", "nesterov"))
    config = load_config(theirs).config
    assert (config.gradient_accumulation, config.nesterov) == (2, True)


@pytest.mark.release
def test_a_starved_run_is_told_how_starved_it_is(ready: ReadyProcess, tmp_path: Path, images: Path) -> None:
    """There: the last run trained 4,874 images/s where eight A100 reach 18,832; 21.8 hours instead of six."""
    config = write_config(tmp_path, images)
    done = ready.run("doctor", config, "--pace", "50000", "--seconds", "2", "--json", cwd=tmp_path)
    assert done.code in (0, 1), done.err
    found = json.loads(done.out)
    assert found["verdict"] != "compute-bound"
    assert found["wait_share"] > 0.1  # 0.9 on an idle machine; on a full one the loop itself is slow, too


def test_a_recipe_in_name_only_is_compared_with_the_recipe(ready: ReadyProcess, tmp_path: Path, images: Path) -> None:
    """There: 'A2' with cross-entropy, mixup 0.2 and no repeated augmentation; 76.2 % instead of 79.8 %."""
    recipe = Path(__file__).parents[2] / "configs" / "rsb_a2.yaml"
    config = tmp_path / "rsb_a2.yaml"
    config.write_text(
        f"base: {recipe}\nloss: cross_entropy\nbce_target_threshold: null\nmixup_alpha: 0.2\nrepeated_augmentation: 1\n"
    )
    small = ("model=test_convnext", "img_size=32", "val_img_size=32", "batch_size=8", "num_workers=0", "devices=1")
    found = verified(ready, tmp_path, config, f"data_root={images}", *small, checks="recipe", code=1)["recipe"]
    assert found["status"] == "failed"
    for words in ("A2", "CE instead of BCE", "mixup 0.2 instead of 0.1", "repeated augmentation"):
        assert words in found["seen"] + " ".join(found["details"])
