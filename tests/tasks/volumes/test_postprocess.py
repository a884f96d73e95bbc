"""Cleaning a mask slab by slab gives what the libraries give on the whole mask."""

from __future__ import annotations

import cc3d
import numpy as np
import pytest
from scipy import ndimage

from stoker.core.errors import UserError
from stoker.tasks.volumes.predict.postprocess import (
    SLAB_VOXELS,
    ArrayPlanes,
    PostStep,
    apply_step,
    check_chain,
    parse_chain,
    post_processed,
    working_bytes,
)

SHAPE = (23, 30, 27)
SLABS = [1, SHAPE[1] * SHAPE[2] * 7, SLAB_VOXELS]


def masks() -> list[np.ndarray]:
    """From thin to almost full, with components that wind through many slabs."""
    found = []
    for seed, (blur, level) in enumerate([(0.0, 0.9), (0.8, 0.55), (1.2, 0.5), (0.0, 0.3), (2.0, 0.5)]):
        noise = np.random.default_rng(seed).random(SHAPE)
        noise = ndimage.gaussian_filter(noise, blur) if blur else noise
        found.append((noise > np.quantile(noise, level)).astype(np.uint8))
    spiral = np.zeros(SHAPE, np.uint8)
    spiral[:, 5, 5] = spiral[0, 5:20, 5] = spiral[:, 20, 5] = 1  # one component that meets only in the first plane
    return [*found, spiral, np.zeros(SHAPE, np.uint8), np.ones(SHAPE, np.uint8)]


def after(step: PostStep, mask: np.ndarray, slab_voxels: int) -> np.ndarray:
    target = ArrayPlanes(np.full_like(mask, 99))
    apply_step(step, ArrayPlanes(mask), target, slab_voxels)
    return target.array


@pytest.mark.parametrize("slab_voxels", SLABS)
def test_small_components_are_those_of_the_library(slab_voxels: int) -> None:
    classes = np.random.default_rng(0).integers(0, 4, SHAPE, np.uint8)  # different ones are not connected
    classes[np.random.default_rng(1).random(SHAPE) < 0.4] = 0
    for mask in (classes, *masks()):
        for smallest in (2, 20):
            wanted = cc3d.dust(mask, threshold=smallest, connectivity=26)
            assert np.array_equal(after(PostStep("remove_small", smallest), mask, slab_voxels), wanted)
    assert (classes != cc3d.dust(classes, threshold=2, connectivity=26)).any()


@pytest.mark.parametrize("slab_voxels", SLABS)
def test_holes_are_those_of_the_library(slab_voxels: int) -> None:
    filled = 0
    for mask in masks():
        wanted = ndimage.binary_fill_holes(mask).astype(np.uint8)
        assert np.array_equal(after(PostStep("fill_holes"), mask, slab_voxels), wanted)
        filled += int((wanted != mask).sum())
    assert filled > 0


@pytest.mark.parametrize(("slab_voxels", "radius"), [(1, 1), (SLABS[1], 2), (SLAB_VOXELS, 1)])
def test_closing_is_that_of_the_library_with_background_all_around(slab_voxels: int, radius: int) -> None:
    z, y, x = np.ogrid[-radius : radius + 1, -radius : radius + 1, -radius : radius + 1]
    ball = z**2 + y**2 + x**2 <= radius**2
    for mask in masks():
        wanted = ndimage.binary_closing(np.pad(mask, 2 * radius), ball)[(slice(2 * radius, -2 * radius),) * 3]
        found = after(PostStep("closing", radius), mask, slab_voxels)
        assert np.array_equal(found, wanted)
        assert (found >= mask).all()


def test_steps_are_applied_in_their_order() -> None:
    mask = masks()[2]
    chain = parse_chain(" remove_small=30, fill_holes,closing=1 ")
    assert [str(step) for step in chain] == ["remove_small=30", "fill_holes", "closing=1"]
    wanted = mask
    for step in chain:
        wanted = after(step, wanted, SLAB_VOXELS)
    before = mask.copy()
    assert np.array_equal(post_processed(mask, chain), wanted)
    assert np.array_equal(mask, before)
    assert parse_chain("") == ()


def test_a_chain_that_cannot_be_meant_is_refused() -> None:
    for text in ("remove_smal=3", "remove_small", "remove_small=0", "remove_small=-1", "fill_holes=2", "closing=9"):
        with pytest.raises(UserError):
            parse_chain(text)
    check_chain(parse_chain("remove_small=3"), classes=5)
    with pytest.raises(UserError, match="5 classes"):
        check_chain(parse_chain("closing=1"), classes=5)


def test_memory_does_not_grow_with_the_depth() -> None:
    chain = parse_chain("remove_small=100,fill_holes,closing=1")
    assert working_bytes((1024, 512, 512), chain) == working_bytes((8192, 512, 512), chain) < 300e6
    assert working_bytes((1024, 512, 512), ()) == 0
