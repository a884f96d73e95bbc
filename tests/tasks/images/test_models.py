"""Networks from timm."""

from __future__ import annotations

import pytest
import torch
from timm.layers import BatchNormAct2d
from torch import nn

from stoker.core.errors import UserError
from stoker.tasks.building import with_sync_batchnorm
from stoker.tasks.images.models import build_model


def drop_probabilities(model: nn.Module) -> list[float]:
    return [float(part.drop_prob) for part in model.modules() if type(part).__name__ == "DropPath"]  # type: ignore[arg-type]


def test_a_small_resnet_accepts_digits() -> None:
    model = build_model("resnet18", 10, img_size=32, other_sizes=[28], channels_last=True, dropout=0.3)
    assert model(torch.zeros(2, 3, 32, 32)).shape == (2, 10)
    assert model.conv1.weight.is_contiguous(memory_format=torch.channels_last)  # type: ignore[union-attr,operator]
    assert model.drop_rate == 0.3


def test_a_tag_names_weights_that_are_not_fetched() -> None:
    assert build_model("resnet18.a1_in1k", 10).num_classes == 10


@pytest.mark.parametrize(("name", "hint"), [("resnet5O", "resnet50"), ("squeezenet_of_my_own", ""), ("?", "")])
def test_an_unknown_name_gets_a_hint(name: str, hint: str) -> None:
    with pytest.raises(UserError) as caught:
        build_model(name, 10)
    assert caught.value.name == "model-unknown"
    assert caught.value.hint
    assert hint in caught.value.hint


def test_nothing_is_fetched_from_a_hub() -> None:
    for name in ("hf-hub:timm/resnet18.a1_in1k", "local-dir:/tmp/model"):
        with pytest.raises(UserError, match="is an address"):
            build_model(name, 10)


def test_stochastic_depth_reaches_the_network() -> None:
    assert max(drop_probabilities(build_model("resnet18", 10, drop_path=0.05))) == pytest.approx(0.05)
    # Swin has its own default; 0 means 0.
    assert not any(drop_probabilities(build_model("swin_tiny_patch4_window7_224", 10, img_size=224)))


@pytest.mark.parametrize("name", ["vgg11", "res2net50_14w_8s"])
def test_stochastic_depth_that_would_be_refused_or_ignored_is_reported(name: str) -> None:
    with pytest.raises(UserError, match=f"drop_path: 0.1 is not possible with model: {name}"):
        build_model(name, 10, drop_path=0.1)


def test_a_vision_transformer_accepts_every_size_of_the_run() -> None:
    model = build_model("vit_tiny_patch16_224", 10, img_size=64, other_sizes=[48])
    assert model.training
    for size in (64, 48):
        assert model(torch.zeros(1, 3, size, size)).shape == (1, 10)


def test_a_network_of_one_size_refuses_others_before_training() -> None:
    with pytest.raises(UserError) as caught:
        build_model("mixer_s32_224", 10, img_size=64, other_sizes=[96])
    assert caught.value.name == "model-refuses-size"
    assert "96 px" in caught.value.seen
    assert build_model("mixer_s32_224", 10, img_size=64)(torch.zeros(1, 3, 64, 64)).shape == (1, 10)


def test_a_model_that_timm_cannot_build_is_a_user_error() -> None:
    with pytest.raises(UserError) as caught:
        build_model("swinv2_tiny_window8_256", 10, img_size=192)
    assert caught.value.name in ("model-not-built", "model-refuses-size")


def test_gradient_checkpointing_gives_the_same_gradients() -> None:
    gradients = []
    for on in (False, True):
        model = build_model("resnet18", 10, gradient_checkpointing=on, seed=1)
        model(torch.ones(2, 3, 32, 32).requires_grad_()).sum().backward()
        gradients.append(model.conv1.weight.grad)  # type: ignore[union-attr]
    assert model.grad_checkpointing
    torch.testing.assert_close(gradients[0], gradients[1])


def test_unsupported_gradient_checkpointing_is_reported() -> None:
    with pytest.raises(UserError, match="gradient_checkpointing: true is not possible with model: inception_v3"):
        build_model("inception_v3", 10, gradient_checkpointing=True)


def test_the_weights_follow_from_the_seed_alone() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    first = build_model("resnet18", 10, seed=3)
    assert torch.equal(torch.rand(3), expected)
    # With an argument that this architecture does not have and that had to be dropped.
    second = build_model("resnet18", 10, img_size=32, seed=3)
    assert torch.equal(first.conv1.weight, second.conv1.weight)  # type: ignore[union-attr,arg-type]
    assert not torch.equal(first.conv1.weight, build_model("resnet18", 10, seed=4).conv1.weight)  # type: ignore[union-attr,arg-type]


def test_sync_batch_norm_keeps_weights_and_activations() -> None:
    model = build_model("regnety_002", 10, seed=1)
    assert any(isinstance(part, BatchNormAct2d) for part in model.modules())
    images = torch.randn(1, 3, 32, 32)
    expected = model.eval()(images)
    parameters = list(model.parameters())
    converted = with_sync_batchnorm(model)
    assert not any(isinstance(part, nn.BatchNorm2d) for part in converted.modules())
    assert any(isinstance(part, nn.SyncBatchNorm) for part in converted.modules())
    assert all(a is b for a, b in zip(parameters, converted.parameters(), strict=True))
    torch.testing.assert_close(converted(images), expected)
