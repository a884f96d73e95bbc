"""All that happens to a batch on the device, in its order."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stoker.augment.mixing import Mixed, Mixer
from stoker.augment.operations import (
    IMAGENET_MEAN,
    IMAGENET_STD,
    Colour,
    draw_erasures,
    erase,
    flip,
    to_device,
    to_float,
)
from stoker.augment.policies import Level, Policy, RandAugment, TrivialAugmentWide, apply_policy
from stoker.config import Config
from stoker.data.draws import Keys


@dataclass(frozen=True)
class TrainAugment:
    """Turns a batch of bytes into what a training step takes: inputs, soft targets, whether they are mixed."""

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
        """`images_nhwc` is on the device and stays as it is; the rest may still be on the host."""
        device = images_nhwc.device
        # The order of timm and torchvision. Bytes as long as possible: they are a quarter of floats.
        images = flip(images_nhwc, to_device(flips, device))
        if self.policy is not None:
            images = apply_policy(self.policy, images, keys)
        inputs = to_float(images, self.mean, self.std, self.dtype)
        if self.erasing > 0:
            erase(inputs, draw_erasures(keys, self.erasing, inputs.shape[-2], inputs.shape[-1]))
        return self.mixer(inputs, to_device(labels, device), epoch, step)


@dataclass(frozen=True)
class EvalPrepare:
    """Turns a batch of bytes into a model's input; nothing random."""

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
    """What the config asks for; mean and std are the model's."""
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
    """The policy of `auto_augment`; None is none."""
    if config.auto_augment == "randaugment":
        # timm's training fills with the mean colour, which is zero for the model; torchvision's with black.
        red, green, blue = (min(255, round(255 * share)) for share in mean)
        fill: Level = (red, green, blue)
        return RandAugment(config.randaugment_magnitude, config.randaugment_magnitude_std, config.randaugment_ops, fill)
    return TrivialAugmentWide() if config.auto_augment == "trivialaugment" else None
