"""What `stoker verify` says about a model, from real steps: each check passes, and fails for a planted fault."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from stoker.core.finding import Finding
from stoker.profile.memory import MemoryState
from stoker.tasks.checks import Subject
from stoker.verify import trial as trials
from stoker.verify.model import CHECKS
from stoker.verify.run_checks import run_checks
from stoker.verify.trial import GroupFacts, Trial, WholeStep, try_run
from tests.support.subjects import check_named, subject_of
from tests.support.tiny_training import write_config

NAMES = [check.name for check in CHECKS if not check.deep]


@pytest.fixture(scope="module")
def seen(images: Path, tmp_path_factory: pytest.TempPathFactory) -> Trial:
    """A real trial without a fault."""
    return try_run(subject_of(write_config(tmp_path_factory.mktemp("trial"), images, ema_decay=0.9)))


@pytest.fixture
def tiny(tmp_path: Path, images: Path) -> Callable[..., Subject]:
    return lambda *overrides, **keys: subject_of(write_config(tmp_path, images, **keys), *overrides)


def judged(name: str, subject: Subject, trial: Trial | None = None) -> Finding:
    if trial is not None:
        subject.with_made("trial", trial)
    return run_checks([check_named(name)], subject).results[0].finding


def test_a_real_model_passes_every_check_and_leaves_nothing_behind(
    seen: Trial, tiny: Callable[..., Subject], images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    subject = tiny()
    outcomes = {name: judged(name, subject, seen) for name in NAMES}
    assert {name: outcome.status for name, outcome in outcomes.items()} == dict.fromkeys(NAMES, "passed")
    assert outcomes["model-builds"].facts["classes"] == 3
    assert seen.first_loss == pytest.approx(math.log(3), rel=0.2)
    assert outcomes["checkpoint"].facts["next_loss"] == outcomes["checkpoint"].facts["resumed_loss"]
    assert "every parameter changed" in outcomes["update"].seen
    assert "with weight decay 0.0001, none without" in outcomes["optimizer-groups"].seen
    assert {path.name for path in tmp_path.iterdir()} == {"tiny.yaml"}, "no run folder"


def test_without_data_the_images_are_random_and_the_check_says_so(tmp_path: Path) -> None:
    path = write_config(tmp_path, tmp_path / "nowhere", num_classes=20, loss="bce", optimizer="lamb")
    outcome = judged("first-loss", subject_of(path))
    assert outcome.status == "passed"
    assert "8 random images (" in outcome.seen
    assert "nowhere" in outcome.seen
    assert outcome.facts["guess"] == pytest.approx(math.log(2))


def test_a_model_that_does_not_exist_fails_and_the_rest_is_unknown(tiny: Callable[..., Subject]) -> None:
    report = run_checks([check_named(name) for name in NAMES], tiny("model=resnet5O"))
    states = {result.check.name: result.finding.status for result in report.results}
    assert states == dict.fromkeys(NAMES, "unknown") | {"model-builds": "failed"}
    assert "resnet5O" in report.results[0].finding.seen
    assert report.results[0].finding.fix


def test_a_model_that_cannot_compute_the_images_fails(
    tiny: Callable[..., Subject], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_arguments: object, **_keys: object) -> None:
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    monkeypatch.setattr("stoker.train.step.TrainStep.__call__", broken)
    outcome = judged("model-builds", tiny())
    assert outcome.status == "failed"
    assert "test_convnext at 32 px: RuntimeError: mat1 and mat2 shapes" in outcome.seen


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"first_loss": math.inf}, "the loss of the first step is inf"),
        ({"first_loss": 12.0, "outputs": 1000}, None),
        ({"first_loss": 9.0}, "more certain of wrong classes than a guess"),
        ({"first_loss": 0.4, "outputs": 1000}, "an untrained network cannot know the classes"),
    ],
)
def test_a_first_loss_that_is_not_that_of_a_guess_fails(
    seen: Trial, tiny: Callable[..., Subject], change: dict[str, Any], words: str | None
) -> None:
    outcome = judged("first-loss", tiny(), replace(seen, **change))
    assert outcome.status == "failed"
    assert words is None or words in outcome.seen
    assert outcome.fix


def test_a_parameter_that_the_network_does_not_use_is_named(
    tiny: Callable[..., Subject], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = trials.build_run

    def with_an_unused_one(*arguments: Any, **keys: Any) -> Any:
        run = real(*arguments, **keys)
        run.model.register_parameter("forgotten", torch.nn.Parameter(torch.ones(3)))
        return run

    monkeypatch.setattr(trials, "build_run", with_an_unused_one)
    outcome = judged("update", tiny())
    assert outcome.status == "failed"
    assert outcome.seen.startswith("forgotten got no gradient: never trained")


def test_parameters_that_do_not_learn_are_named(seen: Trial, tiny: Callable[..., Subject]) -> None:
    for change, words in (
        ({"skipped": True}, "the update was skipped"),
        ({"without_gradient": ("a", "b", "c", "d", "e")}, "a, b, c and 2 more got no gradient"),
        ({"unchanged": ("head.weight",)}, "head.weight did not change in the update"),
    ):
        outcome = judged("update", tiny(), replace(seen, **change))
        assert outcome.status == "failed"
        assert words in outcome.seen


def test_a_parameter_that_the_optimizer_does_not_know_is_named(
    tiny: Callable[..., Subject], monkeypatch: pytest.MonkeyPatch
) -> None:
    def forgetful(config: Any, model: torch.nn.Module, lr: float) -> torch.optim.Optimizer:
        known = [value for name, value in model.named_parameters() if not name.startswith("head.fc")]
        return torch.optim.SGD([{"params": known, "weight_decay": config.weight_decay}], lr=lr, fused=True)

    monkeypatch.setattr("stoker.tasks.building.build_optimizer", forgetful)
    subject = tiny()
    outcome = judged("optimizer-groups", subject)
    assert outcome.status == "failed"
    assert outcome.seen.startswith("head.fc.weight, head.fc.bias: in no group")


def test_weight_decay_on_the_wrong_parameters_is_found(seen: Trial, tiny: Callable[..., Subject]) -> None:
    for decay, words in (
        (0.0, "50 weights have weight decay 0 instead of 0.0001"),
        (1e-4, "51 biases and norms have weight decay 0.0001 instead of 0"),
    ):
        groups = (GroupFacts(decay, 50, 5000, 50), GroupFacts(1e-4, 51, 500, 0))
        outcome = judged("optimizer-groups", tiny(decay_bias_and_norm=False), replace(seen, groups=groups))
        assert (outcome.status, outcome.seen) == ("failed", words)


@pytest.mark.parametrize("part", ["model", "optimizer"])
def test_a_checkpoint_that_does_not_restore_everything_fails(
    tiny: Callable[..., Subject], monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    real = trials.load_for_resume

    def forgetful(*arguments: Any) -> Any:
        found = real(*arguments)
        if part == "model":
            found.state["model"]["head.fc.bias"] += 0.5
        else:
            for state in found.state["optimizer"]["state"].values():
                state["momentum_buffer"] *= 3.0
        return found

    monkeypatch.setattr(trials, "load_for_resume", forgetful)
    outcome = judged("checkpoint", tiny())
    assert outcome.status == "failed"
    assert "tensors of the model differ" in outcome.seen
    assert outcome.facts["differing_weights"] > 0


def test_a_model_that_does_not_fit_into_memory_is_not_tried(
    tiny: Callable[..., Subject], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trials, "read_memory", lambda: MemoryState(1_000_000, 2_000_000))
    report = run_checks([check_named(name) for name in NAMES], tiny())
    assert [result.finding.status for result in report.results] == ["unknown"] * 5
    assert "may need 0.0 GB" not in report.results[0].finding.seen
    assert "MB are free" in report.results[0].finding.seen
    assert report.results[0].finding.fix == "check it on the machine that will train"


def test_the_whole_batch_is_tried_only_with_deep_and_a_batch_that_does_not_fit_fails(
    tiny: Callable[..., Subject], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert check_named("whole-batch").deep
    outcome = judged("whole-batch", tiny("batch_size=16"))
    assert outcome.status == "passed"
    assert outcome.seen.startswith("16 images in ")
    monkeypatch.setattr(trials, "try_whole_batch", lambda _subject: WholeStep(1.0, 4, 0.5))
    outcome = judged("whole-batch", tiny("batch_size=16"))
    assert (outcome.status, outcome.fix) == ("failed", "batch_size=4 gradient_accumulation=4")
