"""Patches on the device: geometry, normalisation, and random changes of the voxels: the same for a key wherever it is,
alike for image and label, as often and as strong as stated, and without waiting for the device."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from scipy.ndimage import gaussian_filter, map_coordinates
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from stoker.config import load_config
from stoker.loader.rng import sample_keys
from stoker.tasks.device_copies import copy_to
from stoker.tasks.volumes import intensity
from stoker.tasks.volumes.augment import (
    VolumePrepare,
    build_volume_augment,
    build_volume_eval,
    draw_deformation,
    transform_range,
)
from stoker.tasks.volumes.formats.volume import Shape
from stoker.tasks.volumes.intensity import Chances, Changes, blur_arrays, change_voxels, draw_changes, normals
from stoker.tasks.volumes.patches.patch_collate import PatchBatch, RowLayout
from stoker.tasks.volumes.patches.patches import MOST_DISPLACED, Transform, TransformRange, draw_transforms
from tests.support.operators import counted

PATCH = (10, 12, 14)
TURNED = TransformRange(flips=(0.5, 0.5, 0.5), turns=0.7)
ROTATED = TransformRange(flips=(0.5, 0.5, 0.5), turns=0.5, rotation=0.5, scaling=0.5)
OFTEN = Chances(noise=0.5, blur=0.5, brightness=0.5, contrast=0.5, low_resolution=0.5, gamma=0.5, cutout=0.5)
ANYHOW = TransformRange(
    flips=(0.5, 0.5, 0.5), turns=0.5, rotation=0.3, scaling=0.3, elastic=0.3, elastic_size=0.8, most_read=9
)


def keys_for(samples: int) -> Any:
    return sample_keys(0, 0, np.arange(samples), np.zeros(samples, np.int64))


def batch_of(
    transforms: list[Transform], *, patch: Shape = PATCH, image: str = "uint8", label: str = "uint8", channels: int = 1
) -> PatchBatch:
    """A batch as a loader would make it, whose regions are random."""
    samples, start = len(transforms), (3, 4, 5)
    keys = keys_for(samples)
    regions = [transform.region(patch, start) for transform in transforms]
    layout = RowLayout(channels, image, label, max(region.voxels for region in regions))
    rows = np.zeros((samples, layout.row_bytes), np.uint8)
    for row, region, key in zip(rows, regions, keys, strict=True):
        random = np.random.default_rng(int(key))
        image_part, label_part = layout.parts(row, region.shape)
        image_part[...] = random.integers(0, 200, image_part.shape)
        label_part[...] = random.integers(0, 3, label_part.shape)
    return PatchBatch(
        images=torch.from_numpy(rows), layout=layout, patch=patch,
        shapes=np.array([region.shape for region in regions]),
        orders=np.array([one.order for one in transforms]), flips=np.array([one.flips for one in transforms]),
        plain=np.array([one.is_plain for one in transforms]), matrices=np.array([one.matrix for one in transforms]),
        offsets=np.array([one.offset(patch, start, region) for one, region in zip(transforms, regions, strict=True)]),
        elastic=np.array([one.elastic for one in transforms]),
        cases=np.arange(samples), starts=np.tile(start, (samples, 1)), valid=np.ones(samples, bool), keys=keys,
        epoch=0, step=0, next_position=samples,
    )  # fmt: skip


def part_of(batch: PatchBatch, slots: list[int]) -> PatchBatch:
    """The same samples in another batch."""
    rows = {name: value[slots] for name, value in vars(batch).items() if isinstance(value, np.ndarray | Tensor)}
    return replace(batch, **rows)


def drawn(samples: int, bounds: TransformRange, patch: Shape = PATCH) -> list[Transform]:
    return draw_transforms(keys_for(samples), bounds, patch)


def same(tensor: Tensor) -> Tensor:
    """The copy to a device that is the host."""
    return tensor


def raw(channels: int = 1, **keys: Any) -> VolumePrepare:
    """Without normalisation."""
    return VolumePrepare("range", np.zeros((64, channels)), np.ones((64, channels)), **keys)


def augment(chances: Chances, normalize: Any = "volume", channels: int = 1) -> VolumePrepare:
    means, stds = np.full((64, channels), 100, np.float32), np.full((64, channels), 60, np.float32)
    return VolumePrepare(normalize, means, stds, chances=chances)


def changed(voxels: Tensor, changes: Changes, key: int = 1, **keys: Any) -> Tensor:
    """A copy of the voxels (z, y, x), changed."""
    copy = voxels.clone()[None]
    arrays = blur_arrays(changes, (voxels.shape[0], voxels.shape[1], voxels.shape[2]))
    there = {name: torch.from_numpy(array) for name, array in arrays.items()}
    change_voxels(copy, changes, key, there, **{"unit_deviation": True, **keys})
    return copy[0]


def some_voxels(shape: tuple[int, int, int] = (9, 11, 13)) -> Tensor:
    return torch.from_numpy(np.random.default_rng(3).normal(0.2, 1.1, shape).astype(np.float32))


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


def test_a_key_has_the_same_result_in_any_batch_at_any_place() -> None:
    batch = batch_of(drawn(16, ANYHOW), channels=2)
    ours = augment(OFTEN, channels=2)
    before = torch.random.get_rng_state()
    inputs, labels = ours.prepare(batch, same)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert 0 < batch.plain.sum() < 10
    assert (batch.elastic > 0).sum() > 2, "every kind is needed"
    for slots in ([7], [3, 0], [*range(15, -1, -1)]):
        again, labels_again = ours.prepare(part_of(batch, slots), same)
        assert torch.equal(again, inputs[slots])
        assert torch.equal(labels_again, labels[slots])
    batch.keys = batch.keys + np.uint64(1)
    others, _ = ours.prepare(batch, same)
    assert not any(torch.equal(a, b) for a, b in zip(inputs, others, strict=True))


def test_image_and_label_are_transformed_alike() -> None:
    patch = (24, 26, 28)
    batch = batch_of(drawn(12, ANYHOW, patch), patch=patch)
    for slot in range(len(batch)):
        # Blocks of two labels, used as the image too.
        image, label = batch.region(slot)
        z, y, x = np.indices(batch.shapes[slot].tolist())
        label[...] = torch.from_numpy(((z // 6 + y // 7 + x // 5) % 2).astype(np.uint8))
        image[0] = label
    means, stds = np.zeros((12, 1), np.float32), np.ones((12, 1), np.float32)
    inputs, labels = VolumePrepare("volume", means, stds).prepare(batch, same)
    # Where all voxels around a point agree, interpolation returns their value, and it is the nearest one's.
    sure = (inputs[:, 0] == 0) | (inputs[:, 0] == 1)
    assert float(sure.float().mean()) > 0.4
    assert torch.equal(inputs[:, 0][sure].long(), labels[sure])
    # Between them the nearest voxel has the largest weight, an eighth at least.
    close = torch.where(labels == 1, inputs[:, 0], 1 - inputs[:, 0])
    assert float(close.min()) > 0.12


def test_a_deformed_patch_is_scipy_s_at_the_displaced_points() -> None:
    patch = (30, 34, 38)
    batch = batch_of([Transform(elastic=2.0), Transform(scale=1.1, elastic=2.0)], patch=patch)
    inputs, labels = augment(Chances()).prepare(batch, same)
    for slot in range(2):
        points, weights = draw_deformation(int(batch.keys[slot]), patch, 2.0)
        moved = np.einsum("kabc,za,yb,xc->kzyx", points.astype(np.float64), *weights)
        moved = np.clip(moved, -MOST_DISPLACED * 2, MOST_DISPLACED * 2)
        where = np.stack(np.meshgrid(*map(np.arange, patch), indexing="ij"))
        places = np.einsum("ij,j...->i...", batch.matrices[slot], where) + moved
        places += batch.offsets[slot].reshape(3, 1, 1, 1)
        image, label = batch.region(slot)
        expected = (map_coordinates(image[0].numpy().astype(np.float64), places, order=1, mode="nearest") - 100) / 60
        assert np.abs(inputs[slot, 0].numpy() - expected).max() < 1e-3
        sure = (np.abs(places - np.floor(places) - 0.5) > 1e-3).all(axis=0)
        nearest = map_coordinates(label.numpy(), places, order=0, mode="nearest")
        np.testing.assert_array_equal(labels[slot].numpy()[sure], nearest[sure])


def test_deformations_have_the_stated_size_and_never_fold() -> None:
    patch, size = (40, 64, 72), 3.0
    squares, smallest = [], np.inf
    for key in keys_for(30).tolist():
        points, weights = draw_deformation(key, patch, size)
        moved = np.einsum("kabc,za,yb,xc->kzyx", points, *weights, optimize=True)
        squares.append(np.square(moved).mean())
        jacobian = np.stack([np.stack(np.gradient(one)) for one in moved]) + np.eye(3).reshape(3, 3, 1, 1, 1)
        smallest = min(smallest, float(np.linalg.det(np.moveaxis(jacobian, (0, 1), (-2, -1))[::4, ::4, ::4]).min()))
    assert np.sqrt(np.mean(squares)) == pytest.approx(size, rel=0.05)
    assert smallest > 0


CASES = {
    "noise": (intensity.NOISE_STD, lambda one: one.noise),
    "blur": (intensity.BLUR_SIGMA, lambda one: None if one.blur is None else sum(one.blur, ())),
    "brightness": (intensity.BRIGHTNESS_FACTOR, lambda one: one.brightness),
    "contrast": (intensity.CONTRAST_FACTOR, lambda one: one.contrast),
    "low_resolution": (intensity.KEPT_RESOLUTION, lambda one: one.low_resolution),
    "gamma": (intensity.GAMMA_POWER, lambda one: one.gamma),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("chance", [0.15, 1.0])
def test_each_change_is_as_frequent_and_as_strong_as_stated(name: str, chance: float) -> None:
    (low, high), strengths_of = CASES[name]
    samples = 2000
    changes = draw_changes(keys_for(samples), Chances(**{name: chance}), 2, PATCH)
    found = [strengths_of(one) for one in changes if strengths_of(one) is not None]
    assert len(found) == pytest.approx(chance * samples, abs=4 * np.sqrt(samples * chance * (1 - chance)))
    others = [strengths_of for other, (_, strengths_of) in CASES.items() if other != name]
    assert all(strengths_of(one) is None for one in changes[:200] for strengths_of in others)
    strengths = np.array(found)
    assert low <= strengths.min() < low + 0.05 * (high - low)
    assert high >= strengths.max() > high - 0.05 * (high - low)
    assert abs(np.corrcoef(strengths[:, 0], strengths[:, 1])[0, 1]) < 0.2, "channels have their own"
    if low < 1 < high:
        assert (strengths < 1).mean() == pytest.approx(0.5, abs=0.06)
    if name == "gamma":
        inverted = np.mean([one.inverted for one in changes if one.gamma is not None])
        assert inverted == pytest.approx(1 / 3, abs=0.08)


def test_changes_are_independent_of_each_other() -> None:
    changes = draw_changes(keys_for(4000), OFTEN, 1, PATCH)
    happened = np.array([[getattr(one, name) is not None for name in vars(Chances())] for one in changes], float)
    correlations = np.corrcoef(happened.T) - np.eye(happened.shape[1])
    assert np.abs(correlations).max() < 0.08


def test_noise_is_normal_and_its_own_for_every_key_and_channel() -> None:
    numbers = torch.stack([normals(100_001, key, torch.device("cpu")) for key in (1, 2, 2**32 + 1, 2**63 + 5)])
    assert torch.allclose(numbers.mean(1), torch.zeros(4), atol=0.015)
    assert torch.allclose(numbers.std(1), torch.ones(4), atol=0.015)
    assert torch.allclose(numbers.pow(4).mean(1), torch.full((4,), 3.0), atol=0.15)
    assert float((numbers.abs() > 1.96).float().mean()) == pytest.approx(0.05, abs=0.003)
    neighbours = [torch.stack([one[:-lag], one[lag:]]) for one in numbers for lag in (1, 2, 128, 50_000)]
    together = [*neighbours, numbers]
    assert all(float((torch.corrcoef(pair) - torch.eye(len(pair))).abs().max()) < 0.02 for pair in together)
    flat = torch.zeros(2, 20, 20, 20)
    change_voxels(flat, Changes(noise=(0.05, 0.1)), 9, {}, unit_deviation=True)
    assert flat.std((1, 2, 3)).tolist() == pytest.approx([0.05, 0.1], rel=0.05)
    assert abs(float(torch.corrcoef(flat.flatten(1))[0, 1])) < 0.05


def test_noise_follows_the_image_where_its_deviation_is_not_one() -> None:
    voxels = some_voxels((20, 20, 20)) * 0.1
    noise = changed(voxels, Changes(noise=(0.5,)), unit_deviation=False) - voxels
    assert float(noise.std()) == pytest.approx(0.5 * float(voxels.std()), rel=0.05)


def test_a_blur_is_scipy_s() -> None:
    for shape in ((9, 11, 13), (1, 5, 30), (2, 3, 4)):
        voxels, sigmas = some_voxels(shape), (0.5, 0.75, 1.0)
        # The same number of weights on each side as ours.
        expected = gaussian_filter(voxels.numpy(), sigmas, mode="mirror", radius=(2, 3, 4))
        np.testing.assert_allclose(changed(voxels, Changes(blur=(sigmas,))).numpy(), expected, atol=1e-5)


def test_brightness_contrast_and_gamma_follow_their_formulas() -> None:
    voxels = some_voxels()
    array = voxels.numpy().astype(np.float64)
    np.testing.assert_allclose(changed(voxels, Changes(brightness=(1.2,))), array * 1.2, atol=1e-5)
    contrasted = (array - array.mean()) * 1.25 + array.mean()
    contrasted = np.clip(contrasted, array.min(), array.max())
    np.testing.assert_allclose(changed(voxels, Changes(contrast=(1.25,))), contrasted, atol=1e-5)
    for sign, inverted in ((1, False), (-1, True)):
        source = sign * array
        powers = ((source - source.min()) / np.ptp(source)) ** 1.4
        powers = (powers - powers.mean()) / powers.std() * source.std() + source.mean()
        found = changed(voxels, Changes(gamma=(1.4,), inverted=inverted))
        np.testing.assert_allclose(found, sign * powers, atol=1e-4)


def test_a_flat_image_stays_as_it_is() -> None:
    flat = torch.full((4, 5, 6), 0.3)
    for changes in (Changes(contrast=(0.8,)), Changes(gamma=(1.4,)), Changes(gamma=(0.8,), inverted=True)):
        assert torch.allclose(changed(flat, changes), flat, atol=1e-6)


def test_a_low_resolution_keeps_some_voxels_and_interpolates_the_others() -> None:
    line = torch.arange(16.0).view(1, 1, 16).expand(4, 4, 16).contiguous()
    found = changed(line, Changes(low_resolution=(0.5,)))
    # Every second voxel (nearest to the middle of two), then linear between them: a ramp stays one, but for its ends.
    assert torch.allclose(found[:, :, 1:-1], line[:, :, 1:-1] + 0.5, atol=1e-5)
    noise = some_voxels((16, 16, 16))
    assert float(changed(noise, Changes(low_resolution=(0.5,))).std()) < 0.7 * float(noise.std())
    assert torch.allclose(changed(noise, Changes(low_resolution=(1.0,))), noise, atol=1e-5)


def test_a_box_is_cut_out_of_the_image_but_not_of_the_labels() -> None:
    batch = batch_of(drawn(30, TransformRange()))
    full, labels = augment(Chances()).prepare(batch, same)
    cut, labels_too = augment(Chances(cutout=1.0)).prepare(batch, same)
    assert torch.equal(labels, labels_too)
    boxes = [one.cutout for one in draw_changes(batch.keys, Chances(cutout=1.0), 1, PATCH)]
    for before, after, box in zip(full[:, 0], cut[:, 0], boxes, strict=True):
        assert box is not None
        assert torch.allclose(after[box.slices], before.mean(), atol=1e-5)
        assert all(1 <= side <= round(length / 3) for side, length in zip(box.shape, PATCH, strict=True))
        outside = torch.ones(PATCH, dtype=torch.bool)
        outside[box.slices] = False
        assert torch.equal(after[outside], before[outside])
    assert len(set(boxes)) > 25


def test_the_config_says_how_often() -> None:
    keys = ["task=segment3d", "patch_size=[10,12,14]", "volume_noise=1", "volume_elastic=0.5", "volume_elastic_size=2"]
    config = load_config(None, keys).config
    ones = np.ones((1, 1), np.float32)
    ours = build_volume_augment(config, ones, ones, torch.bfloat16)
    expected = Chances(noise=1, blur=0.2, brightness=0.15, contrast=0.15, low_resolution=0.25, gamma=0.3, cutout=0)
    assert ours.chances == expected
    assert ours.dtype == torch.bfloat16
    bounds = transform_range(config)
    assert (bounds.rotation, bounds.scaling, bounds.elastic, bounds.elastic_size) == (0.2, 0.2, 0.5, 2)
    batch = batch_of([Transform()])
    plain, _ = build_volume_eval(config, ones, ones).prepare(batch, same)
    assert torch.equal(plain, batch.region(0)[0].float()[None] - 1)
    assert not torch.equal(ours.prepare(batch, same)[0].float(), plain)


def test_the_host_never_waits_for_the_device() -> None:
    batch = batch_of(drawn(6, ANYHOW), channels=2)
    with FakeTensorMode(allow_non_fake_inputs=True), counted() as operators:
        for normalize in ("volume", "patch", "range"):
            ours = augment(OFTEN, normalize, channels=2)
            inputs, labels = ours.prepare(batch, copy_to(torch.device("cuda")))
            assert inputs.device.type == labels.device.type == "cuda"
    assert operators.blocking == []
    assert operators.copies == 3 * (6 + 1), "the rows, and everything else about the batch at once"
    # A plain sample takes a handful of kernels.
    with FakeTensorMode(allow_non_fake_inputs=True), counted() as operators:
        augment(Chances()).prepare(batch_of([Transform()] * 4), copy_to(torch.device("cuda")))
    assert operators.kernels <= 4 * 4
