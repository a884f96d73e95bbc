"""Mixup and CutMix of a whole batch, with its soft targets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from stoker.data.draws import mix
from stoker.data.images.headers import Box

MIXING = 18  # purpose of these draws; see stoker.augment.policies.POLICY


class Mixed(NamedTuple):
    """A batch for the model."""

    images: Tensor
    targets: Tensor
    """(samples, classes), each row sums to 1."""
    mixed: bool
    """Whether images contain parts of others: then a sample does not have one true class."""


class Recipe(NamedTuple):
    """How one batch is mixed."""

    kept: float
    """Lambda: the share of itself that each sample keeps, as drawn."""
    box: Box | None
    """CutMix: the rectangle that comes from the partner. None is mixup."""


@dataclass(frozen=True)
class Mixer:
    """Mixes batches, as determined by (seed, epoch, step) alone."""

    mixup_alpha: float = 0.0
    cutmix_alpha: float = 0.0
    probability: float = 1.0
    switch_probability: float = 0.5
    label_smoothing: float = 0.0
    num_classes: int = 1000
    seed: int = 0

    def __call__(self, images_nchw: Tensor, labels: Tensor, epoch: int, step: int) -> Mixed:
        """The batch mixed with its own reverse; changes the images in place."""
        targets = soft_targets(labels, self.num_classes, self.label_smoothing)
        recipe = self.draw(epoch, step, images_nchw.shape[-2], images_nchw.shape[-1])
        if recipe is None:
            return Mixed(images_nchw, targets, False)
        return apply_mixing(images_nchw, targets, recipe)

    def draw(self, epoch: int, step: int, height: int, width: int) -> Recipe | None:
        """How this step's batch is mixed; None if it is not."""
        if self.mixup_alpha == 0 and self.cutmix_alpha == 0:
            return None
        # A generator for this batch only, because Beta has no short formula; there is no state to save.
        generator = np.random.Generator(np.random.PCG64(int(mix(mix(mix(self.seed, epoch), step), MIXING))))
        lot, switch, down, right = generator.random(4)
        if lot >= self.probability:
            return None
        cut = self.mixup_alpha == 0 or (self.cutmix_alpha > 0 and switch < self.switch_probability)
        alpha = self.cutmix_alpha if cut else self.mixup_alpha
        kept = float(generator.beta(alpha, alpha))
        return Recipe(kept, cut_box(kept, down, right, height, width) if cut else None)


def apply_mixing(images_nchw: Tensor, targets: Tensor, recipe: Recipe) -> Mixed:
    """Mixes each sample with its mirror image in the batch: the first with the last, and so on."""
    # In a batch of odd size the middle sample is its own partner, and neither it nor its target changes: the last batch
    # of an epoch needs no special case.
    kept, box = recipe
    if box is None:
        partners = images_nchw.flip(0).mul_(1 - kept)
        images_nchw.mul_(kept).add_(partners)
    else:
        rows, columns = slice(box.top, box.top + box.height), slice(box.left, box.left + box.width)
        part = images_nchw[:, :, rows, columns]
        part.copy_(part.flip(0))
        # The box is clipped at the borders and has whole pixels: the targets follow the pixels.
        kept = 1 - box.height * box.width / (images_nchw.shape[-2] * images_nchw.shape[-1])
    return Mixed(images_nchw, targets * kept + targets.flip(0) * (1 - kept), kept != 1)


def soft_targets(labels: Tensor, num_classes: int, smoothing: float = 0.0) -> Tensor:
    """One row for each label: 1 at the label, minus what smoothing spreads over all classes."""
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
