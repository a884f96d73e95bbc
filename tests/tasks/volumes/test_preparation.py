"""What packing does to voxels: equal to scipy and torch, and the same in whatever pieces it is computed."""

from __future__ import annotations

from pathlib import Path

import nibabel
import numpy as np
import pytest
import torch
from scipy.ndimage import median_filter

from stoker.core.errors import UsageError
from stoker.io.stores import ReadFailure
from stoker.tasks.volumes.formats.opening import VolumeRef, open_volume
from stoker.tasks.volumes.formats.volume import ArrayVolume, Region, Voxels, whole
from stoker.tasks.volumes.pack.preprocessing import (
    VoxelChanges,
    parse_changes,
    parse_clip,
    percentiles,
    prepare_image,
    prepare_label,
)

RANDOM = np.random.default_rng(0)
BYTES = RANDOM.integers(0, 255, (13, 18, 21), dtype=np.uint8)
BOX = Region((2, 3, 0), (9, 11, 10))


def prepared(voxels: Voxels, preparation: VoxelChanges, region: Region | None = None) -> Voxels:
    found = prepare_image(ArrayVolume("a", voxels), preparation)
    return found.read(region or whole(found.shape))


@pytest.mark.parametrize(("kind", "size"), [("uint8", 3), ("int16", 3), ("float32", 5)])
def test_the_median_is_scipys(kind: str, size: int) -> None:
    voxels = BYTES.astype(kind) - (100 if kind == "int16" else 0)
    found = prepared(voxels, VoxelChanges(median=size))
    assert found.dtype == voxels.dtype
    np.testing.assert_array_equal(found, median_filter(voxels, size))
    np.testing.assert_array_equal(prepared(voxels, VoxelChanges(median=size), BOX), found[BOX.slices])


@pytest.mark.parametrize("scale", [(1.0, 0.4, 1.7), (2.0, 2.0, 0.3)])
def test_resampling_is_the_same_in_any_pieces_and_keeps_what_is_constant(scale: tuple[float, float, float]) -> None:
    everything = VoxelChanges(clip=parse_clip("5%,200"), median=3, scale=scale)
    found = prepared(BYTES, everything)
    assert found.shape == tuple(round(size * factor) for size, factor in zip(BYTES.shape, scale, strict=True))
    half = Region((1, 2, 1), (found.shape[0], found.shape[1] - 1, found.shape[2] - 2))
    np.testing.assert_array_equal(prepared(BYTES, everything, half), found[half.slices])
    assert (prepared(np.full_like(BYTES, 77), VoxelChanges(scale=scale)) == 77).all()


def test_resampling_is_torchs_antialiased_one() -> None:
    voxels = RANDOM.random((6, 20, 30), np.float32)
    found = prepared(voxels, VoxelChanges(scale=(1, 0.5, 1.4)))
    expected = torch.nn.functional.interpolate(
        torch.from_numpy(voxels)[None], size=(10, 42), mode="bilinear", antialias=True, align_corners=False
    )[0]
    np.testing.assert_allclose(found, expected.numpy(), atol=2e-6)


def test_labels_keep_their_nearest_voxels() -> None:
    label = RANDOM.integers(0, 3, (8, 8, 8), dtype=np.uint8)
    found = prepare_label(ArrayVolume("l", label), VoxelChanges(scale=(0.5, 1, 2), median=3), np.dtype(np.uint8))
    np.testing.assert_array_equal(found.read(whole(found.shape)), np.repeat(label[1::2], 2, axis=2))


def test_a_clipped_range_becomes_bytes() -> None:
    voxels = np.array([-50, 0, 25, 100, 300], np.float32).reshape(1, 1, 5)
    found = prepared(voxels, VoxelChanges(clip=parse_clip("0,100"), dtype="uint8"))
    assert found.dtype == np.uint8
    assert found.reshape(-1).tolist() == [0, 0, 64, 255, 255]
    with pytest.raises(ReadFailure, match="--dtype uint8 needs --clip"):
        prepared(voxels, VoxelChanges(dtype="uint8"))


@pytest.mark.parametrize("kind", ["uint8", "float32"])
def test_percentiles_are_values_that_occur(kind: str) -> None:
    voxels = BYTES.astype(kind)
    expected = np.percentile(voxels, [1, 50, 99], method="lower")
    np.testing.assert_array_equal(percentiles(ArrayVolume("a", voxels), [1, 50, 99]), expected)


def test_nan_voxels_are_found_before_they_spread() -> None:
    voxels = BYTES.astype(np.float32)
    voxels[5, 5, 5] = np.nan
    with pytest.raises(ReadFailure, match="voxels read are NaN"):
        prepared(voxels, VoxelChanges(median=3))


def test_a_spacing_resamples_and_moves_the_affine(tmp_path: Path) -> None:
    affine = np.diag([0.5, 1.0, 2.0, 1.0])
    nibabel.save(nibabel.Nifti1Image(BYTES.transpose(2, 1, 0), affine), tmp_path / "a.nii")
    volume = open_volume(VolumeRef(str(tmp_path / "a.nii")))
    found = prepare_image(volume, VoxelChanges(spacing=(2.0, 2.0, 1.0)))
    assert found.shape == (13, 9, 10)
    assert found.affine is not None
    # The corner of the first voxel stays where it was.
    np.testing.assert_allclose(found.affine @ [-0.5, -0.5, -0.5, 1], affine @ [-0.5, -0.5, -0.5, 1])
    with pytest.raises(ReadFailure, match="use --scale"):
        prepared(BYTES, VoxelChanges(spacing=(1.0, 1.0, 1.0)))


def test_what_cannot_be_done_is_refused() -> None:
    for text in ("5", "1,2,3", "9,1", "99%,1%", "a,b", "0,101%"):
        with pytest.raises(UsageError, match="--clip"):
            parse_clip(text)
    for options in ({"median": 9}, {"scale": "0,1,1"}):
        with pytest.raises(UsageError):
            parse_changes(**options)
