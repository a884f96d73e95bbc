"""Each operation compared with Pillow's, through timm's own functions, on the same images and arguments."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image
from timm.data import auto_augment as timm_ops
from torch import Tensor

from stoker.tasks.images.augment import operations as ops
from stoker.tasks.images.augment.operations import Op
from stoker.tasks.images.augment.policies import Layer
from tests.tasks.augment.images import HEIGHT, WIDTH, apply_layers, some_batch, some_images

FILL = (124, 116, 104)
FACTORS = np.array([0.0, 0.1, 0.37, 0.5, 0.999, 1.0, 1.001, 1.5, 1.9, 1.99])
COUNT = len(FACTORS)


def with_pillow(change: Callable[..., Image.Image], images: NDArray[np.uint8], arguments: list[tuple]) -> NDArray:
    """timm's result for each image with its own argument."""
    changed = [change(Image.fromarray(image), *given) for image, given in zip(images, arguments, strict=True)]
    return np.stack([np.asarray(image) for image in changed]).astype(np.int64)


def difference(ours: Tensor, theirs: NDArray) -> NDArray:
    assert ours.dtype == torch.uint8
    return np.abs(ours.numpy().astype(np.int64) - theirs)


def changed_by(op: Op, images: Tensor, arguments: NDArray[np.float64] | None = None) -> Tensor:
    given = np.zeros(len(images)) if arguments is None else arguments
    return apply_layers([Layer(np.full(len(images), op), given)], images, FILL)


@pytest.mark.parametrize(
    ("op", "change", "arguments"),
    [
        (Op.POSTERIZE, timm_ops.posterize, [1, 2, 3, 4, 5, 6, 7, 8]),
        (Op.SOLARIZE, timm_ops.solarize, [0, 1, 77, 128, 255, 256]),
        (Op.SOLARIZE_ADD, timm_ops.solarize_add, [0, 1, 55, 110, 128]),
        (Op.BRIGHTNESS, timm_ops.brightness, FACTORS.tolist()),
        (Op.INVERT, lambda image, _: timm_ops.invert(image), [0, 0, 0]),
    ],
    ids=["posterize", "solarize", "solarize_add", "brightness", "invert"],
)
def test_table_operations_are_exactly_pillows(op, change, arguments) -> None:
    theirs = with_pillow(change, some_images(len(arguments)), [(value,) for value in arguments])
    ours = changed_by(op, some_batch(len(arguments)), np.array(arguments, np.float64))
    assert difference(ours, theirs).max() == 0


def test_posterize_to_no_bits_is_black() -> None:
    # What timm requests at full magnitude; Pillow 13 refuses it, older versions returned black.
    assert changed_by(Op.POSTERIZE, some_batch(2)).max() == 0


@pytest.mark.parametrize("size", [(HEIGHT, WIDTH), (5, 7), (1, 1)])
@pytest.mark.parametrize(
    ("op", "change"),
    [(Op.EQUALIZE, timm_ops.equalize), (Op.AUTO_CONTRAST, timm_ops.auto_contrast)],
    ids=["equalize", "autocontrast"],
)
def test_histogram_operations_are_exactly_pillows(op, change, size) -> None:
    # Flat images, few pixels (no whole step between levels) and narrow ranges are the edge cases of the formulas.
    images = some_images(12, *size)
    images[3:6] = 100 + images[3:6] // 16
    images[6, ..., 1] = 255
    theirs = with_pillow(change, images, [()] * len(images))
    assert difference(changed_by(op, torch.from_numpy(images)), theirs).max() == 0


def test_autocontrast_is_exact_for_every_pair_of_darkest_and_brightest_level() -> None:
    pairs = [(low, high) for low in range(0, 256, 5) for high in range(low, 256, 3)]
    ramps = np.array([np.linspace(low, high, 64).astype(np.uint8) for low, high in pairs])
    images = np.repeat(ramps.reshape(-1, 8, 8, 1), 3, axis=3)
    theirs = with_pillow(timm_ops.auto_contrast, images, [()] * len(images))
    assert difference(changed_by(Op.AUTO_CONTRAST, torch.from_numpy(images)), theirs).max() == 0


@pytest.mark.parametrize("size", [(HEIGHT, WIDTH), (3, 3), (2, 9)])
@pytest.mark.parametrize(
    ("op", "theirs"),
    [(Op.COLOR, timm_ops.color), (Op.CONTRAST, timm_ops.contrast), (Op.SHARPNESS, timm_ops.sharpness)],
    ids=["color", "contrast", "sharpness"],
)
def test_blends_are_exactly_pillows(op, theirs, size) -> None:
    expected = with_pillow(theirs, some_images(COUNT, *size), [(factor,) for factor in FACTORS])
    assert difference(changed_by(op, some_batch(COUNT, *size), FACTORS), expected).max() == 0


def test_contrast_rounds_a_mean_of_exactly_a_half_up() -> None:
    images = np.zeros((8, 2, 2, 3), np.uint8)
    for sample in range(8):
        images[sample] = sample * 30
        images[sample, 0] += 1
    factors = np.linspace(0.1, 1.9, 8)
    theirs = with_pillow(timm_ops.contrast, images, [(factor,) for factor in factors])
    assert difference(changed_by(Op.CONTRAST, torch.from_numpy(images), factors), theirs).max() == 0


def test_grey_is_exactly_pillows_for_every_colour() -> None:
    levels = np.arange(256, dtype=np.uint8)
    green, blue = np.meshgrid(levels, levels)
    for red in range(0, 256, 17):
        image = np.stack([np.full_like(green, red), green, blue], axis=-1)
        expected = np.asarray(Image.fromarray(image).convert("L"))
        planes = torch.from_numpy(image)[None].permute(0, 3, 1, 2).to(torch.float32)
        assert np.array_equal(ops.grey_of(planes)[0].to(torch.uint8).numpy(), expected)


@pytest.mark.parametrize(
    ("op", "change", "arguments"),
    [
        (Op.SHEAR_X, timm_ops.shear_x, [-0.99, -0.3, 0.01, 0.1, 0.21, 0.99]),
        (Op.SHEAR_Y, timm_ops.shear_y, [-0.99, -0.3, 0.01, 0.1, 0.21, 0.99]),
        (Op.TRANSLATE_X, timm_ops.translate_x_abs, [-17.3, -8.0, -0.5, 0.25, 3.0, 18.0]),
        (Op.TRANSLATE_Y, timm_ops.translate_y_abs, [-17.3, -8.0, -0.5, 0.25, 3.0, 18.0]),
        (Op.ROTATE, timm_ops.rotate, [-135, -30, -4.5, 13.7, 45, 135]),
    ],
    ids=["shear_x", "shear_y", "translate_x", "translate_y", "rotate"],
)
def test_geometry_is_pillows_within_a_level(op, change, arguments) -> None:
    def through_timm(image: Image.Image, value: float) -> Image.Image:
        return change(image, value, resample=Image.Resampling.BILINEAR, fillcolor=FILL)

    theirs = with_pillow(through_timm, some_images(len(arguments)), [(value,) for value in arguments])
    different = difference(changed_by(op, some_batch(len(arguments)), np.array(arguments, np.float64)), theirs)
    # In single precision one pixel in a thousand may end up on the other side of the edge of the fill.
    assert (different.max(axis=-1) > 1).mean() < 0.001
    assert (different > 0).mean() < 0.05


def test_geometry_that_changes_nothing_changes_no_bit() -> None:
    for images in (some_batch(), some_batch(1, 512, 512)):
        for op in (Op.SHEAR_X, Op.ROTATE):
            assert torch.equal(changed_by(op, images), images)
