"""Random crops and flips: torchvision's distribution, always inside the image, a pure function of the key."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torchvision.transforms import RandomResizedCrop

from stoker.loader.rng import sample_keys
from stoker.tasks.images.decode.crops import CropRange, draw_crops, draw_flips
from stoker.tasks.images.decode.headers import Box

DRAWS = 4000
SHAPES = [(500, 375), (375, 500), (224, 224), (1200, 300), (90, 1000), (7, 5)]
RANGES = [CropRange(), CropRange(scale=(0.35, 1.0)), CropRange(scale=(0.08, 0.2), aspect=(0.5, 1.5))]


def keys(count: int, epoch: int = 0) -> np.ndarray:
    return sample_keys(3, epoch, np.arange(count), np.zeros(count, np.int64))


def boxes(bounds: CropRange, width: int, height: int, count: int = DRAWS) -> np.ndarray:
    draws = draw_crops(keys(count), bounds)
    return np.array([draws.box(sample, width, height) for sample in range(count)], float)


def torchvision_boxes(bounds: CropRange, width: int, height: int) -> np.ndarray:
    image = torch.empty(3, height, width, dtype=torch.uint8)
    torch.manual_seed(0)
    get = RandomResizedCrop.get_params
    return np.array([get(image, list(bounds.scale), list(bounds.aspect)) for _ in range(DRAWS)], float)


def features(found: np.ndarray, width: int, height: int) -> dict[str, np.ndarray]:
    top, left, crop_height, crop_width = found.T
    return {
        "area": crop_height * crop_width / (width * height),
        "aspect": np.log(crop_width / crop_height),
        "width": crop_width / width,
        "height": crop_height / height,
        # Relative to the positions that a crop of its size could take; 0.5 if there is only one.
        "down": np.where(crop_height < height, top / np.maximum(1, height - crop_height), 0.5),
        "right": np.where(crop_width < width, left / np.maximum(1, width - crop_width), 0.5),
    }


@pytest.mark.parametrize("bounds", RANGES, ids=["default", "large", "small and oblong"])
@pytest.mark.parametrize(("width", "height"), SHAPES)
def test_crops_are_distributed_like_torchvisions(width: int, height: int, bounds: CropRange) -> None:
    ours = features(boxes(bounds, width, height), width, height)
    theirs = features(torchvision_boxes(bounds, width, height), width, height)
    for name, mine in ours.items():
        others = theirs[name]
        # Means within five standard errors, and a gap between the distributions that only one in 100,000 pairs of
        # samples from the same distribution would exceed (Kolmogorov-Smirnov).
        error = math.sqrt((mine.var() + others.var()) / DRAWS) + 1e-9
        assert abs(mine.mean() - others.mean()) < 5 * error, name
        values = np.unique(np.concatenate([mine, others]))
        gap = np.abs(
            np.searchsorted(np.sort(mine), values, "right") - np.searchsorted(np.sort(others), values, "right")
        ).max()
        assert gap / DRAWS < math.sqrt(-math.log(1e-5 / 2) / 2) * math.sqrt(2 / DRAWS), name


@pytest.mark.parametrize("bounds", RANGES, ids=["default", "large", "small and oblong"])
def test_area_and_aspect_keep_their_bounds(bounds: CropRange) -> None:
    found = features(boxes(bounds, 4000, 3000, 1000), 4000, 3000)
    # Sides are whole pixels: rounding changes them by up to half a pixel in a thousand.
    assert found["area"].min() > bounds.scale[0] * 0.998
    assert found["area"].max() < bounds.scale[1] * 1.002
    assert np.exp(found["aspect"].min()) > bounds.aspect[0] * 0.998
    assert np.exp(found["aspect"].max()) < bounds.aspect[1] * 1.002


@given(
    width=st.integers(1, 6000),
    height=st.integers(1, 6000),
    scale=st.tuples(st.floats(0.001, 1), st.floats(0.001, 1)).map(lambda pair: tuple(sorted(pair))),
    aspect=st.tuples(st.floats(0.05, 20), st.floats(0.05, 20)).map(lambda pair: tuple(sorted(pair))),
)
@settings(max_examples=50, deadline=None)
def test_a_crop_is_never_empty_and_never_outside(
    width: int, height: int, scale: tuple[float, float], aspect: tuple[float, float]
) -> None:
    for top, left, crop_height, crop_width in boxes(CropRange(scale, aspect), width, height, 5):
        assert crop_height >= 1
        assert crop_width >= 1
        assert top >= 0
        assert left >= 0
        assert top + crop_height <= height
        assert left + crop_width <= width


def test_images_that_no_try_fits_give_the_largest_centred_crop() -> None:
    assert draw_crops(keys(1), CropRange()).box(0, 1, 1) == Box(0, 0, 1, 1)
    assert draw_crops(keys(1), CropRange()).box(0, 1, 5000) == Box(2499, 0, 1, 1)
    assert draw_crops(keys(1), CropRange(scale=(1.0, 1.0))).box(0, 900, 300) == Box(0, 250, 300, 400)
    assert draw_crops(keys(1), CropRange(scale=(1.0, 1.0))).box(0, 300, 900) == Box(250, 0, 400, 300)


def test_flips_have_the_requested_rate_and_are_independent_of_crops() -> None:
    many = keys(20_000)
    flips = draw_flips(many, 0.3)
    assert abs(flips.mean() - 0.3) < 5 * math.sqrt(0.3 * 0.7 / 20_000)
    assert not draw_flips(many, 0.0).any()
    assert draw_flips(many, 1.0).all()
    first_area = draw_crops(many, CropRange()).area[:, 0]
    assert abs(np.corrcoef(flips, first_area)[0, 1]) < 5 / math.sqrt(20_000)
