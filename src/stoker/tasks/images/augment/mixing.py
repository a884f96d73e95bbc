"""Mixup and CutMix of a whole batch, with its soft targets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stoker.loader.rng import mix
from stoker.tasks.images.decode.headers import Box

MIXING = 18  # purpose of these draws; see stoker.tasks.images.augment.policies.POLICY


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
