"""LAMB: timm's numbers in few kernels, with the update skipped on the device and states that timm can load."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import timm
import torch
from timm.optim import Lamb as TimmLamb
from torch import Tensor, nn

from stoker.train.optimizers import Lamb, parameter_groups
from tests.support.operators import counted
from tests.support.optimizers import build_optimizer, update

MOST_KERNELS = 60
UPDATES = 25
SETTINGS = [(0.02, False), (0.02, True), (0.0, False)]


def resnet() -> nn.Module:
    """Layers like ResNet's, channels_last: also a 1x1 kernel, whose strides are ambiguous."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 16, 7, bias=False), nn.BatchNorm2d(16), nn.Conv2d(16, 24, 1, bias=False), nn.BatchNorm2d(24),
        nn.Conv2d(24, 8, 3), nn.Flatten(), nn.Linear(32, 7),
    )  # fmt: skip
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:  # norms begin as exactly 1 and 0: move them, so that nothing is equal by chance
                parameter.add_(0.1 * torch.randn(parameter.shape))
        next(model.parameters())[0, 0, 0, 0] = -0.0
    return model.to(memory_format=torch.channels_last)


def set_gradients(model: nn.Module, update: int, scale: float = 1.0) -> None:
    """Gradients of very different sizes, in the layout that autograd gives them."""
    generator = torch.Generator().manual_seed(update)
    for number, parameter in enumerate(model.parameters()):
        values = torch.randn(parameter.shape, generator=generator) * scale * 10.0 ** (number % 7 - 4)
        parameter.grad = torch.empty_like(parameter).copy_(values)


def timms(model: nn.Module, lr: float, weight_decay: float, decay_bias_and_norm: bool, **keys: Any) -> TimmLamb:
    return TimmLamb(parameter_groups(model, weight_decay, decay_bias_and_norm), lr=lr, max_grad_norm=None, **keys)


def ours(model: nn.Module, lr: float, weight_decay: float, decay_bias_and_norm: bool, **keys: Any) -> Lamb:
    made = build_optimizer(
        model, "lamb", lr, weight_decay=weight_decay, decay_bias_and_norm=decay_bias_and_norm, **keys
    )
    assert isinstance(made, Lamb)
    return made


def assert_close(a: nn.Module, b: nn.Module) -> None:
    for (name, x), y in zip(a.named_parameters(), b.parameters(), strict=True):
        torch.testing.assert_close(x, y, rtol=2e-6, atol=1e-7, msg=name)


def bits(values: list[Tensor]) -> list[Tensor]:
    return [value.detach().clone().view(torch.int32) for value in values]


def everything(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    state = [value for known in optimizer.state.values() for value in known.values()]
    return [*model.parameters(), *state, *(group["step"] for group in optimizer.param_groups)]


@pytest.mark.parametrize(("weight_decay", "decay_bias_and_norm"), SETTINGS)
@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.0, 0.5)])
def test_the_weights_are_timms(weight_decay: float, decay_bias_and_norm: bool, betas: tuple[float, float]) -> None:
    a, b = resnet(), resnet()
    mine = ours(a, 0.005, weight_decay, decay_bias_and_norm, betas=betas)
    theirs = timms(b, 0.005, weight_decay, decay_bias_and_norm, betas=betas)
    for number in range(UPDATES):
        for model, optimizer in ((a, mine), (b, theirs)):
            set_gradients(model, number)
            for group in optimizer.param_groups:
                group["lr"] = 0.005 * (1 + number % 3)
            optimizer.step()
        assert_close(a, b)


def test_a_parameter_of_zeros_and_one_without_a_gradient_are_treated_as_by_timm() -> None:
    def model() -> nn.Module:
        made = resnet()
        parameters = list(made.parameters())
        with torch.no_grad():
            parameters[0].zero_()
        return made

    a, b = model(), model()
    mine, theirs = ours(a, 0.01, 0.02, True), timms(b, 0.01, 0.02, True)
    for number in range(6):
        for model_, optimizer in ((a, mine), (b, theirs)):
            set_gradients(model_, number)
            parameters = list(model_.parameters())
            parameters[0].grad = torch.zeros_like(parameters[0]) if number < 2 else parameters[0].grad
            if number in (2, 3):  # one that has had gradients before, and one that has not
                parameters[3].grad = None
            parameters[4].grad = None if number < 4 else parameters[4].grad
            optimizer.step()
        assert_close(a, b)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_skipped_update_leaves_no_trace(bad: float) -> None:
    for updates_before in (0, 3):
        model, other = resnet(), resnet()
        optimizer, reference = ours(model, 0.005, 0.02, False), ours(other, 0.005, 0.02, False)
        for number in range(updates_before):
            for m, o in ((model, optimizer), (other, reference)):
                set_gradients(m, number)
                update(o, skip=False)
        for state in [*optimizer.state.values(), *reference.state.values()]:
            state["exp_avg"][(0,) * state["exp_avg"].ndim] = -0.0  # the sign of a zero is a bit too
        before = bits(everything(model, optimizer))
        set_gradients(model, 50, scale=bad)
        update(optimizer, skip=True)
        assert all(map(torch.equal, before, bits(everything(model, optimizer))))
        for m, o in ((model, optimizer), (other, reference)):
            set_gradients(m, 51)
            update(o, skip=False)
        assert all(map(torch.equal, bits(list(model.parameters())), bits(list(other.parameters()))))


def test_a_gradient_scaler_hands_over_its_tensors() -> None:
    a, b = resnet(), resnet()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    mine, plain = ours(a, 0.005, 0.02, False), ours(b, 0.005, 0.02, False)
    scaler.scale(torch.zeros(()))
    set_gradients(a, 0, scale=1024.0)
    scaler.step(mine)
    set_gradients(b, 0)
    plain.step()
    assert_close(a, b)


def test_a_state_of_timms_resumes_here_and_ours_there() -> None:
    makers: list[Callable[..., torch.optim.Optimizer]] = [timms, ours]
    for first, second in (makers, makers[::-1]):
        whole, half = resnet(), resnet()
        uninterrupted, begun = timms(whole, 0.005, 0.02, False), first(half, 0.005, 0.02, False)
        for number in range(4):
            for model, optimizer in ((whole, uninterrupted), (half, begun)):
                set_gradients(model, number)
                optimizer.step()
        resumed = second(half, 0.5, 0.02, False)
        resumed.load_state_dict(copy.deepcopy(begun.state_dict()))
        for number in range(4, 8):
            for model, optimizer in ((whole, uninterrupted), (half, resumed)):
                set_gradients(model, number)
                optimizer.step()
        assert_close(whole, half)


def test_a_loaded_state_is_taken_into_the_flat_buffers() -> None:
    model = resnet()
    optimizer = ours(model, 0.005, 0.02, False)
    set_gradients(model, 0)
    optimizer.step()
    saved = copy.deepcopy(optimizer.state_dict())
    optimizer.load_state_dict(saved)
    storages = {value.untyped_storage().data_ptr() for state in optimizer.state.values() for value in state.values()}
    assert len(storages) == 2
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for number, parameter in enumerate(parameters):
        assert torch.equal(optimizer.state[parameter]["exp_avg"], saved["state"][number]["exp_avg"])
        assert optimizer.state[parameter]["exp_avg"].stride() == parameter.stride()
    assert saved["param_groups"][0]["step"] == 1


def resnet50_on_meta() -> nn.Module:
    with torch.device("meta"):
        model: nn.Module = timm.create_model("resnet50").to(memory_format=torch.channels_last)
    for parameter in model.parameters():
        parameter.grad = torch.empty_like(parameter)
    return model


@pytest.mark.parametrize(("weight_decay", "decay_bias_and_norm"), SETTINGS)
def test_an_update_of_resnet50_takes_few_kernels(weight_decay: float, decay_bias_and_norm: bool) -> None:
    model = resnet50_on_meta()
    optimizer = ours(model, 0.005, weight_decay, decay_bias_and_norm)
    optimizer.found_inf = torch.zeros((), device="meta")
    with counted(strict=True) as operators:
        optimizer.step()
    assert 20 < operators.kernels <= MOST_KERNELS
