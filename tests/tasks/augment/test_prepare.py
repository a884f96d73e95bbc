"""Flipping, conversion to float, and memory layout."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torchvision.transforms import functional

from stoker.tasks.device_copies import copy_to, pack
from stoker.tasks.images.augment.pipeline import IMAGENET_MEAN, IMAGENET_STD, flip, to_float
from tests.tasks.augment.images import some_batch


def test_floats_are_those_of_torchvision() -> None:
    images = some_batch()
    theirs = functional.normalize(images.permute(0, 3, 1, 2).float() / 255, IMAGENET_MEAN, IMAGENET_STD)
    torch.testing.assert_close(to_float(images, IMAGENET_MEAN, IMAGENET_STD), theirs, rtol=0, atol=1e-5)


@pytest.mark.parametrize("layout", [torch.channels_last, torch.contiguous_format])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_precision_and_layout_are_those_asked_for_and_rounded_once(dtype, layout) -> None:
    exact = to_float(some_batch(), IMAGENET_MEAN, IMAGENET_STD)
    inputs = to_float(some_batch(), IMAGENET_MEAN, IMAGENET_STD, dtype, layout)
    assert inputs.shape == (6, 3, 48, 40)
    assert inputs.dtype == dtype
    assert inputs.is_contiguous(memory_format=layout)
    assert torch.equal(inputs, exact.to(dtype))


def test_the_bytes_are_not_touched() -> None:
    images = some_batch()
    to_float(images, IMAGENET_MEAN, IMAGENET_STD)
    assert torch.equal(images, some_batch())


def test_only_the_chosen_samples_are_mirrored() -> None:
    images, flipped = some_batch(), some_batch()
    flip(flipped, torch.tensor([0, 2, 3]))
    for sample in range(6):
        expected = np.fliplr(images[sample].numpy()) if sample in (0, 2, 3) else images[sample].numpy()
        assert np.array_equal(flipped[sample].numpy(), expected)


def test_a_sample_has_the_same_floats_alone_and_in_a_batch() -> None:
    images = some_batch(8, 17, 13)
    together = to_float(images, IMAGENET_MEAN, IMAGENET_STD)
    for sample in range(8):
        alone = to_float(images[sample : sample + 1], IMAGENET_MEAN, IMAGENET_STD)
        assert torch.equal(alone[0], together[sample])


def test_packed_arrays_come_out_as_they_went_in() -> None:
    arrays = {
        "flags": np.array([True, False, True]), "none": np.zeros((0, 3, 257), np.uint8),
        "doubles": np.linspace(0, 1, 5), "bytes": np.arange(7, dtype=np.uint8), "one": np.array(0.5, np.float32),
        "numbers": np.arange(6).reshape(2, 3)[:, ::-1],
    }  # fmt: skip
    copies: list[torch.Tensor] = []

    def copy(tensor: torch.Tensor) -> torch.Tensor:
        copies.append(tensor)
        return tensor.clone()

    there = pack(arrays).to_device(copy)
    assert len(copies) == 1
    for name, array in arrays.items():
        assert np.array_equal(there[name].numpy(), array)
        assert there[name].numpy().dtype == array.dtype


def test_on_a_cpu_nothing_is_copied() -> None:
    packed = pack({"numbers": np.arange(3)})
    there = packed.to_device(copy_to(torch.device("cpu")))["numbers"]
    assert there.untyped_storage().data_ptr() == packed.host_tensor.untyped_storage().data_ptr()
