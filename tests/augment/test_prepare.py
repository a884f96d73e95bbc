"""Flipping, conversion to float, and memory layout."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torchvision.transforms import functional

from stoker.augment.operations import to_device
from stoker.augment.pipeline import IMAGENET_MEAN, IMAGENET_STD, flip, to_float
from tests.augment.images import some_batch


def test_floats_are_those_of_torchvision() -> None:
    images = some_batch()
    theirs = functional.normalize(images.permute(0, 3, 1, 2).float() / 255, IMAGENET_MEAN, IMAGENET_STD)
    torch.testing.assert_close(to_float(images, IMAGENET_MEAN, IMAGENET_STD), theirs, rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_layout_is_channels_last_in_any_precision(dtype: torch.dtype) -> None:
    inputs = to_float(some_batch(), IMAGENET_MEAN, IMAGENET_STD, dtype)
    assert inputs.shape == (6, 3, 48, 40)
    assert inputs.dtype == dtype
    assert inputs.is_contiguous(memory_format=torch.channels_last)


def test_half_precision_is_rounded_once_at_the_end() -> None:
    exact = to_float(some_batch(), IMAGENET_MEAN, IMAGENET_STD)
    assert torch.equal(to_float(some_batch(), IMAGENET_MEAN, IMAGENET_STD, torch.float16), exact.half())


def test_the_bytes_are_not_touched() -> None:
    images = some_batch()
    to_float(images, IMAGENET_MEAN, IMAGENET_STD)
    flip(images, torch.ones(6, dtype=torch.bool))
    assert torch.equal(images, some_batch())


def test_only_the_chosen_samples_are_mirrored() -> None:
    images, flips = some_batch(), torch.tensor([True, False, True, True, False, False])
    flipped = flip(images, flips)
    for sample, mirrored in enumerate(flips.tolist()):
        expected = np.fliplr(images[sample].numpy()) if mirrored else images[sample].numpy()
        assert np.array_equal(flipped[sample].numpy(), expected)


def test_a_sample_has_the_same_floats_alone_and_in_a_batch() -> None:
    images = some_batch(8, 17, 13)
    together = to_float(images, IMAGENET_MEAN, IMAGENET_STD)
    for sample in range(8):
        alone = to_float(images[sample : sample + 1], IMAGENET_MEAN, IMAGENET_STD)
        assert torch.equal(alone[0], together[sample])


def test_arrays_and_tensors_reach_the_device() -> None:
    cpu = torch.device("cpu")
    assert to_device(np.arange(3), cpu).tolist() == [0, 1, 2]
    assert to_device(torch.arange(3), cpu).tolist() == [0, 1, 2]
