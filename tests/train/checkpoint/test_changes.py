"""What another value of a key means on resume: the table covers every key, and the page shows the table."""

from __future__ import annotations

import re
from collections import Counter
from copy import deepcopy
from dataclasses import asdict
from typing import Any

import pytest
import torch
from torch import nn

from stoker.config import Config, config_values
from stoker.config.schema import key_names
from stoker.train.checkpoint.changes import KINDS, ON_RESUME, changes_since
from stoker.train.optimizers import load_state, set_lr
from stoker.train.schedule import Horizon
from tests.conftest import PROJECT
from tests.support.optimizers import build_optimizer
from tests.support.training_state import same

PAGE = PROJECT / "docs" / "resume-and-continue.md"
SHOWN = {"applied": "applied", "schedule": "`--replan`", "other": "`--from`", "free": "free"}


def test_every_key_is_in_exactly_one_class() -> None:
    listed = Counter(key for keys in KINDS.values() for key in keys)
    assert [key for key, times in listed.items() if times > 1] == []
    assert sorted(ON_RESUME) == sorted(key_names()), "a new key needs a class in train/checkpoint/changes.py"


def test_the_page_shows_every_key_in_its_class() -> None:
    section = PAGE.read_text().split("\n## Change settings of a run\n", 1)[1].split("\n## ", 1)[0]
    shown: dict[str, str] = {}
    for row in re.findall(r"^\| (.+?) \| (.+?) \|", section, re.MULTILINE):
        kind = next((kind for kind, word in SHOWN.items() if row[1].startswith(word)), None)
        for key in re.findall(r"`(\w+)`", row[0]) if kind is not None else ():
            assert key not in shown, f"{key} is in two rows"
            shown[key] = kind or ""
    assert {key: kind for key, kind in shown.items() if ON_RESUME.get(key) != kind} == {}
    assert sorted(ON_RESUME.keys() - shown.keys()) == []


def test_changes_are_found_against_what_the_saved_run_really_used() -> None:
    ours = config_values(Config())
    state: dict[str, Any] = {"config": dict(ours), "horizon": asdict(Horizon(steps_per_epoch=10, epochs=90))}
    assert changes_since(state, ours) == []
    # A version that did not know a key had its default; one that is gone is nobody's business.
    del state["config"]["limit_train_batches"]
    state["config"]["forgotten"] = 1
    assert changes_since(state, ours) == []
    assert [change.key for change in changes_since(state, ours | {"limit_train_batches": 1})] == ["limit_train_batches"]
    state["config"]["limit_train_batches"] = 1.0
    assert [change.key for change in changes_since(state, ours | {"limit_train_batches": 1})] == ["limit_train_batches"]
    del state["config"]["limit_train_batches"]
    # Recorded, but not applied: what counts is the horizon.
    state["horizon"]["epochs"] = 60
    assert [(change.before, change.after) for change in changes_since(state, ours)] == [(60, 90)]
    state["horizon"]["epochs"] = 90
    # `auto` stands for the decoder that was chosen, and the file of the first weights need not be there any more.
    assert changes_since(state, ours | {"decoder": "opencv"}) == [], "earlier versions did not record the choice"
    state["decoder"] = "opencv"
    assert changes_since(state, ours | {"decoder": "opencv"}) == []
    state["config"]["weights"] = "gone.safetensors"
    assert changes_since(state, ours | {"decoder": "opencv"}) == []
    # A tuple is a list in a file.
    assert changes_since(state, ours | {"decoder": "opencv", "betas": (0.9, 0.999), "devices": 3}) == []


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(16, 2))


def _update(model: nn.Module, optimizer: torch.optim.Optimizer, lr: float) -> None:
    torch.manual_seed(1)
    set_lr(optimizer, lr)
    optimizer.zero_grad()
    model(torch.randn(5, 3, 4, 4)).square().sum().backward()
    optimizer.step()


@pytest.mark.parametrize(
    ("name", "before", "after"),
    [
        ("sgd", {"momentum": 0.9}, {"momentum": 0.5, "nesterov": True}),
        ("adamw", {"weight_decay": 0.0}, {"weight_decay": 0.1, "decay_bias_and_norm": False}),
        # The layout of LAMB's buffers depends on which groups decay.
        ("lamb", {"weight_decay": 0.0}, {"weight_decay": 0.1, "decay_bias_and_norm": False}),
        ("lamb", {"weight_decay": 0.1}, {"weight_decay": 0.0}),
    ],
)
def test_a_loaded_optimizer_updates_with_its_own_settings(
    name: str, before: dict[str, Any], after: dict[str, Any]
) -> None:
    def trained(settings: dict[str, Any]) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = _model()
        optimizer = build_optimizer(model, name, 0.0, **settings)
        _update(model, optimizer, 0.0)  # without a rate the first update fills the state, the same with any settings
        return model, optimizer

    expected, reference = trained(after)
    model = _model()
    optimizer = build_optimizer(model, name, 0.0, **after)
    first, saved = trained(before)
    model.load_state_dict(first.state_dict())
    load_state(optimizer, saved.state_dict())
    for module, updating in ((expected, reference), (model, optimizer)):
        _update(module, updating, 0.1)
    assert same(dict(model.state_dict()), dict(expected.state_dict()))


def test_momentum_can_be_turned_off_and_on_and_leaves_no_trace() -> None:
    model = _model()
    with_momentum = build_optimizer(model, "sgd", 0.1, momentum=0.9)
    _update(model, with_momentum, 0.1)
    without = build_optimizer(model, "sgd", 0.1, momentum=0.0)
    load_state(without, with_momentum.state_dict())
    assert not any("momentum_buffer" in values for values in without.state_dict()["state"].values())
    again = build_optimizer(model, "sgd", 0.1, momentum=0.9)
    load_state(again, without.state_dict())
    buffers = [values["momentum_buffer"] for values in again.state.values()]
    assert len(buffers) == len(list(model.parameters()))
    assert not any(buffer.any() for buffer in buffers)


@pytest.mark.parametrize("name", ["sgd", "adamw", "lamb"])
def test_a_state_takes_the_layout_of_the_parameters(name: str) -> None:
    plain = _model()
    saved = build_optimizer(plain, name, 0.1)
    _update(plain, saved, 0.1)
    model = _model().to(memory_format=torch.channels_last)
    model.load_state_dict(plain.state_dict())
    optimizer = build_optimizer(model, name, 0.1)
    load_state(optimizer, deepcopy(saved.state_dict()))
    for module, updating in ((plain, saved), (model, optimizer)):
        _update(module, updating, 0.1)
    for key, value in plain.state_dict().items():
        torch.testing.assert_close(model.state_dict()[key], value)
    layouts = {p.stride() == s.stride() for p, v in optimizer.state.items() for s in v.values() if s.shape == p.shape}
    assert layouts == {True}
