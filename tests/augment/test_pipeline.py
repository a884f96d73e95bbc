"""A batch from bytes to inputs and targets: the order, the shapes, and the same bits for the same keys."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from stoker.augment import mixing, policies
from stoker.augment import pipeline as erasing
from stoker.augment.mixing import Mixer, soft_targets
from stoker.augment.pipeline import (
    IMAGENET_MEAN,
    IMAGENET_STD,
    EvalPrepare,
    TrainAugment,
    build_policy,
    build_train_augment,
    draw_erasures,
    erase,
    flip,
    to_float,
)
from stoker.augment.policies import RandAugment, TrivialAugmentWide, apply_policy
from stoker.config import Config
from stoker.data import draws
from tests.augment.images import some_batch, some_keys

FLIPS = np.array([True, False, False, True, True, False, True, False])
LABELS = np.arange(8)
KEYS = some_keys(8)


def everything(mixing_on: bool = True) -> TrainAugment:
    mixer = Mixer(0.2, 1.0, 1.0, 0.5, 0.1, 10, seed=1) if mixing_on else Mixer(label_smoothing=0.1, num_classes=10)
    return TrainAugment(mixer, RandAugment(magnitude=9, probability=1), erasing=0.5)


def test_the_parts_run_in_the_order_of_timm_and_torchvision() -> None:
    images = apply_policy(RandAugment(magnitude=9, probability=1), flip(some_batch(8), torch.from_numpy(FLIPS)), KEYS)
    expected = erase(to_float(images, IMAGENET_MEAN, IMAGENET_STD), draw_erasures(KEYS, 0.5, 48, 40))
    inputs, targets, mixed = everything(mixing_on=False)(some_batch(8), LABELS, FLIPS, KEYS, 0, 0)
    assert torch.equal(inputs, expected)
    assert torch.equal(targets, soft_targets(torch.from_numpy(LABELS), 10, 0.1))
    assert not mixed
    mixed_inputs, mixed_targets, is_mixed = everything()(some_batch(8), LABELS, FLIPS, KEYS, 3, 4)
    again = Mixer(0.2, 1.0, 1.0, 0.5, 0.1, 10, seed=1)(expected, torch.from_numpy(LABELS), 3, 4)
    assert torch.equal(mixed_inputs, again.images)
    assert torch.equal(mixed_targets, again.targets)
    assert is_mixed


def test_a_sample_has_the_same_bits_alone_in_a_batch_and_in_any_order() -> None:
    augment = everything(mixing_on=False)
    together = augment(some_batch(8), LABELS, FLIPS, KEYS, 0, 0).images
    for sample in range(8):
        one = slice(sample, sample + 1)
        alone = augment(some_batch(8)[one], LABELS[one], FLIPS[one], KEYS[one], 0, 0).images
        assert torch.equal(alone[0], together[sample])
    order = np.array([5, 2, 7, 0, 1, 6, 3, 4])
    shuffled = augment(some_batch(8)[torch.from_numpy(order)], LABELS[order], FLIPS[order], KEYS[order], 0, 9).images
    assert torch.equal(shuffled, together[torch.from_numpy(order)])


def test_the_same_call_gives_the_same_bits_whatever_torchs_generator_has_done() -> None:
    first = everything()(some_batch(8), LABELS, FLIPS, KEYS, 3, 4)
    torch.rand(17)
    second = everything()(some_batch(8), LABELS, FLIPS, KEYS, 3, 4)
    assert torch.equal(first.images, second.images)
    assert torch.equal(first.targets, second.targets)


def test_tensors_work_like_arrays_and_the_loaders_bytes_are_unchanged() -> None:
    images = some_batch(8)
    arrays = everything()(images, LABELS, FLIPS, KEYS, 0, 0)
    tensors = everything()(images, torch.from_numpy(LABELS), torch.from_numpy(FLIPS), KEYS, 0, 0)
    assert torch.equal(arrays.images, tensors.images)
    assert torch.equal(images, some_batch(8))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_inputs_are_channels_last_in_any_precision(dtype: torch.dtype) -> None:
    augment = TrainAugment(Mixer(0.2, 1.0, num_classes=10), TrivialAugmentWide(), 0.5, dtype=dtype)
    for step in range(4):
        inputs, targets, _ = augment(some_batch(8), LABELS, FLIPS, KEYS, 0, step)
        assert inputs.dtype == dtype
        assert inputs.is_contiguous(memory_format=torch.channels_last)
        assert targets.dtype == torch.float32


def test_evaluation_only_normalises() -> None:
    assert torch.equal(EvalPrepare()(some_batch()), to_float(some_batch(), IMAGENET_MEAN, IMAGENET_STD))


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
    assert build_policy(Config(auto_augment="trivialaugment"), IMAGENET_MEAN) == TrivialAugmentWide((0, 0, 0))
    assert build_policy(Config(), IMAGENET_MEAN) is None


def test_no_two_kinds_of_choice_share_their_draws() -> None:
    ours = [policies.POLICY, erasing.ERASING, mixing.MIXING]
    datas = [value for name, value in vars(draws).items() if name.isupper() and isinstance(value, int)]
    assert len(datas) >= 3
    assert len({*ours, *datas}) == len(ours) + len(datas)
