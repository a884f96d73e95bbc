"""The operations of augmentation policies, for many samples at once, each with its own strength.

Nothing here waits for the device, and everything rounds as Pillow does, so that a policy means the same as in timm and
torchvision. A sample's result does not depend on the others in its batch: sums are sums of whole numbers, and no
product is fused with a sum where that could change a result. On a GPU the number of kernels is what costs
(tests/tasks/augment/test_kernels.py limits it): hence the operators that do two things at once.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from stoker.tasks.device_copies import kept_on

Floats = NDArray[np.float64]

LEVELS = np.arange(256)
# Pillow truncates. In single precision 200 may have become 199.995.
CUT_SLACK = 1 / 64
# The largest number below 1 in single precision.
BELOW_ONE = 1 - 2**-24
# In front of a table's 256 entries: a histogram with an empty place below level 0 has, once summed up, the number of
# darker pixels at each level. Tables and histograms have the same shape, so that one set of places serves both.
TABLE_SIZE = 257


class Op(IntEnum):
    """The operations on a sample."""

    IDENTITY = 0
    AUTO_CONTRAST = 1
    EQUALIZE = 2
    INVERT = 3
    ROTATE = 4
    POSTERIZE = 5
    SOLARIZE = 6
    SOLARIZE_ADD = 7
    COLOR = 8
    CONTRAST = 9
    BRIGHTNESS = 10
    SHARPNESS = 11
    SHEAR_X = 12
    SHEAR_Y = 13
    TRANSLATE_X = 14
    TRANSLATE_Y = 15


def plus(images: Tensor, addends: Tensor) -> Tensor:
    """Bytes plus numbers of a wider type: the sum, in that type."""
    if images.device.type == "cpu":
        # For mixed types torch would make two temporary tensors; fresh memory is what costs time here.
        return images.to(addends.dtype).add_(addends)
    return torch.add(images, addends)


# --- geometry: where each pixel of the result comes from, as Pillow's six numbers (a, b, c, d, e, f):
# x' = a x + b y + c, y' = d x + e y + f, with pixel centres at 0.5, 1.5, ...


_SHIFTED = {Op.SHEAR_X: 1, Op.SHEAR_Y: 3, Op.TRANSLATE_X: 2, Op.TRANSLATE_Y: 5}
"""The number that the argument replaces: a row is sheared by its distance from the top, a column by that from the left;
pixels are taken from so far to the right, or below."""


def matrices_of(chosen: NDArray[np.int64], arguments: Floats, height: int, width: int) -> Floats:
    """The six numbers (samples, 6) of operations with their arguments; rotations are anticlockwise about the centre."""
    matrices = np.tile(np.array([1.0, 0, 0, 0, 1, 0]), (len(chosen), 1))
    for op, column in _SHIFTED.items():
        members = chosen == op
        matrices[members, column] = arguments[members]
    rotated = chosen == Op.ROTATE
    angles = -np.radians(arguments[rotated])
    cos, sin = np.cos(angles), np.sin(angles)
    x, y = width / 2, height / 2
    matrices[rotated] = np.stack([cos, sin, x - cos * x - sin * y, -sin, cos, y + sin * x - cos * y], axis=1)
    return matrices


def source_grid(matrices: Floats, height: int, width: int) -> dict[str, NDArray[np.float32]]:
    """Where the pixels come from by each matrix (samples, 6), in grid_sample's units (-1 and 1 are the borders): what
    follows from the column (samples, 1, width, 2: x and y) and from the row (samples, height, 1, 2).

    Two short vectors a sample, made on the host, which the device adds up."""
    a, b, c, d, e, f = (column[:, None] for column in matrices.astype(np.float32).T)
    xs, ys = (np.arange(length, dtype=np.float32)[None] + np.float32(0.5) for length in (width, height))
    wide, tall, one = np.float32(2 / width), np.float32(2 / height), np.float32(1)
    by_column = np.stack([(a * xs + c) * wide - one, d * xs * tall], axis=-1)
    by_row = np.stack([b * ys * wide, (e * ys + f) * tall - one], axis=-1)
    return {"by_column": by_column[:, None], "by_row": by_row[:, :, None]}


def warp(planes: Tensor, by_column: Tensor, by_row: Tensor, fill: Tensor, out: Tensor) -> None:
    """The planes (samples, 3, height, width) at their grids, bilinear; outside the image is `fill` (1, 3, 1, 1)."""
    # As complex numbers: x and y of a pixel are added, and compared, in one go.
    grid = torch.view_as_real(torch.view_as_complex(by_column) + torch.view_as_complex(by_row))
    # As in Pillow, a pixel whose centre is inside the source is all source (the outermost half pixel is repeated).
    found = functional.grid_sample(planes, grid, "bilinear", "border", align_corners=False).add_(CUT_SLACK)
    inside = grid.clamp(-1, BELOW_ONE)
    torch.view_as_complex(inside).eq_(torch.view_as_complex(grid))
    # With weights of 0 and 1, lerp returns exactly one of the two; on a CPU `where` takes fifteen times as long.
    torch.lerp(fill, found, inside[:, None, :, :, 0], out=out)


# --- tables: the new value of each level of each channel. Those that do not depend on the image are made on the host.


def tables_of(chosen: NDArray[np.int64], arguments: Floats) -> NDArray[np.uint8]:
    """The tables (samples, 256) of each operation with its argument."""
    tables = np.zeros((len(chosen), 256), np.uint8)
    for op, make in _TABLES.items():
        members = chosen == op
        tables[members] = make(arguments[members, None])
    return tables


def _posterize(bits: Floats) -> NDArray[np.int64]:
    # 8 keeps all upper bits, 0 gives black (as in Pillow before it refused 0).
    return LEVELS & (256 - 2 ** (8 - bits.astype(np.int64)))


def _solarize_add(amounts: Floats) -> NDArray[np.int64]:
    return np.where(LEVELS < 128, np.minimum(LEVELS + amounts.astype(np.int64), 255), LEVELS)


def _brighten(factors: Floats) -> NDArray[np.float32]:
    # In single precision, as in Pillow: truncation turns a difference in the last bit into one level.
    return np.minimum(LEVELS.astype(np.float32) * factors.astype(np.float32), 255)


_TABLES: dict[Op, Callable[[Floats], NDArray[Any]]] = {
    Op.INVERT: lambda _none: 255 - LEVELS,
    Op.POSTERIZE: _posterize,
    Op.SOLARIZE: lambda thresholds: np.where(thresholds > LEVELS, LEVELS, 255 - LEVELS),
    Op.SOLARIZE_ADD: _solarize_add,
    Op.BRIGHTNESS: _brighten,
}


def table_starts(samples: int) -> NDArray[np.int64]:
    """The place of level 0 of each sample's channels in flat (samples, 3, TABLE_SIZE) tables."""
    return (np.arange(samples * 3, dtype=np.int64) * TABLE_SIZE + 1).reshape(-1, 1, 1, 3)


def equalize(places: Tensor, samples: int, pixels: int, out: Tensor) -> None:
    """New levels (samples, 3, 256) in float64 that are all about equally frequent; `places` are those of every pixel in
    the samples' tables."""
    constants = _constants(places.device)
    # Not bincount: on a GPU it waits for the largest value. Whole numbers up to 2**53 are exact, in any order.
    counts = torch.zeros(samples * 3 * TABLE_SIZE, device=places.device, dtype=torch.float64)
    counts.scatter_add_(0, places, constants["one"].expand_as(places))
    darker = counts.view(samples, 3, TABLE_SIZE).cumsum(2)
    # All pixels but those of the brightest level: the largest sum that is not yet the whole.
    step = torch.div(darker.remainder(pixels).amax(dim=2, keepdim=True), 255, rounding_mode="floor")
    # Pillow adds half a step and divides, in whole numbers. A quotient is never so close to the next level that double
    # precision would round it the wrong way, and on the way to bytes it is truncated.
    spread = torch.addcdiv(constants["half"], darker[..., :256], step)
    torch.where(step > 0, spread, constants["levels"], out=out)


def stretch(images_nhwc: Tensor, out: Tensor) -> None:
    """Autocontrast: new levels (samples, 3, 256) in float64 that reach from black to white in each channel."""
    low, high = torch.aminmax(images_nhwc.flatten(1, 2), dim=1)
    span = torch.sub(high, low, out=torch.empty(low.shape, device=low.device, dtype=torch.int64))
    # Double precision and exactly these operations give Pillow's level in every case.
    scaled = functional.embedding(span, _constants(low.device)["scaled"])
    torch.add(scaled[..., :256], low[..., None] * scaled[..., 256:], out=out)


def look_up(places: Tensor, tables: Tensor, out: Tensor) -> None:
    """Each pixel's entry in the tables, which are bytes (samples, 3, TABLE_SIZE)."""
    torch.index_select(tables.view(-1), 0, places, out=out.view(-1))


def _constants(device: torch.device) -> dict[str, Tensor]:
    return kept_on(device, "operations", _make_constants)


def _make_constants() -> dict[str, NDArray[np.float64]]:
    # For each distance of the brightest from the darkest level: all levels times the scale, minus the darkest level
    # times the scale. A flat channel stays as it is.
    scale = np.concatenate([[1.0], 255.0 / np.arange(1.0, 256.0)])[:, None]
    scaled = np.concatenate([LEVELS[None] * scale, -scale], axis=1)
    scaled[0, 256] = 0
    return {"one": np.array(1.0), "half": np.array(0.5), "levels": LEVELS.astype(np.float64), "scaled": scaled}


# --- blends of planes (samples, 3, height, width) in float32 with changed ones


def grey_of(planes: Tensor) -> Tensor:
    """Pillow's grey plus a half, to be truncated."""
    # Weights in 65536ths; every product and sum is a whole number of them below 2**24, so exact in single precision.
    red, green, blue = planes.unbind(1)
    half = _constants(planes.device)["half"]
    return torch.add(half, red, alpha=19595 / 65536).add_(green, alpha=38470 / 65536).add_(blue, alpha=7471 / 65536)


def mean_of(grey: Tensor) -> Tensor:
    """The mean (samples, 1, 1, 1) of each sample's grey, rounded as in Pillow."""
    pixels = grey[0].numel()
    total = grey.sum(dim=(1, 2), dtype=torch.int64)  # truncates each pixel first
    return torch.div(total.add_(pixels // 2), pixels, rounding_mode="floor").view(-1, 1, 1, 1)


def smooth(planes: Tensor, out: Tensor) -> None:
    """What sharpness blends with: the mean of each pixel and its eight neighbours, in which it weighs 5 of 13. The
    border of `out` is left alone, as in Pillow."""
    if min(planes.shape[2:]) < 3:
        return
    blocks = planes.unfold(2, 3, 1).mean(-1).unfold(3, 3, 1).mean(-1)
    # Nine of 13 parts are the mean of the block. Thirteenths are never close to a half: any rounding error vanishes.
    torch.lerp(planes[:, :, 1:-1, 1:-1], blocks, 9 / 13, out=blocks)
    torch.round(blocks, out=out[:, :, 1:-1, 1:-1])


def blend(changed: Tensor, planes: Tensor, factors: Tensor) -> None:
    """`changed` becomes the blend, to be truncated: all changed at 0, unchanged at 1, further away above; overwrites
    `planes`."""
    changed.add_(planes.sub_(changed).mul_(factors.view(-1, 1, 1, 1))).clamp_(0, 255)
