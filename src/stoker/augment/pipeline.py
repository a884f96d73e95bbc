"""What happens to a batch on the device, in this order: flip, policy, floats, erasing, mixing."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stoker.augment.mixing import Mixed, Mixer
from stoker.augment.operations import to_device
from stoker.augment.policies import Level, Policy, RandAugment, TrivialAugmentWide, apply_policy
from stoker.config import Config
from stoker.data.draws import Keys, uniforms

Colour = tuple[float, float, float]

IMAGENET_MEAN: Colour = (0.485, 0.456, 0.406)
IMAGENET_STD: Colour = (0.229, 0.224, 0.225)

ERASING = 17  # purpose of these draws; see stoker.augment.policies.POLICY
ERASED_AREA = (0.02, 1 / 3)
ERASED_ASPECT = (0.3, 3.3)
ERASING_TRIES = 10


@dataclass(frozen=True)
class TrainAugment:
    """Turns a batch of bytes into the inputs and soft targets of a training step."""

    mixer: Mixer
    policy: Policy | None = None
    erasing: float = 0.0
    mean: Colour = IMAGENET_MEAN
    std: Colour = IMAGENET_STD
    dtype: torch.dtype = torch.float32

    def __call__(
        self,
        images_nhwc: Tensor,
        labels: Tensor | NDArray[np.int64],
        flips: Tensor | NDArray[np.bool_],
        keys: Keys,
        epoch: int,
        step: int,
    ) -> Mixed:
        """`images_nhwc` is on the device and is not changed; the rest may still be on the host."""
        device = images_nhwc.device
        # The order of timm and torchvision. Bytes for as long as possible: they are a quarter of the size of floats.
        images = flip(images_nhwc, to_device(flips, device))
        if self.policy is not None:
            images = apply_policy(self.policy, images, keys)
        inputs = to_float(images, self.mean, self.std, self.dtype)
        if self.erasing > 0:
            erase(inputs, draw_erasures(keys, self.erasing, inputs.shape[-2], inputs.shape[-1]))
        return self.mixer(inputs, to_device(labels, device), epoch, step)


@dataclass(frozen=True)
class EvalPrepare:
    """Turns a batch of bytes into a model's input, without anything random."""

    mean: Colour = IMAGENET_MEAN
    std: Colour = IMAGENET_STD
    dtype: torch.dtype = torch.float32

    def __call__(self, images_nhwc: Tensor) -> Tensor:
        """The inputs, NCHW in channels_last layout."""
        return to_float(images_nhwc, self.mean, self.std, self.dtype)


def build_train_augment(
    config: Config,
    num_classes: int,
    *,
    mean: Colour = IMAGENET_MEAN,
    std: Colour = IMAGENET_STD,
    dtype: torch.dtype = torch.float32,
) -> TrainAugment:
    """The augmentation that the config asks for; mean and std are the model's."""
    mixer = Mixer(
        mixup_alpha=config.mixup_alpha,
        cutmix_alpha=config.cutmix_alpha,
        probability=config.mix_probability,
        switch_probability=config.mix_switch_probability,
        label_smoothing=config.label_smoothing,
        num_classes=num_classes,
        seed=config.seed,
    )
    policy = build_policy(config, mean)
    return TrainAugment(mixer, policy, config.random_erasing, mean, std, dtype)


def build_policy(config: Config, mean: Colour) -> Policy | None:
    """The policy that `auto_augment` names, or None."""
    if config.auto_augment == "randaugment":
        # timm fills with the mean colour, which is zero for the model; torchvision with black.
        red, green, blue = (min(255, round(255 * share)) for share in mean)
        fill: Level = (red, green, blue)
        return RandAugment(config.randaugment_magnitude, config.randaugment_magnitude_std, config.randaugment_ops, fill)
    return TrivialAugmentWide() if config.auto_augment == "trivialaugment" else None


def flip(images_nhwc: Tensor, flips: Tensor) -> Tensor:
    """The images, mirrored left to right if `flips` is set. On bytes: a quarter of the traffic of floats."""
    return torch.where(flips[:, None, None, None], images_nhwc.flip(2), images_nhwc)


def to_float(images_nhwc: Tensor, mean: Colour, std: Colour, dtype: torch.dtype = torch.float32) -> Tensor:
    """Normalised NCHW images in channels_last layout: the pixels keep their order in memory."""
    shift, scale = _normalisation(mean, std, images_nhwc.device)
    # In float32 whatever `dtype` is: 123.675 would lose its last digits in half precision. Subtraction and product stay
    # two steps: fused, the last bit of a pixel would depend on its place in the batch (on a CPU).
    images_nchw = images_nhwc.permute(0, 3, 1, 2).to(torch.float32).sub_(shift).mul_(scale)
    return images_nchw.to(dtype)


@lru_cache(maxsize=16)
def _normalisation(mean: Colour, std: Colour, device: torch.device) -> tuple[Tensor, Tensor]:
    # Cached: making them in every step would be two copies to the device.
    shift = torch.tensor(mean, dtype=torch.float64) * 255
    scale = 1 / (torch.tensor(std, dtype=torch.float64) * 255)
    shaped = [to_device(values.to(torch.float32).view(1, 3, 1, 1), device) for values in (shift, scale)]
    return shaped[0], shaped[1]


@dataclass(frozen=True)
class Erasures:
    """Which samples of a batch lose a rectangle, and which one."""

    samples: NDArray[np.int64]
    boxes: NDArray[np.int64]
    """top, left, bottom, right of each; the latter two exclusive."""


def draw_erasures(keys: Keys, probability: float, height: int, width: int) -> Erasures:
    """The rectangles for images of this size: up to ten tries of an area and an aspect, as in torchvision."""
    numbers = uniforms(keys, ERASING, 2 * ERASING_TRIES + 3)
    area = height * width * (ERASED_AREA[0] + (ERASED_AREA[1] - ERASED_AREA[0]) * numbers[:, :ERASING_TRIES])
    log_low, log_high = np.log(ERASED_ASPECT)
    aspect = np.exp(log_low + (log_high - log_low) * numbers[:, ERASING_TRIES : 2 * ERASING_TRIES])
    heights, widths = np.rint(np.sqrt(area * aspect)), np.rint(np.sqrt(area / aspect))
    fits = (heights < height) & (widths < width)
    first = fits.argmax(axis=1)
    every = np.arange(len(keys))
    down, right, lot = numbers[:, 2 * ERASING_TRIES :].T
    tall, wide = heights[every, first], widths[every, first]
    top, left = np.floor(down * (height - tall + 1)), np.floor(right * (width - wide + 1))
    boxes = np.stack([top, left, top + tall, left + wide], axis=1).astype(np.int64)
    samples = np.flatnonzero((lot < probability) & fits.any(axis=1))
    return Erasures(samples, boxes[samples])


def erase(images_nchw: Tensor, erasures: Erasures) -> Tensor:
    """Sets the rectangles to zero, in place; grey after normalisation, torchvision's default."""
    if not len(erasures.samples):
        return images_nchw
    device = images_nchw.device
    _, _, height, width = images_nchw.shape
    # In memory order (channels last), so that selecting whole images is a plain copy.
    images_nhwc = images_nchw.permute(0, 2, 3, 1)
    index, boxes = to_device(erasures.samples, device), to_device(erasures.boxes, device)
    top, left, bottom, right = (side[:, None] for side in boxes.unbind(1))
    rows, columns = torch.arange(height, device=device)[None], torch.arange(width, device=device)[None]
    in_rows, in_columns = (rows >= top) & (rows < bottom), (columns >= left) & (columns < right)
    erased = (in_rows[:, :, None] & in_columns[:, None, :])[..., None]
    images_nhwc.index_copy_(0, index, images_nhwc.index_select(0, index).masked_fill_(erased, 0))
    return images_nchw
