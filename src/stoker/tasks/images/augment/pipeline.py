"""What happens to a batch on the device, in this order: flip, policy, floats, erasing, mixing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stoker.config import Config
from stoker.loader.rng import Keys, mix, uniforms
from stoker.tasks.device_copies import Copy, copy_to, kept_on, pack
from stoker.tasks.images.augment.operations import plus
from stoker.tasks.images.augment.policies import (
    Level,
    Policy,
    RandAugment,
    TrivialAugmentWide,
    arrange,
    run_layers,
)
from stoker.tasks.images.decode.headers import Box

Colour = tuple[float, float, float]

IMAGENET_MEAN: Colour = (0.485, 0.456, 0.406)
IMAGENET_STD: Colour = (0.229, 0.224, 0.225)

ERASING, MIXING = 17, 18  # purposes of these draws; see stoker.tasks.images.augment.policies.POLICY
ERASED_AREA = (0.02, 1 / 3)
ERASED_ASPECT = (0.3, 3.3)
ERASING_TRIES = 10


class Recipe(NamedTuple):
    """How one batch is mixed."""

    kept: float
    """The share of itself that each sample keeps, in pixels and in its target."""
    box: Box | None
    """CutMix: the rectangle that comes from the partner. None is mixup."""


@dataclass(frozen=True)
class Mixer:
    """Decides how batches are mixed, from (seed, epoch, step, part) alone."""

    mixup_alpha: float = 0.0
    cutmix_alpha: float = 0.0
    probability: float = 1.0
    switch_probability: float = 0.5
    label_smoothing: float = 0.0
    num_classes: int = 1000
    seed: int = 0

    def draw(self, epoch: int, step: int, part: int, height: int, width: int) -> Recipe | None:
        """How a batch is mixed; None if it is not.

        `part` numbers the batches of one update over all ranks: each has its own draw. One for all of them would mix
        thousands of images alike.
        """
        if self.mixup_alpha == 0 and self.cutmix_alpha == 0:
            return None
        # A generator for this batch only, because Beta has no short formula; there is no state to save.
        key = mix(mix(mix(mix(self.seed, epoch), step), part), MIXING)
        generator = np.random.Generator(np.random.PCG64(int(key)))
        lot, switch, down, right = generator.random(4)
        if lot >= self.probability:
            return None
        cut = self.mixup_alpha == 0 or (self.cutmix_alpha > 0 and switch < self.switch_probability)
        alpha = self.cutmix_alpha if cut else self.mixup_alpha
        kept = float(generator.beta(alpha, alpha))
        if not cut:
            return Recipe(kept, None)
        box = cut_box(kept, down, right, height, width)
        # The box is clipped at the borders and has whole pixels: the targets follow the pixels.
        return Recipe(1 - box.height * box.width / (height * width), box)


class Augmented(NamedTuple):
    """A batch for the model."""

    images: Tensor
    targets: Tensor
    """(samples, classes) in float32, each row sums to 1."""
    labels: Tensor
    mixed: bool
    """Whether images contain parts of others: then a sample does not have one true class."""


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
        labels: NDArray[np.int64],
        flips: NDArray[np.bool_],
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
        # What is decided about the batch, all of it on the host, so that it goes to the device in one piece.
        recipe = self.mixer.draw(epoch, step, part, height, width)
        rows = target_rows(labels, self.mixer.num_classes, self.mixer.label_smoothing, recipe)
        arrays: dict[str, NDArray[Any]] = {"labels": labels, "columns": rows.columns, "values": rows.values}
        layers, order = None, np.arange(len(labels))
        if self.policy is not None:
            layers = arrange(self.policy.plan(keys, height, width), height, width, self.policy.fill)
            arrays |= layers.arrays
            order = layers.first_order
        flipped = np.flatnonzero(flips[order])
        arrays |= {"first_order": order, "flipped": flipped}
        erasures = draw_erasures(keys, self.erasing, height, width) if self.erasing > 0 else None
        if erasures is not None:
            erased_rows, erased_columns = erasures.masks(height, width)
            arrays |= {"erased": erasures.samples, "erased_rows": erased_rows, "erased_columns": erased_columns}
        packed = pack(arrays)
        there = packed.to_device(copy or copy_to(images_nhwc.device))
        # The order of timm and torchvision. Bytes for as long as possible: they are a quarter of the size of floats.
        images = images_nhwc
        if len(flipped) or layers is not None:
            images = images.index_select(0, there["first_order"])  # also the copy that the next steps overwrite
        if len(flipped):
            flip(images, there["flipped"])
        if layers is not None:
            images = run_layers(images, layers.layers, there)
        mixup = recipe is not None and recipe.box is None
        inputs = to_float(images, self.mean, self.std, torch.float32 if mixup else self.dtype, self.memory_format)
        if erasures is not None and len(erasures.samples):
            erase(inputs, there["erased"], there["erased_rows"], there["erased_columns"])
        if recipe is not None:
            inputs = mix_images(inputs, recipe, self.dtype)
        targets = fill_targets(rows.elsewhere, there["columns"], there["values"], self.mixer.num_classes)
        return Augmented(inputs, targets, there["labels"], recipe is not None and recipe.kept != 1)


@dataclass(frozen=True)
class EvalPrepare:
    """Turns a batch of bytes into a model's input, without anything random."""

    mean: Colour = IMAGENET_MEAN
    std: Colour = IMAGENET_STD
    dtype: torch.dtype = torch.float32
    memory_format: torch.memory_format = torch.channels_last

    def __call__(self, images_nhwc: Tensor) -> Tensor:
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


# Mixup and CutMix of a whole batch, with its soft targets


def mix_images(images_nchw: Tensor, recipe: Recipe, dtype: torch.dtype) -> Tensor:
    """Mixes each sample with its mirror image in the batch, the first with the last and so on; overwrites the input.

    Mixup wants float32 images: products and sum are computed in it, and rounded to `dtype` once. In half precision each
    of the three would round. CutMix only moves pixels, so its images already have the `dtype`.
    """
    # In a batch of odd size the middle sample is its own partner, and does not change: the last batch of an epoch needs
    # no special case.
    kept, box = recipe
    if box is not None:
        rows, columns = slice(box.top, box.top + box.height), slice(box.left, box.left + box.width)
        part = images_nchw[:, :, rows, columns]
        part.copy_(part.flip(0))
        return images_nchw
    partners = images_nchw.flip(0).mul_(1 - kept)
    images_nchw.mul_(kept)
    if dtype == images_nchw.dtype:
        return images_nchw.add_(partners)
    return torch.add(images_nchw, partners, out=torch.empty_like(images_nchw, dtype=dtype))


class TargetRows(NamedTuple):
    """The soft targets of a batch in short: the value at most classes, and the others."""

    elsewhere: float
    columns: NDArray[np.int64]
    """(samples, 1), or 2 if samples are mixed."""
    values: NDArray[np.float32]


def target_rows(labels: NDArray[np.int64], num_classes: int, smoothing: float, recipe: Recipe | None) -> TargetRows:
    """1 at the label, minus what smoothing spreads over all classes; mixed like the images."""
    spread = smoothing / num_classes
    off, on = np.float32(spread), np.float32(1 - smoothing + spread)
    if recipe is None:
        return TargetRows(float(off), labels[:, None], np.full((len(labels), 1), on))
    partners = labels[::-1]
    kept, rest = np.float32(recipe.kept), np.float32(1 - recipe.kept)
    own = on * kept + np.where(partners == labels, on, off) * rest
    other = np.where(partners == labels, on, off) * kept + on * rest
    columns, values = np.stack([labels, partners], axis=1), np.stack([own, other], axis=1)
    return TargetRows(float(off * kept + off * rest), columns, values)


def fill_targets(elsewhere: float, columns: Tensor, values: Tensor, num_classes: int) -> Tensor:
    """Soft targets (samples, classes) in float32; each row sums to 1."""
    targets = torch.full((len(columns), num_classes), elsewhere, device=columns.device, dtype=torch.float32)
    return targets.scatter_(1, columns, values)


def soft_targets(labels: Tensor, num_classes: int, smoothing: float = 0.0) -> Tensor:
    """The targets of labels that are already on the device, without mixing."""
    spread = smoothing / num_classes
    rows = torch.full((len(labels), num_classes), spread, device=labels.device, dtype=torch.float32)
    return rows.scatter_(1, labels[:, None], 1 - smoothing + spread)


def cut_box(kept: float, down: float, right: float, height: int, width: int) -> Box:
    """A rectangle of the image's shape with its centre anywhere, clipped at the borders."""
    side = (1 - kept) ** 0.5
    top, bottom = _cut_side(int(height * side), int(down * height), height)
    left, end = _cut_side(int(width * side), int(right * width), width)
    return Box(top, left, bottom - top, end - left)


def _cut_side(length: int, centre: int, limit: int) -> tuple[int, int]:
    return max(0, centre - length // 2), min(limit, centre + (length + 1) // 2)
