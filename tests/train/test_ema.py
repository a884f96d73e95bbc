"""The moving average of the weights."""

from __future__ import annotations

import copy

import pytest
import torch
from timm.utils import ModelEmaV3
from torch import nn

from stoker.errors import UserError
from stoker.train.ema import WARMUP_GAMMA, WeightAverage, decay_after


def small_model(classes: int = 5) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4 * 36, classes))


def move(model: nn.Module, seed: int) -> None:
    """Changes weights and batch norm statistics, as a step does."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator))
        model(torch.randn(6, 3, 8, 8, generator=generator))


def bits(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("warmup", [True, False])
def test_the_average_equals_timms(warmup: bool) -> None:
    model = small_model()
    theirs = ModelEmaV3(model, decay=0.6, use_warmup=warmup, warmup_gamma=WARMUP_GAMMA, warmup_power=1.0)
    ours = WeightAverage(model, 0.6, warmup=warmup)
    for update in range(20):
        move(model, update)
        ours.update()
        theirs.update(model, step=update + 1 if warmup else None)
    for name, value in theirs.module.state_dict().items():
        torch.testing.assert_close(ours.tensors[name], value, rtol=1e-5, atol=1e-6)
    assert ours.tensors["1.num_batches_tracked"] == 20


def test_with_warmup_the_random_start_leaves_no_trace() -> None:
    model = small_model()
    average = WeightAverage(model, 0.9999)
    move(model, 1)
    average.update()
    assert same(bits(model), dict(average.tensors))
    assert decay_after(10_000, 0.9999, True) == pytest.approx(0.999, abs=1e-5)
    assert decay_after(10**6, 0.9999, True) == 0.9999


def test_the_model_holds_the_average_inside_the_block_only() -> None:
    model = small_model()
    average = WeightAverage(model, 0.5, warmup=False)
    move(model, 1)
    average.update()
    own, averaged = bits(model), {name: value.clone() for name, value in average.tensors.items()}
    address = model[0].weight.data_ptr()  # type: ignore[union-attr,operator]
    with pytest.raises(KeyError), average.swapped():
        assert same(bits(model), averaged)
        assert model[0].weight.data_ptr() == address  # type: ignore[union-attr,operator]
        raise KeyError
    assert same(bits(model), own)
    assert same(dict(average.tensors), averaged)


def test_shared_weights_survive_a_swap() -> None:
    model = nn.Module()
    model.first, model.second = nn.Linear(3, 3), nn.Linear(3, 3)
    model.second.weight = model.first.weight
    average = WeightAverage(model, 0.5, warmup=False)
    with torch.no_grad():
        model.first.weight.add_(1)
    average.update()
    before = bits(model)
    with average.swapped():
        assert not same(bits(model), before)
    assert same(bits(model), before)


def test_a_resumed_average_has_the_same_bits() -> None:
    model = small_model()
    whole = WeightAverage(model, 0.999)
    for update in range(3):
        move(model, update)
        whole.update()
    saved = copy.deepcopy(whole.state_dict())
    resumed = WeightAverage(model, 0.999)
    resumed.load_state_dict(saved)
    for update in range(3, 7):
        move(model, update)
        whole.update()
        resumed.update()
    assert resumed.updates == 7
    assert same(dict(whole.tensors), dict(resumed.tensors))


def test_an_average_of_another_model_is_refused_untouched() -> None:
    average = WeightAverage(small_model(5), 0.5)
    before = {name: value.clone() for name, value in average.tensors.items()}
    with pytest.raises(UserError, match=r"3\.weight, 3\.bias"):
        average.load_state_dict(WeightAverage(small_model(7), 0.5).state_dict())
    assert same(before, dict(average.tensors))


def test_channels_last_weights_stay_channels_last() -> None:
    model = small_model().to(memory_format=torch.channels_last)
    average = WeightAverage(model, 0.5, warmup=False)
    move(model, 1)
    average.update()
    assert average.tensors["0.weight"].is_contiguous(memory_format=torch.channels_last)
