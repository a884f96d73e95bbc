"""FLOPs of a training step per image, compared with published figures and with counts by hand."""

from __future__ import annotations

import timm
import torch
from torch import nn

from stoker.train.compute import training_flops_per_image


def without_weights(name: str) -> nn.Module:
    """The model's shapes only: initialising the weights takes longer than counting."""
    with torch.device("meta"):
        model: nn.Module = timm.create_model(name)
    return model


def test_resnet50_costs_three_times_its_forward_pass_less_the_gradient_of_the_image() -> None:
    flops = training_flops_per_image(without_weights("resnet50"), 224)
    assert flops is not None
    # 4.09 GMAC forward; the first convolution's input needs no gradient.
    stem = 2 * 112 * 112 * 64 * 3 * 49
    assert abs(flops - (3 * 2 * 4.089e9 - stem)) < 0.01e9


def test_grouped_convolutions_are_not_counted_once_for_every_group() -> None:
    flops = training_flops_per_image(without_weights("efficientnet_b0"), 224)
    assert flops is not None
    assert 2.2e9 < flops < 2.4e9, "three times 0.39 GMAC"


def test_convolutions_match_a_count_by_hand_forward_backward_and_transposed() -> None:
    convolution = nn.Conv2d(4, 6, 3, padding=1, groups=2, bias=False)
    forward = 2 * 8 * 8 * 6 * 2 * 9
    assert training_flops_per_image(convolution, 8, channels=4) == 2 * forward, "forward, and dw"
    up = nn.ConvTranspose2d(4, 6, 2, stride=2, bias=False)
    assert training_flops_per_image(up, 8, channels=4) == 2 * (2 * 8 * 8 * 4 * 6 * 4)


def test_attention_counts() -> None:
    flops = training_flops_per_image(without_weights("vit_tiny_patch16_224"), 224)
    assert flops is not None
    assert 6.3e9 < flops < 7.9e9, "six times 1.26 GMAC, the products of attention included"


def test_what_checkpointing_computes_twice_is_counted_once() -> None:
    model = timm.create_model("resnet18")
    plain = training_flops_per_image(model, 64)
    model.set_grad_checkpointing(True)
    assert training_flops_per_image(model, 64) == plain
    assert model.grad_checkpointing


def test_counting_leaves_model_and_generator_as_they_were() -> None:
    model = timm.create_model("test_resnet", drop_rate=0.5).eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    generator = torch.get_rng_state()
    assert training_flops_per_image(model, 32)
    assert not model.training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.equal(torch.get_rng_state(), generator)


def test_a_model_that_reads_values_has_unknown_flops() -> None:
    class Asks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Conv2d(3, 3, 1)

        def forward(self, images: torch.Tensor) -> torch.Tensor:
            made = self.layer(images)
            return made if float(made.detach().sum()) > 0 else -made

    assert training_flops_per_image(Asks(), 8) is None
