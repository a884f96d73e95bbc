"""The operations of augmentation policies, for many samples at once, each with its own strength.

Images are uint8 (samples, height, width, 3) on any device. Nothing here waits for the device, and everything rounds as
Pillow does, so that a policy means the same as in timm and torchvision. A sample's result does not depend on the others
in its batch: sums are sums of integers, and no product is fused with a sum.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Floats = NDArray[np.float64]
Tables = NDArray[np.uint8]

LEVELS = np.arange(256)
# Pillow truncates. In single precision 200 may have become 199.995.
CUT_SLACK = 1 / 64


def to_device(values: NDArray[Any] | Tensor, device: torch.device) -> Tensor:
    """A small array on the device, copied without waiting for it."""
    tensor = values if isinstance(values, Tensor) else torch.from_numpy(values)
    if device.type == "cuda" and tensor.device.type == "cpu":
        # The driver may wait for the stream before it copies from ordinary memory, never from page-locked memory.
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


# --- geometry: where each pixel of the result comes from, as Pillow's six numbers (a, b, c, d, e, f):
# x' = a x + b y + c, y' = d x + e y + f, with pixel centres at 0.5, 1.5, ...


def shear_x_matrices(factors: Floats) -> Floats:
    """Shift each row by its distance from the top times the factor."""
    return _matrices(len(factors), {1: factors})


def shear_y_matrices(factors: Floats) -> Floats:
    """Shift each column by its distance from the left times the factor."""
    return _matrices(len(factors), {3: factors})


def translate_x_matrices(pixels: Floats) -> Floats:
    """Take each pixel from this far to its right."""
    return _matrices(len(pixels), {2: pixels})


def translate_y_matrices(pixels: Floats) -> Floats:
    """Take each pixel from this far below it."""
    return _matrices(len(pixels), {5: pixels})


def rotate_matrices(degrees: Floats, height: int, width: int) -> Floats:
    """Turn anticlockwise about the centre."""
    angles = -np.radians(degrees)
    cos, sin = np.cos(angles), np.sin(angles)
    x, y = width / 2, height / 2
    return _matrices(
        len(degrees),
        {0: cos, 1: sin, 2: x - cos * x - sin * y, 3: -sin, 4: cos, 5: y + sin * x - cos * y},
    )


def warp(images_nhwc: Tensor, matrices: Tensor, fill: Tensor) -> Tensor:
    """The images warped by their matrices (samples, 6), bilinear; `fill` (3,) is the colour outside the source."""
    _, height, width, _ = images_nhwc.shape
    a, b, c, d, e, f = (column[:, None, None] for column in matrices.to(torch.float32).unbind(1))
    xs = torch.arange(width, device=images_nhwc.device, dtype=torch.float32)[None, None, :] + 0.5
    ys = torch.arange(height, device=images_nhwc.device, dtype=torch.float32)[None, :, None] + 0.5
    # In grid_sample's units (-1 and 1 are the borders). What depends on one axis is computed first, so that the whole
    # grid is one sum of a row and a column.
    source_x = (a * xs + c) * (2 / width) - 1 + b * ys * (2 / width)
    source_y = (e * ys + f) * (2 / height) - 1 + d * xs * (2 / height)
    grid = torch.stack([source_x, source_y], dim=-1)
    images_nchw = images_nhwc.permute(0, 3, 1, 2).to(torch.float32)
    # As in Pillow, a pixel whose centre is inside the source is all source (the outermost half pixel is repeated).
    found = torch.nn.functional.grid_sample(images_nchw, grid, "bilinear", "border", align_corners=False)
    inside = (source_x >= -1) & (source_x < 1) & (source_y >= -1) & (source_y < 1)
    # Source or fill is chosen by arithmetic on bytes, which wrap around: on a CPU `where` takes several times as long.
    colour = fill.view(1, 3, 1, 1)
    warped = (found.add_(CUT_SLACK).to(torch.uint8) - colour).mul_(inside[:, None].to(torch.uint8)).add_(colour)
    return warped.permute(0, 2, 3, 1)


def _matrices(count: int, columns: dict[int, Floats]) -> Floats:
    matrices = np.tile(np.array([1.0, 0, 0, 0, 1, 0]), (count, 1))
    for column, values in columns.items():
        matrices[:, column] = values
    return matrices


# --- tables: the new value of each level of each channel. Those that do not depend on the image are made on the host.


def posterize_tables(bits: Floats) -> Tables:
    """Keep this many upper bits; 8 keeps all, 0 gives black (as in Pillow before it refused 0)."""
    masks = 256 - 2 ** (8 - bits.astype(np.int64))
    return (LEVELS[None] & masks[:, None]).astype(np.uint8)


def solarize_tables(thresholds: Floats) -> Tables:
    """Invert what is at or above the threshold."""
    return np.where(LEVELS[None] < thresholds[:, None], LEVELS, 255 - LEVELS).astype(np.uint8)


def solarize_add_tables(amounts: Floats) -> Tables:
    """Brighten what is below 128 by the amount."""
    brighter = np.minimum(LEVELS[None] + amounts.astype(np.int64)[:, None], 255)
    return np.where(LEVELS < 128, brighter, LEVELS).astype(np.uint8)


def invert_tables(count: int) -> Tables:
    """The negative."""
    return np.broadcast_to((255 - LEVELS).astype(np.uint8), (count, 256))


def brightness_tables(factors: Floats) -> Tables:
    """Multiply; 0 is black, 1 changes nothing."""
    # In single precision, as in Pillow: truncation turns a difference in the last bit into one level.
    brighter = LEVELS.astype(np.float32)[None] * factors.astype(np.float32)[:, None]
    tables: Tables = np.minimum(brighter, 255).astype(np.uint8)
    return tables


def contrast_tables(images_nhwc: Tensor, factors: Tensor) -> Tensor:
    """Move away from (above 1) or towards (below 1) the image's mean grey."""
    pixels = images_nhwc.shape[1] * images_nhwc.shape[2]
    total = _grey(images_nhwc).sum(dim=(1, 2), dtype=torch.int64)
    mean = torch.div(2 * total + pixels, 2 * pixels, rounding_mode="floor").to(torch.float32)
    levels = torch.arange(256, device=images_nhwc.device, dtype=torch.float32)
    return _blend(mean[:, None], levels[None], factors[:, None])[:, None].expand(-1, 3, -1)


def autocontrast_tables(images_nhwc: Tensor) -> Tensor:
    """Stretch each channel over all levels."""
    low, high = (bound.to(torch.float64)[..., None] for bound in torch.aminmax(images_nhwc.flatten(1, 2), dim=1))
    levels = torch.arange(256, device=images_nhwc.device, dtype=torch.float64)
    # Double precision and exactly these operations give Pillow's level in every case: `255 / tensor` would be 255 times
    # a rounded reciprocal.
    scale = torch.full_like(low, 255.0).div_((high - low).clamp(min=1))
    stretched = (levels * scale + -low * scale).clamp(0, 255)
    return torch.where(high > low, stretched, levels).to(torch.uint8)


def equalize_tables(images_nhwc: Tensor) -> Tensor:
    """Spread each channel so that all levels are about equally frequent."""
    samples, height, width, _ = images_nhwc.shape
    counts = torch.zeros(samples * 3 * 256, device=images_nhwc.device, dtype=torch.int64)
    places = _table_places(images_nhwc, torch.int64).reshape(-1)
    # Not bincount: on a GPU it waits for the largest value.
    counts.scatter_add_(0, places, torch.ones((), device=places.device, dtype=torch.int64).expand_as(places))
    counts = counts.view(samples, 3, 256)
    levels = torch.arange(256, device=images_nhwc.device)
    highest = ((counts > 0) * levels).amax(dim=2, keepdim=True)
    step = torch.div(height * width - counts.gather(2, highest), 255, rounding_mode="floor")
    below = counts.cumsum(2) - counts + torch.div(step, 2, rounding_mode="floor")
    spread = torch.div(below, step.clamp(min=1), rounding_mode="floor").clamp(max=255)
    return torch.where(step > 0, spread, levels).to(torch.uint8)


def look_up(images_nhwc: Tensor, tables: Tensor) -> Tensor:
    """The images with each level replaced by their tables (samples, 3, 256)."""
    places = _table_places(images_nhwc, torch.int32)
    return tables.reshape(-1).index_select(0, places.reshape(-1)).view(images_nhwc.shape)


def _table_places(images_nhwc: Tensor, dtype: torch.dtype) -> Tensor:
    """The index of each pixel's entry in a flat (samples, 3, 256) table."""
    starts = torch.arange(len(images_nhwc) * 3, device=images_nhwc.device, dtype=dtype).mul_(256)
    return images_nhwc.to(dtype).add_(starts.view(-1, 1, 1, 3))


# --- blends of an image with a changed one


def saturate(images_nhwc: Tensor, factors: Tensor) -> Tensor:
    """Colour: 0 is grey, 1 changes nothing, more is gaudier."""
    grey = _grey(images_nhwc)[:, None].to(torch.float32)
    # One plane for each channel: a grey value that three neighbours share cannot be used by wide instructions.
    planes = images_nhwc.permute(0, 3, 1, 2).to(torch.float32, memory_format=torch.contiguous_format)
    return _blend(grey, planes, factors[:, None, None, None]).permute(0, 2, 3, 1)


def sharpen(images_nhwc: Tensor, factors: Tensor) -> Tensor:
    """Sharpness: 0 is smoothed, 1 changes nothing, more is sharper."""
    if min(images_nhwc.shape[1:3]) < 3:
        return images_nhwc.clone()  # all border, which Pillow does not change
    images = images_nhwc.to(torch.float32)
    middle = images[:, 1:-1, 1:-1]
    rows = (images[:, :-2] + images[:, 1:-1]).add_(images[:, 2:])
    blocks = (rows[:, :, :-2] + rows[:, :, 1:-1]).add_(rows[:, :, 2:])
    # All nine weigh 1, the middle one 5. Rounded before blending; thirteenths are never close to a half.
    smooth = blocks.add_(middle * 4).mul_(1 / 13).add_(0.5).floor_()
    sharper = images_nhwc.clone()
    sharper[:, 1:-1, 1:-1] = _blend(smooth, middle, factors[:, None, None, None])
    return sharper


def _blend(changed: Tensor, images: Tensor, factors: Tensor) -> Tensor:
    return (images - changed).mul_(factors).add_(changed).clamp_(0, 255).to(torch.uint8)


def _grey(images_nhwc: Tensor) -> Tensor:
    red, green, blue = images_nhwc.to(torch.int32).unbind(3)
    return (red * 19595 + green * 38470 + blue * 7471 + 0x8000) >> 16
