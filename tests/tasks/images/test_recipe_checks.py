"""What `stoker verify` says about the settings of a classification: recipe, learning rate, accuracy."""

from __future__ import annotations

from pathlib import Path

import pytest

from stoker.tasks.images.recipe_checks import (
    check_learning_rate,
    check_recipe,
    check_train_accuracy,
    claimed_recipes,
    milestones,
)
from tests.conftest import PROJECT
from tests.support.subjects import subject_of
from tests.support.tiny_training import write_config

CONFIGS = PROJECT / "configs"
CASE_STUDY = ("loss=cross_entropy", "mixup_alpha=0.2", "repeated_augmentation=1", "bce_target_threshold=null")


SHIPPED = [
    ("rsb_a1", "A1", 80.4),
    ("rsb_a2", "A2", 79.8),
    ("rsb_a3", "A3", 78.1),
    ("torchvision_v2", "torchvision V2", 80.86),
]


@pytest.mark.parametrize(("name", "recipe", "accuracy"), SHIPPED)
def test_the_shipped_recipes_are_what_they_say(name: str, recipe: str, accuracy: float) -> None:
    subject = subject_of(CONFIGS / f"{name}.yaml")
    outcome = check_recipe(subject)
    assert outcome.status == "passed"
    assert outcome.facts == {"recipe": recipe, "differences": [], "accuracy": accuracy}
    assert milestones(subject.config)[0] == ((subject.config.epochs - 1, accuracy),)


def test_a_config_called_a2_that_is_not_a2_fails_and_its_fix_makes_it_a2() -> None:
    subject = subject_of(CONFIGS / "rsb_a2.yaml", *CASE_STUDY)
    outcome = check_recipe(subject)
    assert outcome.status == "failed"
    assert outcome.facts["differences"] == ["CE instead of BCE", "mixup 0.2 instead of 0.1", "no repeated augmentation"]
    assert "called rsb_a2, but it is A2 ('ResNet Strikes Back', arXiv 2110.00476) except: CE instead of" in outcome.seen
    assert milestones(subject.config) == ((), None), "an accuracy that another recipe reached is not expected"
    command = str(outcome.fix).split(";")[0].split()
    assert command[:2] == ["stoker", "train"]
    assert "bce_target_threshold=null" in command, "the user's other settings stay"
    fixed = check_recipe(subject_of(Path(command[2]), *command[3:]))
    assert (fixed.status, fixed.facts["differences"]) == ("passed", [])


def test_the_same_config_under_another_name_is_only_described(tmp_path: Path) -> None:
    path = tmp_path / "resnet50.yaml"
    path.write_text(f"base: {CONFIGS / 'rsb_a2.yaml'}\n")
    outcome = check_recipe(subject_of(path, *CASE_STUDY))
    assert outcome.status == "passed"
    assert outcome.seen.startswith("A2 ('ResNet Strikes Back', arXiv 2110.00476), except: CE instead of BCE, mixup 0.2")
    claimed = check_recipe(subject_of(path, *CASE_STUDY, "run_name=my-A2"))
    assert claimed.status == "failed"


def test_the_name_of_the_paper_claims_one_of_its_recipes_and_other_names_claim_nothing() -> None:
    outcome = check_recipe(subject_of(CONFIGS / "resnet_strikes_back.yaml"))
    assert outcome.status == "failed"
    assert "SGD instead of LAMB" in outcome.facts["differences"]
    for name in ("8xa100", "a10g", "gcp-a2-highgpu-8g", "data2", "rsbench", "demo"):
        assert claimed_recipes(name) == ()
    outcome = check_recipe(subject_of(CONFIGS / "demo.yaml"))
    assert outcome.status == "passed"
    assert outcome.seen.startswith("no published recipe is close")


def test_a_hundred_classes_are_compared_with_what_others_measured() -> None:
    config = subject_of(CONFIGS / "optimized_test.yaml", "epochs=12").config
    points, source = milestones(config)
    assert points == ((0, 3.2), (5, 10.6), (10, 24.0))
    assert "cydal/ImageNet-Full-training" in str(source)


def test_a_rate_far_above_the_published_one_fails_and_its_fix_helps(tmp_path: Path) -> None:
    path = write_config(tmp_path, tmp_path, lr=0.5, batch_size=256)
    outcome = check_learning_rate(subject_of(path))
    assert outcome.status == "failed"
    assert "0.5 for a total batch of 256 is 4.0 times that of torchvision's published recipe" in outcome.seen
    fixed = check_learning_rate(subject_of(path, str(outcome.fix).split(",")[0]))
    assert (fixed.status, fixed.seen) == ("passed", "0.125 for a total batch of 256 = 0.5 x 256 / 1024")


@pytest.mark.parametrize(
    ("overrides", "words", "share"),
    [
        ([], "over all training batches", 1.0),
        (["mixup_alpha=0.2"], "is left out: every batch is mixed", 0.0),
        (["cutmix_alpha=1.0", "mix_probability=0.75"], "over the 25% of the batches that are not mixed", 0.25),
    ],
)
def test_it_says_what_train_accuracy_means(tmp_path: Path, overrides: list[str], words: str, share: float) -> None:
    outcome = check_train_accuracy(subject_of(write_config(tmp_path, tmp_path), *overrides))
    assert words in outcome.seen
    assert outcome.facts == {"unmixed_share": share}
