"""Images for the tests in this folder: smooth like photographs, with noise, flat areas and extremes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stoker.loader.rng import Keys, sample_keys
from stoker.tasks.device_copies import copy_to, pack
from stoker.tasks.images.augment.policies import Layer, Level, Policy, arrange, run_layers

HEIGHT, WIDTH = 48, 40


def some_images(count: int = 6, height: int = HEIGHT, width: int = WIDTH, seed: int = 0) -> NDArray[np.uint8]:
    """(count, height, width, 3): waves with noise; the second is flat, the third is dark."""
    random = np.random.default_rng(seed)
    y, x = np.mgrid[:height, :width]
    phase = random.uniform(0, 6, (count, 1, 1, 3))
    waves = 128 + 90 * np.sin(x[None, ..., None] / 9 + phase) * np.cos(y[None, ..., None] / 7 + phase)
    images: NDArray[np.uint8] = np.clip(waves + random.normal(0, 12, waves.shape), 0, 255).astype(np.uint8)
    if count > 2:
        images[1] = (10, 10, 200)
        images[2] //= 3
    return images


def some_batch(count: int = 6, height: int = HEIGHT, width: int = WIDTH, seed: int = 0) -> Tensor:
    return torch.from_numpy(some_images(count, height, width, seed))


def some_keys(count: int, seed: int = 0, epoch: int = 0) -> Keys:
    return sample_keys(seed, epoch, np.arange(count), np.zeros(count, np.int64))


def apply_layers(layers: Sequence[Layer], images_nhwc: Tensor, fill: Level) -> Tensor:
    """The images (uint8) after these operations; does not change the input."""
    _, height, width, _ = images_nhwc.shape
    arranged = arrange(layers, height, width, fill)
    packed = pack({**arranged.arrays, "first_order": arranged.first_order})
    there = packed.to_device(copy_to(images_nhwc.device))
    return run_layers(images_nhwc.index_select(0, there["first_order"]), arranged.layers, there)


def apply_policy(policy: Policy, images_nhwc: Tensor, keys: Keys) -> Tensor:
    """The images (uint8) after the operations that the policy chooses for their keys; does not change the input."""
    _, height, width, _ = images_nhwc.shape
    return apply_layers(policy.plan(keys, height, width), images_nhwc, policy.fill)
