"""Patches on the device: geometry and normalisation."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from scipy.ndimage import map_coordinates

from stoker.tasks.volumes.augment import VolumePrepare
from stoker.tasks.volumes.patches.patches import Transform, TransformRange
from tests.tasks.augment.patches import PATCH, batch_of, drawn, same

TURNED = TransformRange(flips=(0.5, 0.5, 0.5), turns=0.7)
ROTATED = TransformRange(flips=(0.5, 0.5, 0.5), turns=0.5, rotation=0.5, scaling=0.5)


def raw(cases: int = 64, channels: int = 1, **keys: Any) -> VolumePrepare:
    """Without normalisation."""
    return VolumePrepare("range", np.zeros((cases, channels)), np.ones((cases, channels)), **keys)


@pytest.mark.parametrize("image", ["uint8", "int8", "uint16", "int16", "uint32", "int32", "float16", "float32"])
def test_plain_patches_are_numpy_s_in_any_kind_of_voxels(image: str) -> None:
    batch = batch_of(drawn(12, TURNED), image=image, label="int16" if image == "int16" else "uint8", channels=2)
    inputs, labels = raw(channels=2).prepare(batch, same)
    assert labels.dtype == torch.int64
    for slot in range(len(batch)):
        region, label = batch.layout.parts(batch.images[slot].numpy(), batch.shapes[slot])
        order, reversed_ = batch.orders[slot], [axis for axis in range(3) if batch.flips[slot][axis]]
        expected = np.flip(region.transpose(0, *(order + 1)), [axis + 1 for axis in reversed_])
        np.testing.assert_array_equal(inputs[slot].numpy(), expected.astype(np.float32))
        np.testing.assert_array_equal(labels[slot].numpy(), np.flip(label.transpose(order), reversed_))


@pytest.mark.parametrize(
    ("patch", "image"), [(PATCH, "uint8"), ((1, 20, 24), "uint8"), ((40, 48, 44), "uint16")], ids=str
)
def test_rotated_and_scaled_patches_are_scipy_s(image: str, patch: tuple[int, int, int]) -> None:
    batch = batch_of(drawn(16, ROTATED, patch), patch=patch, image=image, channels=2)
    assert 0 < batch.plain.sum() < 16, "both kinds are needed"
    inputs, labels = raw(channels=2).prepare(batch, same)
    where = np.stack(np.meshgrid(*map(np.arange, patch), indexing="ij"))
    for slot in np.flatnonzero(~batch.plain):
        region, label = batch.layout.parts(batch.images[slot].numpy(), batch.shapes[slot])
        places = np.einsum("ij,j...->i...", batch.matrices[slot], where)
        places += batch.offsets[slot].reshape(3, 1, 1, 1)
        for channel in range(2):
            expected = map_coordinates(region[channel].astype(np.float64), places, order=1, mode="nearest")
            assert np.abs(inputs[slot, channel].numpy() - expected).max() < 0.02  # of 200 grey levels
        expected = map_coordinates(label, places, order=0, mode="nearest")
        # A point half-way between two voxels may go either way.
        half_way = (np.abs(places - np.floor(places) - 0.5) < 1e-4).any(axis=0)
        assert half_way.mean() < 0.2
        np.testing.assert_array_equal(labels[slot].numpy()[~half_way], expected[~half_way])


def test_voxels_are_normalised_by_their_volume_by_their_patch_or_by_the_range_of_their_type() -> None:
    batch = batch_of(drawn(3, ROTATED), channels=2)
    plain, _ = raw(channels=2).prepare(batch, same)
    means, stds = np.array([[1, 2], [3, 4], [5, 6]], np.float32), np.array([[2, 4], [8, 16], [32, 64]], np.float32)
    by_volume, _ = VolumePrepare("volume", means, stds).prepare(batch, same)
    expected = (plain - torch.from_numpy(means).view(3, 2, 1, 1, 1)) / torch.from_numpy(stds).view(3, 2, 1, 1, 1)
    assert torch.allclose(by_volume, expected, atol=1e-5)
    by_patch, _ = VolumePrepare("patch", means, stds).prepare(batch, same)
    assert torch.allclose(by_patch.mean((2, 3, 4)), torch.zeros(3, 2), atol=1e-5)
    assert torch.allclose(by_patch.std((2, 3, 4), correction=0), torch.ones(3, 2), atol=1e-5)
    batch.images.zero_()
    flat, _ = VolumePrepare("patch", means, stds).prepare(batch, same)
    assert torch.equal(flat, torch.zeros_like(flat))


@pytest.mark.parametrize(
    ("dtype", "memory_format"),
    [(torch.float32, torch.channels_last_3d), (torch.bfloat16, torch.contiguous_format)],
)
def test_inputs_have_the_precision_and_the_layout_of_the_network(dtype: Any, memory_format: Any) -> None:
    batch = batch_of(drawn(4, ROTATED), channels=2)
    full, _ = raw(channels=2).prepare(batch, same)
    inputs, _ = raw(channels=2, dtype=dtype, memory_format=memory_format).prepare(batch, same)
    assert inputs.dtype == dtype
    assert inputs.is_contiguous(memory_format=memory_format)
    assert torch.equal(inputs, full.to(dtype))


def test_rows_are_copied_as_far_as_they_are_filled() -> None:
    batch = batch_of([Transform(), Transform(scale=1.4)])
    copied: list[int] = []
    raw().prepare(batch, lambda row: copied.append(row.nbytes) or row)
    assert copied[0] == 2 * 10 * 12 * 14 < copied[1] <= batch.images.shape[1]
