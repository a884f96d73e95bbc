"""What `stoker verify` says about a config: its schedule and its steps."""

from __future__ import annotations

import shutil
import warnings
from pathlib import Path

import pytest
import torch
from PIL import Image

from stoker.core.finding import Finding
from stoker.tasks.checks import Subject
from stoker.train.schedule import Horizon
from stoker.verify.schedule_checks import (
    check_schedule,
    check_steps,
    schedule_problem,
)
from tests.support.subjects import subject_of
from tests.support.tiny_training import write_config, write_images

# The learning rate.


@pytest.fixture
def images(tmp_path: Path) -> Path:
    return write_images(tmp_path / "images", train=8, val=3)


def scheduled(folder: Path, images: Path, *overrides: str) -> Finding:
    return check_schedule(subject_of(write_config(folder, images), *overrides, out=folder / "pictures"))


def test_the_schedule_is_a_table_and_a_picture(tmp_path: Path, images: Path) -> None:
    outcome = scheduled(tmp_path, images, "epochs=10", "warmup_epochs=2", "lr=0.4", "scale_lr=false")
    assert outcome.status == "passed"
    assert outcome.seen == "cosine: 2 epochs of warmup, peak 0.4, last 0 at step 29"
    rows = {line[:18].strip(): line[18:].split() for line in outcome.details[1:-1]}
    assert rows["first step"] == ["0", "0", "0.004"]
    assert rows["after the warmup"] == ["2", "6", "0.4"]
    assert rows["last step"] == ["9", "29", "0"]
    picture = tmp_path / "pictures" / "lr_schedule.png"
    assert outcome.details[-1] == f"picture: {picture}"
    with Image.open(picture) as image:
        assert image.size[0] > 500


def test_a_cosine_that_is_shorter_than_the_run_and_rises_again_is_found() -> None:
    """The published case: `cosine_t_max` of 125 epochs in a longer run."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=125)
    rates = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(160):
            rates.append(optimizer.param_groups[0]["lr"])
            cosine.step()
    problem = schedule_problem(list(range(160)), rates, Horizon(steps_per_epoch=1, epochs=160))
    assert problem is not None
    assert problem[0].startswith("the learning rate rises again at epoch 126 of 160, from 0 up to 0.17")
    assert schedule_problem(list(range(126)), rates[:126], Horizon(steps_per_epoch=1, epochs=126)) is None


@pytest.mark.parametrize(
    ("overrides", "share", "fix"),
    [
        (["lr_scheduler=step", "lr_step_epochs=30", "epochs=20"], "100%", "lr_step_epochs=6"),
        (["min_lr=0.1", "epochs=20"], "20%", "min_lr=0"),
        (["lr_update=epoch", "warmup_epochs=1", "epochs=2"], "100%", "lr_update=step"),
    ],
)
def test_a_schedule_that_has_not_ended_with_the_run_fails_and_its_fix_helps(
    tmp_path: Path, images: Path, overrides: list[str], share: str, fix: str
) -> None:
    settings = ["lr=0.5", "scale_lr=false"]
    outcome = scheduled(tmp_path, images, *settings, *overrides)
    assert (outcome.status, outcome.fix) == ("failed", fix)
    assert f"{share} of its peak 0.5: the run ends before its schedule" in outcome.seen
    key = fix.split("=")[0]
    others = [text for text in overrides if not text.startswith(f"{key}=")]
    assert scheduled(tmp_path, images, *settings, *others, fix).status == "passed"


def test_pictures_go_to_the_cache_unless_told_otherwise(
    tmp_path: Path, images: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    outcome = check_schedule(subject_of(write_config(tmp_path, images)))
    assert outcome.facts["picture"] == str(tmp_path / "cache" / "stoker" / "verify" / "tiny" / "lr_schedule.png")
    shutil.rmtree(tmp_path / "cache")
    (tmp_path / "cache").write_text("a file")
    outcome = check_schedule(subject_of(write_config(tmp_path, images)))
    assert outcome.status == "passed"
    assert "cannot be written" in outcome.details[-1]


# Steps.


@pytest.mark.parametrize(("batch", "steps", "val_steps"), [(256, 5004, 196), (384, 3336, 131)])
def test_without_the_data_the_steps_are_those_of_imagenet(
    tmp_path: Path, batch: int, steps: int, val_steps: int
) -> None:
    outcome = check_steps(subject_of(write_config(tmp_path, tmp_path / "nowhere", batch_size=batch)))
    assert outcome.status == "unknown"
    assert (outcome.facts["steps_per_epoch"], outcome.facts["val_steps"]) == (steps, val_steps)
    assert "assuming ImageNet's counts" in outcome.seen


def steps_in(folder: Path, images: Path, *overrides: str) -> tuple[Finding, Subject]:
    subject = subject_of(write_config(folder, images), *overrides)
    return check_steps(subject), subject


def test_steps_are_counted_over_all_ranks_and_the_rest_is_named(tmp_path: Path, images: Path) -> None:
    outcome, _ = steps_in(tmp_path, images, "batch_size=5", "devices=2")
    assert outcome.status == "passed"
    assert outcome.seen == (
        "24 images in updates of 10: 2 steps an epoch (4 images, others each time, are left out); "
        "9 for validation: 1 step"
    )


@pytest.mark.parametrize("overrides", [["batch_size=32"], ["steps_per_epoch=100"]])
def test_an_epoch_that_the_data_cannot_fill_fails_and_its_fix_helps(
    tmp_path: Path, images: Path, overrides: list[str]
) -> None:
    outcome, _ = steps_in(tmp_path, images, *overrides)
    assert outcome.status == "failed"
    assert steps_in(tmp_path, images, str(outcome.fix).split(",")[0])[0].status == "passed"
