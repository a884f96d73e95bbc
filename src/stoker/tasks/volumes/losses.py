"""Losses for volumes: weighted sums of terms, over labelled voxels only.

A loss is the mean over the samples of a batch, so micro-batches and ranks add up to the whole batch exactly, which
batch Dice would not. Everything is computed in float32, whatever the autocast; nothing is read from the device.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.nn import functional

from stoker.core.errors import UserError, did_you_mean

SMOOTHING = 1e-5
"""Added to numerator and denominator of Dice and Tversky, as in MONAI and nnU-Net."""
CLDICE_SMOOTHING = 1.0
FOCAL_GAMMA = 2.0
FALSE_POSITIVES, FALSE_NEGATIVES = 0.3, 0.7
"""Tversky's weights: a missed voxel costs more than an extra one, which suits thin structures."""
CLDICE_EROSIONS = 3
"""As in MONAI: enough for structures up to seven voxels thick."""
SKELETON_EROSIONS = 8
"""For skeletons of labels, made once a batch and without gradients: what is thicker than 17 voxels keeps its core."""

VolumeLoss = Callable[[Tensor | Sequence[Tensor], Tensor], Tensor]


def build_volume_loss(text: str, classes: int, ignore: int) -> VolumeLoss:
    """The loss of a sum like `dice + ce + 0.2 cldice`.

    It takes logits (N, classes, Z, Y, X), or a list of them, full resolution first, and labels (N, Z, Y, X). Voxels
    with the label `ignore` never count; a sample without any other contributes 0.
    """
    terms = parse_terms(text)
    if classes < 2:
        raise UserError(
            "bad-volume-loss",
            f"num_classes: {classes} leaves nothing to distinguish",
            why="class 0 is the background, and every other class is compared with it",
            hint="num_classes=2",
        )

    def at_one_resolution(logits: Tensor, labels: Tensor) -> Tensor:
        case = LossInputs(logits, labels, ignore)
        total = torch.stack([weight * TERMS[name](case) for name, weight in terms]).sum(dim=0)
        return total.masked_fill(case.voxels == 0, 0.0).mean()

    def loss(outputs: Tensor | Sequence[Tensor], labels: Tensor) -> Tensor:
        first = outputs if isinstance(outputs, Tensor) else outputs[0]
        with torch.autocast(first.device.type, enabled=False):
            if isinstance(outputs, Tensor):
                return at_one_resolution(outputs, labels)
            # Each resolution counts half of the next larger one.
            weights = [0.5**level for level in range(len(outputs))]
            losses = [
                weight / sum(weights) * at_one_resolution(output, labels_at(output, labels))
                for output, weight in zip(outputs, weights, strict=True)
            ]
            return torch.stack(losses).sum()

    return loss


def parse_terms(text: str) -> list[tuple[str, float]]:
    """Names and weights of the terms of a sum; raises UserError."""
    terms: dict[str, float] = {}
    for part in text.split("+"):
        match = _TERM.fullmatch(part.strip())
        if match is None:
            raise _bad(text, f"'{part.strip()}' is not a term: expected a name, or a weight and a name")
        name = match["name"]
        weight = 1.0 if match["weight"] is None else float(match["weight"])
        if name not in TERMS:
            question = did_you_mean(name, TERMS)
            raise _bad(text, f"'{name}' is not a loss; known are {', '.join(TERMS)}", question)
        if name in terms:
            raise _bad(text, f"'{name}' is in it twice")
        if not (math.isfinite(weight) and weight > 0):
            raise _bad(text, f"the weight of '{name}' is {match['weight']}, but must be a number above 0")
        terms[name] = weight
    return list(terms.items())


# A plus sign joins terms, so an exponent has none or a minus.
_TERM = re.compile(r"(?:(?P<weight>\d+\.?\d*(?:[eE]-?\d+)?|\.\d+)\s*\*?\s*)?(?P<name>[a-z_]+)")


def _bad(text: str, why: str, hint: str | None = None) -> UserError:
    return UserError("bad-volume-loss", f"volume_loss: {text}", why=why, hint=hint or 'volume_loss="dice + ce"')


def labels_at(output: Tensor, labels: Tensor) -> Tensor:
    """The label in the middle of each voxel of a lower resolution; unlabelled ones stay unlabelled."""
    for axis in (1, 2, 3):
        coarse, fine = output.shape[axis + 1], labels.shape[axis]
        step = fine // coarse
        assert coarse * step == fine, f"{fine} voxels do not become {coarse}"
        labels = labels.narrow(axis, step // 2, fine - step // 2)[(slice(None),) * axis + (slice(None, None, step),)]
    return labels


@dataclass(frozen=True)
class LossInputs:
    """Logits, labels, and what the terms share, computed when the first of them asks."""

    logits: Tensor
    labels: Tensor
    ignore: int

    @cached_property
    def labelled(self) -> Tensor:
        return self.labels != self.ignore

    @cached_property
    def voxels(self) -> Tensor:
        """Labelled voxels of each sample."""
        return self.labelled.sum(dim=(1, 2, 3))

    @cached_property
    def probabilities(self) -> Tensor:
        """Probabilities of all classes but the background, (N, classes - 1, Z, Y, X); 0 where there is no label.

        The product also keeps gradients from unlabelled voxels, exactly.
        """
        return self.logits.float().softmax(dim=1)[:, 1:] * self.labelled.unsqueeze(1)

    @cached_property
    def truth(self) -> Tensor:
        """1 where the label is the class, otherwise 0; the shape of `probabilities`."""
        classes = torch.arange(1, self.logits.shape[1], device=self.labels.device).view(1, -1, 1, 1, 1)
        here = (self.labels.unsqueeze(1) == classes) & self.labelled.unsqueeze(1)
        return here.float()

    @cached_property
    def cross_entropies(self) -> Tensor:
        """The cross-entropy of each voxel; 0 where there is no label."""
        return functional.cross_entropy(self.logits.float(), self.labels, ignore_index=self.ignore, reduction="none")

    def mean_of_labelled(self, by_voxel: Tensor) -> Tensor:
        """The mean over the labelled voxels of each sample; unlabelled voxels have the value 0."""
        return by_voxel.sum(dim=(1, 2, 3)) / self.voxels.clamp(min=1)


# Terms: from a case to a loss by sample.


def _cross_entropy(case: LossInputs) -> Tensor:
    return case.mean_of_labelled(case.cross_entropies)


def _focal(case: LossInputs) -> Tensor:
    """Cross-entropy that weighs a voxel less the better it is predicted (arXiv 1708.02002)."""
    missing = -torch.expm1(-case.cross_entropies)
    return case.mean_of_labelled(missing**FOCAL_GAMMA * case.cross_entropies)


def _dice(case: LossInputs) -> Tensor:
    shared = _by_class(case.probabilities * case.truth)
    both = _by_class(case.probabilities) + _by_class(case.truth)
    return (1 - (2 * shared + SMOOTHING) / (both + SMOOTHING)).mean(dim=1)


def _tversky(case: LossInputs) -> Tensor:
    hits = _by_class(case.probabilities * case.truth)
    too_many = _by_class(case.probabilities) - hits
    missed = _by_class(case.truth) - hits
    score = (hits + SMOOTHING) / (hits + FALSE_POSITIVES * too_many + FALSE_NEGATIVES * missed + SMOOTHING)
    return (1 - score).mean(dim=1)


def _cldice(case: LossInputs) -> Tensor:
    """Dice of the centre lines: how much of each skeleton lies in the other mask (arXiv 2003.07311).

    Unlabelled voxels are background to both skeletons, so a sheet that leaves the labelled region ends there in both.
    """
    predicted = _soft_skeleton(case.probabilities, CLDICE_EROSIONS)
    with torch.no_grad():
        true = _soft_skeleton(case.truth, CLDICE_EROSIONS)
    precision = _share(_by_class(predicted * case.truth), _by_class(predicted))
    recall = _share(_by_class(true * case.probabilities), _by_class(true))
    return (1 - 2 * precision * recall / (precision + recall)).mean(dim=1)


def _skeleton_recall(case: LossInputs) -> Tensor:
    """How much of the labels' skeleton, made a voxel thicker within the label, is missed (arXiv 2404.03010).

    The skeleton is made here, on the device, from the augmented labels, by the erosions and openings of clDice: for a
    mask of zeros and ones that is Lantuéjoul's morphological skeleton. Thinning keeps thin lines connected, but works
    voxel by voxel on a CPU, which would be the slowest part of making a batch. A sheet of two voxels, which has no
    middle, stays whole. Only classes that occur count.
    """
    with torch.no_grad():
        skeleton = _soft_skeleton(case.truth, SKELETON_EROSIONS, core=True)
        tube = _dilated(skeleton) * case.truth
        voxels = _by_class(tube)
        occurs = voxels > 0
    missed = 1 - _by_class(case.probabilities * tube) / voxels.clamp(min=1)
    return (missed * occurs).sum(dim=1) / occurs.sum(dim=1).clamp(min=1)


TERMS: dict[str, Callable[[LossInputs], Tensor]] = {
    "dice": _dice,
    "ce": _cross_entropy,
    "focal": _focal,
    "tversky": _tversky,
    "cldice": _cldice,
    "skeleton_recall": _skeleton_recall,
}


def _by_class(voxels: Tensor) -> Tensor:
    return voxels.sum(dim=(2, 3, 4))


def _share(part: Tensor, whole: Tensor) -> Tensor:
    return (part + CLDICE_SMOOTHING) / (whole + CLDICE_SMOOTHING)


def _soft_skeleton(mask: Tensor, erosions: int, *, core: bool = False) -> Tensor:
    """What openings remove from a mask and from its repeated erosions; `core` adds what is left at the end."""
    skeleton = torch.relu(mask - _dilated(_eroded(mask)))
    for _ in range(erosions):
        mask = _eroded(mask)
        lost = torch.relu(mask - _dilated(_eroded(mask)))
        skeleton = skeleton + torch.relu(lost - skeleton * lost)
    return torch.maximum(skeleton, _eroded(mask)) if core else skeleton


def _eroded(mask: Tensor) -> Tensor:
    """The least of a voxel and its six neighbours."""
    inverse = -mask
    z = functional.max_pool3d(inverse, (3, 1, 1), 1, (1, 0, 0))
    y = functional.max_pool3d(inverse, (1, 3, 1), 1, (0, 1, 0))
    x = functional.max_pool3d(inverse, (1, 1, 3), 1, (0, 0, 1))
    return -torch.maximum(torch.maximum(z, y), x)


def _dilated(mask: Tensor) -> Tensor:
    return functional.max_pool3d(mask, 3, 1, 1)
