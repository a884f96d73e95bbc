"""Patches: pure functions of their position, over labelled voxels, and never more read than they need."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.ndimage import map_coordinates

from stoker.core.errors import UserError
from stoker.tasks.demo import scroll_volume
from stoker.tasks.volumes.formats.volume import ArrayVolume, Shape, read_padded
from stoker.tasks.volumes.patches.label_index import LabelIndex, map_labels
from stoker.tasks.volumes.patches.labels import LabelRules
from stoker.tasks.volumes.patches.patches import (
    Placement,
    RandomPatches,
    Transform,
    TransformRange,
    check_patch_fits,
    draw_transforms,
    grid_starts,
    training_steps,
)

RULES = LabelRules(2, ignore=2)
PATCH = (8, 12, 14)
SHAPES: tuple[Shape, ...] = ((24, 30, 28), (20, 20, 40), (8, 16, 15))
EVERYTHING = TransformRange(flips=(0.5, 0.5, 0.5), turns=0.5, rotation=0.4, scaling=0.4, elastic=0.4, elastic_size=1.5)


@pytest.fixture(scope="module")
def labels() -> list[Any]:
    return [scroll_volume(shape, seed)[1] for seed, shape in enumerate(SHAPES)]


@pytest.fixture(scope="module")
def index(labels: list[Any]) -> LabelIndex:
    maps = [map_labels("c", ArrayVolume("x", label), RULES) for label in labels]
    return LabelIndex(maps, np.stack([one.counts for one in maps]))


def placed(patches: RandomPatches, epoch: int, positions: Any) -> list[Placement]:
    positions = np.asarray(positions)
    return patches.place(patches.cases(epoch, positions), patches.keys(epoch, positions), positions)


def test_a_patch_follows_from_seed_epoch_and_position_alone(index: LabelIndex) -> None:
    patches = RandomPatches(PATCH, SHAPES, index, seed=3, transforms=EVERYTHING)
    together = placed(patches, 5, np.arange(100))
    assert [placed(patches, 5, [position])[0] for position in range(100)] == together
    assert placed(patches, 6, np.arange(100)) != together
    assert placed(replace(patches, seed=4), 5, range(100)) != together


@pytest.mark.parametrize("transforms", [TransformRange(), EVERYTHING], ids=["plain", "everything"])
def test_a_patch_is_drawn_for_a_labelled_voxel_and_contains_it(
    transforms: TransformRange, labels: list[Any], index: LabelIndex
) -> None:
    patches = RandomPatches(PATCH, SHAPES, index, transforms=transforms)
    for one in placed(patches, 0, np.arange(200)):
        assert one.voxel is not None
        assert labels[one.case][one.voxel] != 2
        # The voxel's place in the patch, by the inverse of what the device resamples with.
        offset = one.transform.offset(PATCH, one.start, one.region)
        place = np.linalg.solve(one.transform.matrix, np.array(one.voxel) - np.array(one.region.start) - offset)
        assert (place > -0.51).all()
        assert (place < np.array(PATCH) - 0.49).all()
        # So no patch is without a label.
        label = np.empty(one.region.shape, np.uint8)
        read_padded(ArrayVolume("x", labels[one.case]), one.region, label, 2)
        assert (label != 2).any()


def test_foreground_is_drawn_as_often_as_asked(labels: list[Any], index: LabelIndex) -> None:
    for share in (0.0, 0.5, 1.0):
        drawn = placed(RandomPatches(PATCH, SHAPES, index, foreground=share), 0, np.arange(2000))
        found = np.mean([labels[one.case][one.voxel] == 1 for one in drawn])
        natural = np.mean([(label == 1).sum() / (label != 2).sum() for label in labels])
        assert found == pytest.approx(share + (1 - share) * natural, abs=0.04)


def test_cases_take_turns(index: LabelIndex) -> None:
    cases = RandomPatches(PATCH, SHAPES, index).cases(0, np.arange(300)).reshape(-1, 3)
    assert (np.sort(cases, axis=1) == [0, 1, 2]).all()
    assert len({tuple(turn) for turn in cases.tolist()}) == 6


def test_an_unrotated_patch_reads_its_own_voxels_and_stays_inside(index: LabelIndex) -> None:
    flips, big = TransformRange(flips=(0.5, 0.5, 0.5), turns=0.5), SHAPES[:2]
    for one in placed(RandomPatches(PATCH, big, index.chosen([0, 1]), transforms=flips), 0, np.arange(300)):
        assert one.region.voxels == 8 * 12 * 14
        assert one.region.within(big[one.case]) == one.region
        assert sorted(one.region.shape) == sorted(PATCH)


def test_most_patches_of_the_usual_recipe_read_their_own_size() -> None:
    recipe = TransformRange(flips=(0.5, 0.5, 0.5), rotation=0.2, scaling=0.2)
    drawn = draw_transforms(np.arange(10_000, dtype=np.uint64), recipe, (72, 136, 136))
    read = np.array([one.region((72, 136, 136), (0, 0, 0)).voxels for one in drawn]) / (72 * 136 * 136)
    assert np.mean(read == 1) == pytest.approx(0.64, abs=0.01)
    assert read.max() <= recipe.most_read
    assert read.mean() < 2


@st.composite
def transforms(draw: st.DrawFn) -> Transform:
    order = draw(st.permutations([0, 1, 2]))
    angle, flip = st.floats(-1.0, 1.0), st.booleans()
    return Transform(
        (order[0], order[1], order[2]), (draw(flip), draw(flip), draw(flip)), (draw(angle), draw(angle), draw(angle)),
        draw(st.floats(0.5, 1.5)),
    )  # fmt: skip


@given(transform=transforms(), patch=st.tuples(*[st.integers(1, 9)] * 3), start=st.tuples(*[st.integers(-4, 12)] * 3))
@settings(max_examples=25, deadline=None)
def test_the_region_of_a_rotated_patch_is_all_that_resampling_needs(
    transform: Transform, patch: Shape, start: Shape
) -> None:
    volume = ArrayVolume("x", np.random.default_rng(0).normal(size=(17, 19, 23)).astype(np.float32))
    region = transform.region(patch, start)
    part = np.empty(region.shape, np.float32)
    read_padded(volume, region, part, 0)
    grid = np.stack(np.meshgrid(*map(np.arange, patch), indexing="ij")).reshape(3, -1)
    in_region = transform.offset(patch, start, region)[:, None] + transform.matrix @ grid
    # Interpolated from the region, the patch is what it would be from a volume padded without end.
    far = 40
    endless = np.pad(volume.array, far)
    in_volume = in_region + np.array(region.start)[:, None]
    expected = map_coordinates(endless, in_volume + far, order=1)
    assert np.allclose(map_coordinates(part, in_region, order=1, mode="nearest"), expected, atol=1e-4)


@pytest.mark.parametrize("order", [(0, 1, 2), (1, 2, 0), (2, 1, 0)])
@pytest.mark.parametrize("flips", [(False, False, False), (True, False, True)])
def test_swapping_and_flipping_is_the_transform_of_a_plain_patch(order: Any, flips: Any) -> None:
    transform = Transform(order, flips)
    source = np.random.default_rng(0).integers(0, 99, (20, 21, 22))
    region = transform.region(PATCH, (2, 3, 1))
    part = source[region.slices]
    patch = np.flip(part.transpose(order), [axis for axis in range(3) if flips[axis]])
    assert patch.shape == PATCH
    offset = transform.offset(PATCH, (2, 3, 1), region)
    for place in itertools.product((0, PATCH[0] - 1), (0, 5), (0, PATCH[2] - 1)):
        at = offset + transform.matrix @ np.array(place)
        assert patch[place] == part[tuple(np.round(at).astype(int))]
        assert np.allclose(at, np.round(at))


@given(size=st.integers(1, 200), length=st.integers(1, 80), overlap=st.floats(0, 0.9))
@settings(max_examples=50, deadline=None)
def test_a_grid_leaves_no_voxel_out(size: int, length: int, overlap: float) -> None:
    starts = grid_starts(size, length, overlap)
    covered = np.zeros(size, bool)
    for start in starts:
        covered[max(0, start) : start + length] = True
        assert size <= length or (start >= 0 and start + length <= size)
    assert covered.all()
    assert starts == sorted(set(starts))
    if len(starts) > 1:
        assert max(np.diff(starts)) <= max(1, length * (1 - overlap)) + 1


def test_ranks_share_the_patches_of_a_step_and_an_epoch_has_as_many_updates_as_asked(index: LabelIndex) -> None:
    for batch, accumulate, world in ((1, 1, 1), (2, 4, 1), (3, 2, 5)):
        assert training_steps(250, batch, accumulate=accumulate, world=world).count() == 250 * accumulate
    patches = RandomPatches(PATCH, SHAPES, index, transforms=EVERYTHING)
    alone = training_steps(10, 6)
    for step in range(10):
        together = [None] * 6
        for rank in range(3):
            shared = training_steps(10, 2, world=3, rank=rank)
            together[rank::3] = placed(patches, 1, shared.positions(step))  # type: ignore[call-overload]
        assert together == placed(patches, 1, alone.positions(step))


def test_a_patch_larger_than_a_volume_is_refused_or_padded(index: LabelIndex) -> None:
    with pytest.raises(UserError) as caught:
        check_patch_fits((12, 12, 12), SHAPES, ["a", "b", "c"], "refuse")
    assert caught.value.name == "patch-larger-than-volume"
    assert "c is 8 x 16 x 15" in str(caught.value)
    assert "8 x 12 x 12" in str(caught.value.hint)
    with pytest.raises(UserError) as caught:
        check_patch_fits((12, 12, 12), [(30, 40, 3)], ["d"], "refuse")
    assert "colours" in str(caught.value.why)
    check_patch_fits((12, 12, 12), SHAPES, ["a", "b", "c"], "pad")
    patches = RandomPatches((12, 12, 12), SHAPES, index)
    small = [one for one in placed(patches, 0, np.arange(60)) if one.case == 2]
    for one in small:
        # The whole depth of the volume, in the middle.
        assert (one.region.start[0], one.region.stop[0]) == (-2, 10)
        assert one.region.within(SHAPES[2]).shape == (8, 12, 12)
