"""The moving average of the weights."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from timm.utils import ModelEmaV3
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.optim.swa_utils import AveragedModel

from stoker.config import load_config
from stoker.core.errors import UserError
from stoker.train.ema import WARMUP_GAMMA, WeightAverage
from tests.conftest import PROJECT
from tests.support.operators import counted


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
    ours = WeightAverage(model, 0.6, warmup="ramp" if warmup else "none")
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
    assert average.decay_at(10_000) == pytest.approx(0.999, abs=1e-5)
    assert average.decay_at(10**6) == 0.9999
    every = WeightAverage(model, 0.9999, every=3, steps_per_epoch=7)
    assert [every.decay_at(step) for step in (0, 3, 6, 7, 10)] == [0, 1 / 11, 2 / 12, 3 / 13, 4 / 14], "updates count"


def test_the_model_holds_the_average_inside_the_block_only() -> None:
    model = small_model()
    average = WeightAverage(model, 0.5, warmup="none")
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
    average = WeightAverage(model, 0.5, warmup="none")
    with torch.no_grad():
        model.first.weight.add_(1)
    average.update()
    before = bits(model)
    with average.swapped():
        assert not same(bits(model), before)
    assert same(bits(model), before)


def test_an_average_of_another_model_is_refused_untouched() -> None:
    average = WeightAverage(small_model(5), 0.5)
    before = {name: value.clone() for name, value in average.tensors.items()}
    with pytest.raises(UserError, match=r"3\.weight, 3\.bias"):
        average.load_state_dict(WeightAverage(small_model(7), 0.5).state_dict())
    assert same(before, dict(average.tensors))


# torchvision's references/classification/train.py: an AveragedModel that is updated if i % model_ema_steps == 0, i
# counting the batches of an epoch, and that forgets it was ever updated while epoch < lr_warmup_epochs.
STEPS_PER_EPOCH, WARMUP_EPOCHS, EPOCHS, EVERY = 75, 2, 6, 32


def torchvisions(model: nn.Module, alpha: float) -> AveragedModel:
    def average(ours: torch.Tensor, theirs: torch.Tensor, _: torch.Tensor | int) -> torch.Tensor:
        return (1 - alpha) * ours + alpha * theirs

    return AveragedModel(model, avg_fn=average, use_buffers=True)


def test_the_average_of_torchvisions_recipe_is_torchvisions() -> None:
    config = load_config(PROJECT / "configs/torchvision_v2.yaml", []).config
    alpha = min(1.0, (1 - 0.99998) * 8 * 128 * 32 / 600)
    assert config.ema_decay == pytest.approx(1 - alpha, abs=1e-15)
    assert (config.ema_every, config.ema_warmup, config.warmup_epochs, config.epochs) == (32, "copy", 5, 600)

    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    theirs = torchvisions(model, alpha)
    ours = WeightAverage(
        model, config.ema_decay, warmup=config.ema_warmup, every=EVERY, steps_per_epoch=STEPS_PER_EPOCH,
        warmup_steps=WARMUP_EPOCHS * STEPS_PER_EPOCH,
    )  # fmt: skip
    for step in range(EPOCHS * STEPS_PER_EPOCH):
        generator = torch.Generator().manual_seed(step)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn(parameter.shape, generator=generator))
            model(torch.randn(6, 3, generator=generator))
        ours.update()
        epoch, batch = divmod(step, STEPS_PER_EPOCH)
        if batch % EVERY == 0:
            theirs.update_parameters(model)
            if epoch < WARMUP_EPOCHS:
                theirs.n_averaged.fill_(0)
        for name, value in theirs.module.state_dict().items():
            if value.is_floating_point():  # torchvision averages batch counts too, which nothing reads
                torch.testing.assert_close(ours.tensors[name], value, rtol=1e-5, atol=1e-6)


def test_an_average_of_every_third_step_resumes_between_two() -> None:
    keys: dict[str, Any] = {"every": 3, "steps_per_epoch": 7, "warmup_steps": 7, "warmup": "copy"}
    model = small_model()
    whole = WeightAverage(model, 0.9, **keys)
    resumed: WeightAverage | None = None
    for step in range(25):
        if step == 11:
            resumed = WeightAverage(model, 0.9, **keys)
            resumed.load_state_dict(copy.deepcopy(whole.state_dict()))
        move(model, step)
        whole.update()
        if resumed is not None:
            resumed.update()
    assert resumed is not None
    assert same(dict(whole.tensors), dict(resumed.tensors))


def test_updating_and_swapping_ask_the_device_nothing_and_take_a_call_for_each_type() -> None:
    with FakeTensorMode():  # a read would raise: there are no values
        model = nn.Sequential(nn.Linear(3, 4, dtype=torch.float16), nn.BatchNorm1d(4))
        average = WeightAverage(model, 0.9)
        with counted(strict=True) as operators:
            average.update()
        assert operators.by_name == {"_foreach_lerp_": 2, "_foreach_copy_": 1}
        with counted(strict=True) as operators, average.swapped():
            pass
        assert operators.by_name == {"_foreach_copy_": 18}
