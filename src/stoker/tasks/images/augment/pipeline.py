"""What happens to a batch on the device, in this order: flip, policy, floats, erasing, mixing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stoker.config import Config
from stoker.loader.rng import Keys, uniforms
from stoker.tasks.device_copies import Copy, PackedChoices, copy_to, kept_on, pack
from stoker.tasks.images.augment.mixing import Mixer, Recipe, fill_targets, mix_images, target_rows
from stoker.tasks.images.augment.operations import plus
from stoker.tasks.images.augment.policies import (
    BatchLayers,
    Level,
    Policy,
    RandAugment,
    TrivialAugmentWide,
    arrange,
    run_layers,
)

Colour = tuple[float, float, float]

IMAGENET_MEAN: Colour = (0.485, 0.456, 0.406)
IMAGENET_STD: Colour = (0.229, 0.224, 0.225)

ERASING = 17  # purpose of these draws; see stoker.tasks.images.augment.policies.POLICY
ERASED_AREA = (0.02, 1 / 3)
ERASED_ASPECT = (0.3, 3.3)
ERASING_TRIES = 10


class Augmented(NamedTuple):
    """A batch for the model."""

    images: Tensor
    targets: Tensor
    """(samples, classes) in float32, each row sums to 1."""
    labels: Tensor
    mixed: bool
    """Whether images contain parts of others: then a sample does not have one true class."""


@dataclass(frozen=True)
class BatchChoices:
    """Everything that is decided about a batch before the device gets it."""

    packed: PackedChoices
    layers: BatchLayers | None
    flipped: bool
    erased: bool
    recipe: Recipe | None
    elsewhere: float
    """The target of the classes that a sample does not show."""


@dataclass(frozen=True)
class TrainAugment:
    """Turns a batch of bytes into the inputs and soft targets of a training step."""

    mixer: Mixer
    policy: Policy | None = None
    erasing: float = 0.0
    mean: Colour = IMAGENET_MEAN
    std: Colour = IMAGENET_STD
    dtype: torch.dtype = torch.float32
    memory_format: torch.memory_format = torch.channels_last

    def __call__(
        self,
        images_nhwc: Tensor,
        labels: NDArray[np.int64] | Tensor,
        flips: NDArray[np.bool_] | Tensor,
        keys: Keys,
        epoch: int,
        step: int,
        part: int = 0,
        copy: Copy | None = None,
    ) -> Augmented:
        """`images_nhwc` is on the device and is not changed; everything else is on the host.

        `part` is the batch's number within the update, over all ranks. `copy` takes the one buffer of choices to the
        device; a caller that passes one keeps that buffer until the copy is done.
        """
        _, height, width, _ = images_nhwc.shape
        chosen = self.choose(np.asarray(labels), np.asarray(flips), keys, (epoch, step, part), height, width)
        there = chosen.packed.to_device(copy or copy_to(images_nhwc.device))
        # The order of timm and torchvision. Bytes for as long as possible: they are a quarter of the size of floats.
        images = images_nhwc
        if chosen.flipped or chosen.layers is not None:
            images = images.index_select(0, there["first_order"])  # also the copy that the next steps overwrite
        if chosen.flipped:
            flip(images, there["flipped"])
        if chosen.layers is not None:
            images = run_layers(images, chosen.layers.layers, there)
        recipe = chosen.recipe
        mixup = recipe is not None and recipe.box is None
        inputs = to_float(images, self.mean, self.std, torch.float32 if mixup else self.dtype, self.memory_format)
        if chosen.erased:
            erase(inputs, there["erased"], there["erased_rows"], there["erased_columns"])
        if recipe is not None:
            inputs = mix_images(inputs, recipe, self.dtype)
        targets = fill_targets(chosen.elsewhere, there["columns"], there["values"], self.mixer.num_classes)
        return Augmented(inputs, targets, there["labels"], recipe is not None and recipe.kept != 1)

    def choose(
        self,
        labels: NDArray[np.int64],
        flips: NDArray[np.bool_],
        keys: Keys,
        number: tuple[int, int, int],
        height: int,
        width: int,
    ) -> BatchChoices:
        """The choices for a batch of this size; `number` is its epoch, step and part."""
        recipe = self.mixer.draw(*number, height, width)
        targets = target_rows(labels, self.mixer.num_classes, self.mixer.label_smoothing, recipe)
        order = np.arange(len(labels))
        arrays: dict[str, NDArray[Any]] = {"labels": labels, "columns": targets.columns, "values": targets.values}
        layers = None
        if self.policy is not None:
            layers = arrange(self.policy.plan(keys, height, width), height, width, self.policy.fill)
            arrays |= layers.arrays
            order = layers.first_order
        flipped = np.flatnonzero(flips[order])
        arrays |= {"first_order": order, "flipped": flipped}
        erasures = draw_erasures(keys, self.erasing, height, width) if self.erasing > 0 else None
        if erasures is not None:
            rows, columns = erasures.masks(height, width)
            arrays |= {"erased": erasures.samples, "erased_rows": rows, "erased_columns": columns}
        erased = erasures is not None and len(erasures.samples) > 0
        return BatchChoices(pack(arrays), layers, len(flipped) > 0, erased, recipe, targets.elsewhere)


@dataclass(frozen=True)
class EvalPrepare:
    """Turns a batch of bytes into a model's input, without anything random."""

    mean: Colour = IMAGENET_MEAN
    std: Colour = IMAGENET_STD
    dtype: torch.dtype = torch.float32
    memory_format: torch.memory_format = torch.channels_last

    def __call__(self, images_nhwc: Tensor) -> Tensor:
        """The inputs, NCHW in the model's memory format."""
        return to_float(images_nhwc, self.mean, self.std, self.dtype, self.memory_format)


def build_train_augment(
    config: Config,
    num_classes: int,
    *,
    mean: Colour = IMAGENET_MEAN,
    std: Colour = IMAGENET_STD,
    dtype: torch.dtype = torch.float32,
) -> TrainAugment:
    """The augmentation that the config asks for; mean and std are the model's, `dtype` is what its inputs have."""
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
    return TrainAugment(mixer, policy, config.random_erasing, mean, std, dtype, memory_format_of(config))


def memory_format_of(config: Config) -> torch.memory_format:
    """The layout of a model's inputs: that of its weights."""
    return torch.channels_last if config.channels_last else torch.contiguous_format


def build_policy(config: Config, mean: Colour) -> Policy | None:
    """The policy that `auto_augment` names, or None."""
    if config.auto_augment == "randaugment":
        # timm fills with the mean colour, which is zero for the model; torchvision with black.
        red, green, blue = (min(255, round(255 * share)) for share in mean)
        fill: Level = (red, green, blue)
        return RandAugment(config.randaugment_magnitude, config.randaugment_magnitude_std, config.randaugment_ops, fill)
    return TrivialAugmentWide() if config.auto_augment == "trivialaugment" else None


def flip(images_nhwc: Tensor, samples: Tensor) -> None:
    """Mirrors these samples left to right, in place. On bytes: a quarter of the traffic of floats."""
    images_nhwc.index_copy_(0, samples, images_nhwc.index_select(0, samples).flip(2))


def to_float(
    images_nhwc: Tensor,
    mean: Colour,
    std: Colour,
    dtype: torch.dtype = torch.float32,
    memory_format: torch.memory_format = torch.channels_last,
) -> Tensor:
    """Normalised NCHW images; in channels_last layout the pixels keep their order in memory."""
    samples, height, width, channels = images_nhwc.shape
    constants = kept_on(
        images_nhwc.device, ("normalisation", mean, std, width), lambda: _normalisation(mean, std, width)
    )
    # In float32 whatever `dtype` is: 123.675 would lose its last digits in half precision. Subtraction and product stay
    # two steps: fused, the last bit of a pixel would depend on its place in the batch (on a CPU).
    shifted = plus(images_nhwc, constants["minus_mean"])
    if dtype == torch.float32 and memory_format == torch.channels_last:
        return shifted.mul_(constants["scale"]).permute(0, 3, 1, 2)
    # The product is written in the layout and precision asked for: no further pass over the batch.
    inputs = torch.empty(
        (samples, channels, height, width), device=images_nhwc.device, dtype=dtype, memory_format=memory_format
    )
    torch.mul(shifted, constants["scale"], out=inputs.permute(0, 2, 3, 1))
    return inputs


def _normalisation(mean: Colour, std: Colour, width: int) -> dict[str, NDArray[np.float32]]:
    # A whole row of pixels: with three numbers a CPU's wide instructions could not be used, at four times the time.
    shift, scale = np.array(mean) * 255, 1 / (np.array(std) * 255)
    rows = {"minus_mean": -shift, "scale": scale}
    return {name: np.tile(values.astype(np.float32), (width, 1)) for name, values in rows.items()}


@dataclass(frozen=True)
class Erasures:
    """Which samples of a batch lose a rectangle, and which one."""

    samples: NDArray[np.int64]
    boxes: NDArray[np.int64]
    """top, left, bottom, right of each; the latter two exclusive."""

    def masks(self, height: int, width: int) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
        """The rows (samples, height) and the columns (samples, width) of each rectangle."""
        top, left, bottom, right = (side[:, None] for side in self.boxes.T)
        rows, columns = np.arange(height)[None], np.arange(width)[None]
        return (rows >= top) & (rows < bottom), (columns >= left) & (columns < right)


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


def erase(images_nchw: Tensor, samples: Tensor, rows: Tensor, columns: Tensor) -> None:
    """Sets the rectangles to zero, in place; grey after normalisation, torchvision's default."""
    erased = rows[:, None, :, None] & columns[:, None, None, :]
    if images_nchw.is_contiguous(memory_format=torch.channels_last):
        # In memory order, so that selecting whole images is a plain copy.
        images_nchw, erased = images_nchw.permute(0, 2, 3, 1), erased.permute(0, 2, 3, 1)
    images_nchw.index_copy_(0, samples, images_nchw.index_select(0, samples).masked_fill_(erased, 0))
