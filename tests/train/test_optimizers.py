"""Optimizers: parameter groups, order, no clipping unless requested, and updates that are skipped on the device."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import timm
import torch
from torch import Tensor, nn
from torch.nn import functional

from stoker.train.optimizers import parameter_groups
from tests.support.optimizers import build_optimizer, update

NAMES = ("sgd", "adamw", "lamb")


def small_model() -> nn.Module:
    # No bias before the norm: its gradient is rounding noise, which Adam would amplify.
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4 * 36, 5))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, first: int = 0) -> None:
    for step in range(first, first + steps):
        generator = torch.Generator().manual_seed(step)
        images, labels = torch.randn(6, 3, 8, 8, generator=generator), torch.arange(6) % 5
        optimizer.zero_grad()
        functional.cross_entropy(model(images), labels).backward()
        optimizer.step()


def equal(a: nn.Module, b: nn.Module) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a.state_dict().values(), b.state_dict().values(), strict=True))


def test_biases_and_norms_do_not_decay_unless_asked() -> None:
    model = timm.create_model("resnet18", num_classes=3)
    weights, others = parameter_groups(model, 0.01, decay_bias_and_norm=False)
    assert (weights["weight_decay"], others["weight_decay"]) == (0.01, 0.0)
    names = {parameter: name for name, parameter in model.named_parameters()}
    assert all(names[parameter].endswith("weight") for parameter in weights["params"])
    assert {names[parameter] for parameter in others["params"]} >= {"bn1.weight", "bn1.bias", "fc.bias"}
    assert len(weights["params"]) + len(others["params"]) == len(list(model.parameters()))
    assert [group["weight_decay"] for group in parameter_groups(model, 0.01, decay_bias_and_norm=True)] == [0.01, 0.01]


def test_the_order_follows_names_and_not_registration() -> None:
    def model(order: str) -> nn.Module:
        made = nn.Module()
        for name in order:
            made.add_module(name, nn.Linear(ord(name) - ord("a") + 1, 2))
        return made

    shapes = [
        [tuple(parameter.shape) for group in parameter_groups(model(order), 0.0, True) for parameter in group["params"]]
        for order in ("abc", "cab")
    ]
    assert shapes[0] == shapes[1]
    assert shapes[0][:3] == [(2, 1), (2, 2), (2, 3)]


def test_frozen_parameters_are_left_out() -> None:
    model = small_model()
    model[0].requires_grad_(False)  # type: ignore[operator]
    assert sum(len(group["params"]) for group in parameter_groups(model, 0.0, True)) == 4


def test_sgd_and_adamw_compute_what_torch_computes_plainly() -> None:
    plain = {
        "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01, foreach=False),
        "adamw": lambda p: torch.optim.AdamW(p, lr=0.1, betas=(0.8, 0.9), weight_decay=0.01, foreach=False),
    }
    for name, make in plain.items():
        ours, theirs = small_model(), small_model()
        train(ours, build_optimizer(ours, name, 0.1, nesterov=True, betas=(0.8, 0.9), weight_decay=0.01), 4)
        train(theirs, make(theirs.parameters()), 4)
        for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(a, b)


def test_a_saved_optimizer_resumes_bit_identical() -> None:
    for name in NAMES:
        whole, first, second = small_model(), small_model(), small_model()
        train(whole, build_optimizer(whole, name, 0.01, weight_decay=0.01), 6)
        half = build_optimizer(first, name, 0.01, weight_decay=0.01)
        train(first, half, 3)
        second.load_state_dict(first.state_dict())
        resumed = build_optimizer(second, name, 0.5, weight_decay=0.01)
        resumed.load_state_dict(half.state_dict())
        train(second, resumed, 3, first=3)
        assert equal(whole, second), name


def test_a_model_without_biases_works() -> None:
    for name in NAMES:
        model = nn.Linear(3, 5, bias=False)
        before = model.weight.detach().clone()
        optimizer = build_optimizer(model, name, 0.1, decay_bias_and_norm=False)
        model(torch.ones(2, 3)).square().sum().backward()
        optimizer.step()
        assert not torch.equal(before, model.weight)


def set_gradients(model: nn.Module, seed: int, scale: float = 1.0) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.grad = torch.empty_like(parameter).copy_(torch.randn(parameter.shape, generator=generator) * scale)


def all_bits(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    state = [value for known in optimizer.state.values() for value in known.values()]
    return [value.detach().clone().view(torch.int32) for value in [*model.parameters(), *state]]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", NAMES)
def test_a_skipped_update_changes_no_bit(name: str, bad: float) -> None:
    model = small_model().to(memory_format=torch.channels_last)
    optimizer = build_optimizer(model, name, 0.1, weight_decay=0.01)
    for number in range(3):
        set_gradients(model, number)
        update(optimizer, skip=False)
    before = all_bits(model, optimizer)
    set_gradients(model, 3, scale=bad)
    update(optimizer, skip=True)
    assert all(map(torch.equal, before, all_bits(model, optimizer)))


@contextmanager
def uninitialised_memory_is_nan() -> Iterator[None]:
    filled = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = filled  # type: ignore[attr-defined]


@pytest.mark.parametrize(("nesterov", "weight_decay", "resumed"), [(False, 0.0, False), (True, 0.01, True)])
def test_momentum_is_defined_even_if_the_first_update_is_skipped(
    nesterov: bool, weight_decay: float, resumed: bool
) -> None:
    model, plain = (small_model().to(memory_format=torch.channels_last) for _ in range(2))
    reference = torch.optim.SGD(
        plain.parameters(), lr=0.1, momentum=0.9, nesterov=nesterov, weight_decay=weight_decay, foreach=False
    )
    with uninitialised_memory_is_nan():
        assert torch.empty(1).isnan()
        optimizer = build_optimizer(model, "sgd", 0.1, nesterov=nesterov, weight_decay=weight_decay)
        if resumed:  # from a state that was saved before the first update, as torch's own SGD writes it
            untouched = torch.optim.SGD(parameter_groups(model, weight_decay, True), lr=0.1, momentum=0.9, fused=True)
            options = [group | {"nesterov": nesterov} for group in untouched.state_dict()["param_groups"]]
            optimizer.load_state_dict({"state": {}, "param_groups": options})
        set_gradients(model, 0, scale=float("nan"))
        update(optimizer, skip=True)
        for number in range(1, 4):
            set_gradients(model, number)
            update(optimizer, skip=False)
    for number in range(1, 4):
        set_gradients(plain, number)
        reference.step()
    assert all(torch.isfinite(value).all() for value in model.parameters())
    for a, b in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)  # the fused kernel rounds differently


@pytest.mark.parametrize(("nesterov", "weight_decay"), [(False, 0.0), (True, 0.01)])
def test_zero_momentum_gives_the_first_update_that_torch_gives(nesterov: bool, weight_decay: float) -> None:
    model, other = (small_model().to(memory_format=torch.channels_last) for _ in range(2))
    ours = build_optimizer(model, "sgd", 0.1, nesterov=nesterov, weight_decay=weight_decay)
    groups = parameter_groups(other, weight_decay, True)
    torchs = torch.optim.SGD(groups, lr=0.1, momentum=0.9, nesterov=nesterov, fused=True)
    for number in range(4):
        for m, optimizer in ((model, ours), (other, torchs)):
            set_gradients(m, number)
            optimizer.step()
        assert equal(model, other)
    # What is saved has the same form, and goes both ways.
    assert ours.state_dict()["param_groups"] == torchs.state_dict()["param_groups"]
    torchs.load_state_dict(copy.deepcopy(ours.state_dict()))
    ours.load_state_dict(copy.deepcopy(torchs.state_dict()))
    for m, optimizer in ((model, ours), (other, torchs)):
        set_gradients(m, 4)
        optimizer.step()
    assert equal(model, other)
    for parameter, state in ours.state.items():
        assert state["momentum_buffer"].stride() == parameter.stride()
