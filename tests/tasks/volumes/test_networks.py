"""Networks for volumes: by name, for a patch, from a seed."""

from __future__ import annotations

import copy
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from stoker.config import Config
from stoker.core.errors import UserError
from stoker.tasks.building import count_parameters
from stoker.tasks.volumes.networks import (
    ARCHITECTURES,
    RESENC_PATCHES,
    VolumeModel,
    build_volume_model,
    divisor_of,
    fitting_patches,
)
from stoker.tasks.volumes.unets import nnunet_strides

SUPERVISED = ["dynunet", "residual_unet", "resenc_m", "segresnet_ds", "small_unet"]
ALL_ONCE = [name for name in sorted(ARCHITECTURES) if name not in ("resenc_l", "resenc_xl")]


def build(
    name: str, patch: tuple[int, int, int] = (32, 32, 32), channels: int = 1, classes: int = 2, **keys: Any
) -> VolumeModel:
    return build_volume_model(Config(task="segment3d", model=name, patch_size=patch, **keys), channels, classes)


def meta(name: str, patch: tuple[int, int, int], **arguments: Any) -> VolumeModel:
    """Without memory for its weights."""
    with torch.device("meta"):
        return build(name, patch, **arguments)


def patch_for(name: str) -> tuple[int, int, int]:
    """A small one."""
    return {"swinunetr": (64, 32, 32), "residual_unet": (32, 16, 16), "segresnet_ds": (32, 16, 16)}.get(
        name, (16, 16, 16)
    )


def test_the_case_study_s_network_has_its_number_of_parameters_and_the_presets_patches_fit() -> None:
    assert round(count_parameters(meta("residual_unet", (80, 144, 144))) / 1e6, 1) == 33.7
    assert all(patch == fitting_patches(name, patch)[1] for name, patch in RESENC_PATCHES.items())


def test_the_residual_encoder_computes_as_many_values_as_nnunet_says() -> None:
    """nnU-Net 2.8 gives 558,319,104 for a patch of 128³ and three classes."""
    model = meta("resenc_m", (128, 128, 128), classes=3, deep_supervision=True)
    assert model.divisor == (32, 32, 32)
    values = []
    for part in model.modules():
        if isinstance(part, nn.Conv3d | nn.ConvTranspose3d):
            part.register_forward_hook(lambda _, __, output: values.append(output.numel()))
    model(torch.empty(1, 1, 128, 128, 128, device="meta"))
    # It also counts an output at a sixteenth, which it then gives no weight, and a shortcut that only pools.
    assert sum(values) + 3 * 8**3 + 320 * 4**3 == 558_319_104
    assert count_parameters(model) == 102_349_612


@pytest.mark.parametrize(
    ("patch", "strides"),
    [
        ((128, 128, 128), [(2, 2, 2)] * 5),
        ((16, 320, 320), [(2, 2, 2)] * 2 + [(1, 2, 2)] * 4),
        ((72, 136, 136), [(2, 2, 2)] * 4 + [(1, 2, 2)]),
        ((4, 4, 4), []),
    ],
)
def test_axes_are_halved_as_nnunet_halves_them(patch: tuple[int, int, int], strides: list[tuple[int, ...]]) -> None:
    assert nnunet_strides(patch) == strides


@pytest.mark.parametrize("name", ALL_ONCE)
def test_every_network_gives_logits_of_the_patch_s_size_and_gradients_to_every_weight(name: str) -> None:
    supervised = name in SUPERVISED
    model = meta(name, patch_for(name), deep_supervision=supervised, channels=2)
    inputs = torch.empty(1, 2, *patch_for(name), device="meta")
    outputs = model(inputs)
    listed = outputs if isinstance(outputs, list) else [outputs]
    assert isinstance(outputs, list) == supervised
    assert listed[0].shape == (1, 2, *patch_for(name))
    for larger, smaller in pairwise(listed):
        assert all(few in (many, many // 2) for many, few in zip(larger.shape[2:], smaller.shape[2:], strict=True))
    sum(output.float().square().mean() for output in listed).backward()  # type: ignore[union-attr]
    assert [n for n, weight in model.named_parameters() if weight.grad is None] == []
    with torch.no_grad():
        assert isinstance(model.eval()(inputs), Tensor)
    assert model.divisor == divisor_of(name, patch_for(name))


def test_weights_follow_from_the_seed_alone_and_the_generator_stays_as_it_was() -> None:
    before = torch.get_rng_state()
    one, same, other = (build("small_unet", seed=seed).state_dict() for seed in (1, 1, 2))
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert any(not torch.equal(one[name], other[name]) for name in one)
    assert torch.equal(before, torch.get_rng_state())
    state = build("dynunet", deep_supervision=True).state_dict()
    assert len({value.data_ptr() for value in state.values()}) == len(state), "no weight has two names"


@pytest.mark.parametrize("name", ["dynunet", "small_unet", pytest.param("swinunetr", marks=pytest.mark.release)])
def test_gradient_checkpointing_keeps_names_and_gradients_and_fewer_values(name: str) -> None:
    patch = patch_for(name)
    gradients, kept = [], []
    for again in (False, True):
        model = copy.deepcopy(build(name, patch, gradient_checkpointing=again))
        values = 0

        def pack(value: Tensor) -> Tensor:
            nonlocal values
            values += value.numel()
            return value

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda value: value):
            loss = model(torch.ones(1, 1, *patch).cumsum(-1) / 8).square().mean()
        kept.append(values)
        if name == "swinunetr":
            continue  # its backward pass takes longer than all others together
        loss.backward()
        gradients.append({name: weight.grad for name, weight in model.named_parameters()})
    assert kept[1] < 0.6 * kept[0]
    for mine, expected in pairwise(gradients):
        assert list(mine) == list(expected)
        for weight, gradient in expected.items():
            torch.testing.assert_close(mine[weight], gradient, rtol=1e-3, atol=1e-5)


def test_channels_last_is_a_layout_and_changes_no_values() -> None:
    plain, last = (build("small_unet", channels_last=on).eval() for on in (False, True))
    weight = next(value for name, value in last.named_parameters() if name.endswith("conv2.weight"))
    assert weight.is_contiguous(memory_format=torch.channels_last_3d)
    inputs = torch.randn(2, 1, 16, 16, 16)
    torch.testing.assert_close(last(inputs), plain(inputs), rtol=1e-4, atol=1e-4)


def test_a_patch_that_cannot_be_divided_is_refused_with_the_nearest_sizes_that_fit() -> None:
    with pytest.raises(UserError) as caught:
        build("residual_unet", (72, 136, 136))
    assert "16 x 16 x 16" in caught.value.seen
    assert "80 x 144 x 144, a step computes 1.25 times the voxels" in (caught.value.why or "")
    assert caught.value.hint == ("patch_size=[64, 128, 128] or patch_size=[80, 144, 144], or indivisible_patch=pad")
    with pytest.raises(UserError, match="patch_size: \\[72, 136, 136\\]") as caught:
        build("dynunet", (72, 136, 136))
    assert "patch_size=[64, 128, 128] or patch_size=[80, 160, 160]" in (caught.value.hint or "")


edges = st.integers(8, 260)


@settings(max_examples=20, deadline=None)
@given(name=st.sampled_from(["dynunet", "residual_unet"]), patch=st.tuples(edges, edges, edges))
def test_sizes_that_are_offered_fit_and_lie_around_the_patch(name: str, patch: tuple[int, int, int]) -> None:
    below, above = fitting_patches(name, patch)
    for size, sign in ((below, 1), (above, -1)):
        if size is not None:
            assert all(edge % step == 0 for edge, step in zip(size, divisor_of(name, size), strict=True))
            assert all(sign * (mine - edge) >= 0 for mine, edge in zip(patch, size, strict=True))


def test_a_padded_patch_gives_what_the_network_gives_for_the_patch_with_zeros() -> None:
    padding = build("small_unet", (10, 12, 14), indivisible_patch="pad", deep_supervision=True)
    plain = build("small_unet", (12, 12, 16), deep_supervision=True)
    inputs = torch.randn(1, 1, 10, 12, 14)
    outputs = padding(inputs)
    expected = plain(nn.functional.pad(inputs, (0, 2, 0, 0, 0, 2)))
    assert [tuple(output.shape[2:]) for output in outputs] == [(10, 12, 14), (5, 6, 7)]
    torch.testing.assert_close(outputs[0], expected[0][:, :, :10, :, :14])
    torch.testing.assert_close(outputs[1], expected[1][:, :, :5, :, :7])
    # A resolution whose voxels do not end where the patch ends is left out.
    assert [tuple(output.shape[2:]) for output in padding(torch.randn(1, 1, 9, 12, 14))] == [(9, 12, 14)]
    with pytest.raises(UserError, match="9 x 8 x 8"):
        build("small_unet", (8, 8, 8))(torch.zeros(1, 1, 9, 8, 8))


@pytest.mark.parametrize(
    ("name", "arguments", "error"),
    [
        ("unet", {"deep_supervision": True}, "model-lacks-feature"),
        ("segresnet_ds", {"dropout": 0.1}, "model-lacks-feature"),
        ("residual_unet", {"patch": (16, 16, 16)}, "patch-too-small"),
    ],
)
def test_what_cannot_be_built_is_refused(name: str, arguments: dict[str, Any], error: str) -> None:
    with pytest.raises(UserError) as caught:
        build(name, **arguments)
    assert caught.value.name == error
    assert caught.value.hint


def test_dropout_reaches_the_networks_that_have_it() -> None:
    for name in ("dynunet", "residual_unet", "segresnet", "small_unet", "unet"):
        model = build(name, dropout=0.3)
        rates = [part.p for part in model.modules() if isinstance(part, nn.modules.dropout._DropoutNd)]
        assert rates
        assert set(rates) == {0.3}, name
