"""Random erasing: a rectangle of some images becomes grey (zero after normalisation, torchvision's default)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stoker.augment.prepare import to_device
from stoker.data.draws import Keys, uniforms

ERASING = 17  # purpose of these draws; see stoker.augment.policies.POLICY

AREA = (0.02, 1 / 3)
ASPECT = (0.3, 3.3)
TRIES = 10


@dataclass(frozen=True)
class Erasures:
    """Which samples of a batch lose a rectangle, and where it lies."""

    samples: NDArray[np.int64]
    boxes: NDArray[np.int64]
    """top, left, bottom, right of each; the latter two exclusive."""


def draw_erasures(keys: Keys, probability: float, height: int, width: int) -> Erasures:
    """The rectangles for images of this size: up to ten tries of an area and an aspect, else none, as torchvision."""
    numbers = uniforms(keys, ERASING, 2 * TRIES + 3)
    area = height * width * (AREA[0] + (AREA[1] - AREA[0]) * numbers[:, :TRIES])
    log_low, log_high = np.log(ASPECT)
    aspect = np.exp(log_low + (log_high - log_low) * numbers[:, TRIES : 2 * TRIES])
    heights, widths = np.rint(np.sqrt(area * aspect)), np.rint(np.sqrt(area / aspect))
    fits = (heights < height) & (widths < width)
    first = fits.argmax(axis=1)
    every = np.arange(len(keys))
    down, right, lot = numbers[:, 2 * TRIES :].T
    tall, wide = heights[every, first], widths[every, first]
    top, left = np.floor(down * (height - tall + 1)), np.floor(right * (width - wide + 1))
    boxes = np.stack([top, left, top + tall, left + wide], axis=1).astype(np.int64)
    samples = np.flatnonzero((lot < probability) & fits.any(axis=1))
    return Erasures(samples, boxes[samples])


def erase(images_nchw: Tensor, erasures: Erasures) -> Tensor:
    """The same images, in place, with the rectangles set to zero."""
    if not len(erasures.samples):
        return images_nchw
    device = images_nchw.device
    _, _, height, width = images_nchw.shape
    # In the order of memory (channels last): selecting whole images is then a plain copy.
    images_nhwc = images_nchw.permute(0, 2, 3, 1)
    index, boxes = to_device(erasures.samples, device), to_device(erasures.boxes, device)
    top, left, bottom, right = (side[:, None] for side in boxes.unbind(1))
    rows, columns = torch.arange(height, device=device)[None], torch.arange(width, device=device)[None]
    in_rows, in_columns = (rows >= top) & (rows < bottom), (columns >= left) & (columns < right)
    erased = (in_rows[:, :, None] & in_columns[:, None, :])[..., None]
    images_nhwc.index_copy_(0, index, images_nhwc.index_select(0, index).masked_fill_(erased, 0))
    return images_nchw
