"""A batch from bytes to inputs and targets: the order, the shapes, and the same bits for the same keys."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torchvision.transforms import functional

from stoker.config import Config
from stoker.loader import rng as draws
from stoker.tasks.images.augment import pipeline, policies
from stoker.tasks.images.augment.pipeline import (
    IMAGENET_MEAN,
    IMAGENET_STD,
    Erasures,
    EvalPrepare,
    Mixer,
    TrainAugment,
    build_policy,
    build_train_augment,
    draw_erasures,
    erase,
    flip,
    mix_images,
    to_float,
)
from stoker.tasks.images.augment.policies import Policy, RandAugment, TrivialAugmentWide
from tests.tasks.augment.images import apply_policy, some_batch, some_keys

FLIPS = np.array([True, False, False, True, True, False, True, False])
LABELS = np.arange(8)
KEYS = some_keys(8)


RANDAUGMENT = RandAugment(magnitude=9, num_ops=3, probability=1)


def everything(mixing_on: bool = True, policy: Policy = RANDAUGMENT) -> TrainAugment:
    mixer = Mixer(0.2, 1.0, 1.0, 0.5, 0.1, 10, seed=1) if mixing_on else Mixer(label_smoothing=0.1, num_classes=10)
    return TrainAugment(mixer, policy, erasing=0.5)


def by_hand() -> torch.Tensor:
    """The inputs of the batch without mixing, one step after the other."""
    images = some_batch(8)
    flip(images, torch.from_numpy(np.flatnonzero(FLIPS)))
    inputs = to_float(apply_policy(RANDAUGMENT, images, KEYS), IMAGENET_MEAN, IMAGENET_STD)
    erasures = draw_erasures(KEYS, 0.5, 48, 40)
    erase(inputs, *map(torch.from_numpy, (erasures.samples, *erasures.masks(48, 40))))
    return inputs


def test_the_parts_run_in_the_order_of_timm_and_torchvision() -> None:
    inputs, targets, labels, mixed = everything(mixing_on=False)(some_batch(8), LABELS, FLIPS, KEYS, 0, 0)
    assert torch.equal(inputs, by_hand())
    assert torch.equal(targets.argmax(1), torch.from_numpy(LABELS))
    assert torch.equal(labels, torch.from_numpy(LABELS))
    assert not mixed
    for part in range(4):
        recipe = everything().mixer.draw(3, 4, part, 48, 40)
        assert recipe is not None
        mixed_inputs, mixed_targets, _, is_mixed = everything()(some_batch(8), LABELS, FLIPS, KEYS, 3, 4, part)
        assert torch.equal(mixed_inputs, mix_images(by_hand(), recipe, torch.float32))
        torch.testing.assert_close(mixed_targets, targets * recipe.kept + targets.flip(0) * (1 - recipe.kept))
        assert is_mixed


@pytest.mark.parametrize("policy", [RANDAUGMENT, TrivialAugmentWide()])
def test_a_sample_has_the_same_bits_alone_in_a_batch_and_in_any_order(policy: Policy) -> None:
    augment = everything(mixing_on=False, policy=policy)
    together = augment(some_batch(8), LABELS, FLIPS, KEYS, 0, 0).images
    for sample in range(8):
        one = slice(sample, sample + 1)
        alone = augment(some_batch(8)[one], LABELS[one], FLIPS[one], KEYS[one], 0, 0).images
        assert torch.equal(alone[0], together[sample])
    order = np.array([5, 2, 7, 0, 1, 6, 3, 4])
    shuffled = augment(some_batch(8)[torch.from_numpy(order)], LABELS[order], FLIPS[order], KEYS[order], 0, 9).images
    assert torch.equal(shuffled, together[torch.from_numpy(order)])


def test_the_same_call_gives_the_same_bits_whatever_torchs_generator_has_done() -> None:
    before = random.getstate(), torch.get_rng_state()
    images = some_batch(8)
    first = everything()(images, LABELS, FLIPS, KEYS, 3, 4)
    assert torch.equal(images, some_batch(8)), "the loader's bytes are unchanged"
    assert random.getstate() == before[0]
    assert torch.equal(torch.get_rng_state(), before[1])
    torch.rand(17)
    second = everything()(some_batch(8), LABELS, FLIPS, KEYS, 3, 4)
    assert torch.equal(first.images, second.images)
    assert torch.equal(first.targets, second.targets)


@pytest.mark.parametrize("layout", [torch.channels_last, torch.contiguous_format])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_inputs_have_the_layout_and_precision_asked_for(dtype: torch.dtype, layout: torch.memory_format) -> None:
    mixer = Mixer(0.2, 1.0, num_classes=10)
    exact = TrainAugment(mixer, TrivialAugmentWide(), 0.5)
    augment = TrainAugment(mixer, TrivialAugmentWide(), 0.5, dtype=dtype, memory_format=layout)
    for step in range(4):
        inputs, targets, _, _ = augment(some_batch(8), LABELS, FLIPS, KEYS, 0, step)
        assert inputs.dtype == dtype
        assert inputs.is_contiguous(memory_format=layout)
        assert targets.dtype == torch.float32
        assert torch.equal(inputs, exact(some_batch(8), LABELS, FLIPS, KEYS, 0, step).images.to(dtype))


@pytest.mark.parametrize("layout", [torch.channels_last, torch.contiguous_format])
def test_evaluation_only_normalises(layout: torch.memory_format) -> None:
    inputs = EvalPrepare(memory_format=layout)(some_batch())
    assert torch.equal(inputs, to_float(some_batch(), IMAGENET_MEAN, IMAGENET_STD))
    assert inputs.is_contiguous(memory_format=layout)


def test_a_config_builds_the_pipeline_it_describes() -> None:
    config = Config(
        auto_augment="randaugment", randaugment_magnitude=6, randaugment_ops=3, mixup_alpha=0.1, cutmix_alpha=1.0,
        random_erasing=0.25, label_smoothing=0.1, mix_probability=0.9, mix_switch_probability=0.3, seed=5,
    )  # fmt: skip
    augment = build_train_augment(config, 100, dtype=torch.bfloat16)
    # timm fills uncovered areas with the mean colour.
    assert augment.policy == RandAugment(6, 0.5, 3, (124, 116, 104))
    assert augment.mixer == Mixer(0.1, 1.0, 0.9, 0.3, 0.1, 100, 5)
    assert augment.erasing == 0.25
    assert augment.dtype == torch.bfloat16
    assert augment.memory_format == torch.channels_last
    assert build_train_augment(Config(channels_last=False), 10).memory_format == torch.contiguous_format
    assert build_policy(Config(auto_augment="trivialaugment"), IMAGENET_MEAN) == TrivialAugmentWide((0, 0, 0))
    assert build_policy(Config(), IMAGENET_MEAN) is None


def test_no_two_kinds_of_choice_share_their_draws() -> None:
    ours = [policies.POLICY, pipeline.ERASING, pipeline.MIXING]
    datas = [value for name, value in vars(draws).items() if name.isupper() and isinstance(value, int)]
    assert len(datas) >= 3
    assert len({*ours, *datas}) == len(ours) + len(datas)


# Flipping and floats


def test_floats_are_those_of_torchvision() -> None:
    images = some_batch()
    theirs = functional.normalize(images.permute(0, 3, 1, 2).float() / 255, IMAGENET_MEAN, IMAGENET_STD)
    torch.testing.assert_close(to_float(images, IMAGENET_MEAN, IMAGENET_STD), theirs, rtol=0, atol=1e-5)


def test_only_the_chosen_samples_are_mirrored() -> None:
    images, flipped = some_batch(), some_batch()
    flip(flipped, torch.tensor([0, 2, 3]))
    for sample in range(6):
        expected = np.fliplr(images[sample].numpy()) if sample in (0, 2, 3) else images[sample].numpy()
        assert np.array_equal(flipped[sample].numpy(), expected)


# Erasing


def floats(count: int = 12) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(count, 3, 24, 20, generator=generator).to(memory_format=torch.channels_last)


def erased(images: torch.Tensor, erasures: Erasures) -> torch.Tensor:
    """The images without the rectangles; changes them in place."""
    rows, columns = erasures.masks(*images.shape[2:])
    erase(images, *map(torch.from_numpy, (erasures.samples, rows, columns)))
    return images


@pytest.mark.parametrize("layout", [torch.channels_last, torch.contiguous_format])
def test_torchvision_erases_the_same_rectangles(layout: torch.memory_format) -> None:
    erasures = draw_erasures(some_keys(12), 0.5, 24, 20)
    assert 0 < len(erasures.samples) < 12
    expected = floats()
    for sample, (top, left, bottom, right) in zip(erasures.samples, erasures.boxes.tolist(), strict=True):
        zero = torch.zeros(1, 1, 1)
        expected[sample] = functional.erase(expected[sample], top, left, bottom - top, right - left, zero)
    ours = erased(floats().contiguous(memory_format=layout), erasures)
    assert torch.equal(ours, expected)
    assert ours.is_contiguous(memory_format=layout)


def test_areas_and_aspects_are_within_bounds_and_spread_over_them() -> None:
    erasures = draw_erasures(some_keys(20_000), 1.0, 224, 224)
    assert len(erasures.samples) == 20_000
    top, left, bottom, right = erasures.boxes.T
    assert top.min() == 0
    assert left.min() == 0
    assert bottom.max() == right.max() == 224
    share = (bottom - top) * (right - left) / 224**2
    assert share.min() == pytest.approx(0.02, abs=0.002)
    assert share.max() == pytest.approx(1 / 3, abs=0.01)
    assert share.mean() == pytest.approx((0.02 + 1 / 3) / 2, rel=0.03)
    aspect = (bottom - top) / (right - left)
    assert aspect.min() == pytest.approx(0.3, rel=0.05)
    assert aspect.max() == pytest.approx(3.3, rel=0.05)
    assert np.log(aspect).mean() == pytest.approx(0, abs=0.02)


def test_the_requested_share_is_erased() -> None:
    assert len(draw_erasures(some_keys(20_000), 0.1, 64, 64).samples) / 20_000 == pytest.approx(0.1, abs=0.01)
    nothing = draw_erasures(some_keys(12), 0.0, 24, 20)
    assert len(nothing.samples) == 0
    assert torch.equal(erased(floats(), nothing), floats())


def test_an_image_of_one_pixel_survives() -> None:
    draw = draw_erasures(some_keys(50), 1.0, 1, 1)
    assert erased(torch.ones(50, 3, 1, 1), draw).sum() == 150
