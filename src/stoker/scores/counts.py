"""Dice, IoU and surface Dice of validation patches, counted on the device: the cheap approximation while training.

Patches are scored as they come, so surfaces end at a patch's border and voxels that two patches share count twice;
`stoker eval` scores whole volumes exactly (overlap, surface_dice).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stoker.errors import UserError

MOST_TOLERANCE = 16.0
"""Voxels. Every offset within the tolerance is compared: 17,077 of them at 16."""
_KINDS = ("both", "predicted", "labelled", "near", "surface")
"""Voxels of a class in prediction and label, in each of them; voxels of either surface that have the other's within the
tolerance; voxels of both surfaces."""


class VolumeCounts:
    """Counts by case and class; adding a batch never waits for the device."""

    def __init__(
        self, cases: int, classes: int, device: torch.device | str, *, ignore: int, tolerance: float = 2.0
    ) -> None:
        if tolerance > MOST_TOLERANCE:
            raise UserError(
                "tolerance-too-large",
                f"surface_tolerance is {tolerance:g} voxels",
                why=f"validation compares every voxel within it; at most {MOST_TOLERANCE:g} are practical",
                hint="surface_tolerance=2; `stoker eval` measures any tolerance",
            )
        device = torch.device(device)
        # Counts up to 2^53 are exact in float64; Apple's devices have no float64.
        kind = torch.float32 if device.type == "mps" else torch.float64
        self.tensor = torch.zeros(cases, classes, len(_KINDS), dtype=kind, device=device)
        """(cases, classes, kinds of count): ranks add theirs up, by all_reduce, before `result`."""
        self._classes = classes
        self._ignore = ignore
        self._small = torch.uint8 if classes <= 256 else torch.int16
        self._offsets = _half_ball(tolerance)

    def add(self, logits: Tensor, labels: Tensor, cases: Sequence[int] | NDArray[Any], valid: Any = None) -> None:
        """Adds a batch: logits (N, classes, z, y, x), labels (N, z, y, x); `cases` and `valid` (N) are on the host.

        Patches that are not valid, and voxels whose label is the ignore label, do not count."""
        known = labels != self._ignore
        guess = logits.detach().argmax(1).to(self._small) * known
        truth = labels.to(self._small) * known
        counts = torch.stack(
            [
                self._by_class(truth * (guess == truth)),
                self._by_class(guess),
                self._by_class(truth),
                *self._surfaces(guess, truth, known),
            ],
            dim=2,
        ).to(self.tensor.dtype)
        # Indices that the host knows make views; a tensor of indices would have to be copied to the device first.
        for slot, case in enumerate(np.asarray(cases).tolist()):
            if valid is None or bool(valid[slot]):
                self.tensor[case].add_(counts[slot])

    def per_case(self) -> dict[str, NDArray[np.float64]]:
        """`dice`, `iou` and `surface_dice` of each case in percent: the mean over the classes but 0 that occur in its
        prediction or label, NaN if none does. Waits for the device."""
        both, predicted, labelled, near, surface = np.moveaxis(self.tensor.cpu().double().numpy()[:, 1:], 2, 0)
        return {
            "dice": _mean_ratio(2 * both, predicted + labelled),
            "iou": _mean_ratio(both, predicted + labelled - both),
            "surface_dice": _mean_ratio(near, surface),
        }

    def result(self) -> dict[str, float]:
        """The means of `per_case` over the cases; a score that no case has is left out. Waits for the device."""
        found = {}
        for name, values in self.per_case().items():
            if not np.isnan(values).all():
                found[name] = float(np.nanmean(values))
        return found

    def _by_class(self, values: Tensor) -> Tensor:
        """How often each class occurs in each sample (N, classes); bincount would wait to learn its size."""
        flat = values.flatten(1).long()
        return flat.new_zeros(len(flat), self._classes).scatter_add_(1, flat, flat.new_ones(()).expand_as(flat))

    def _surfaces(self, guess: Tensor, truth: Tensor, known: Tensor) -> tuple[Tensor, Tensor]:
        """By class: voxels of either surface with the other's within the tolerance, and voxels of both surfaces."""
        ours, theirs = guess * _edges(guess, known), truth * _edges(truth, known)
        near_ours, near_theirs = torch.zeros_like(known), torch.zeros_like(known)
        # All classes at once, by comparing class numbers, and both directions: a pair of voxels is compared once.
        for offset in self._offsets:
            here, there = _overlap(offset, known.shape[1:])
            for one, other in ((here, there), (there, here)) if any(offset) else ((here, there),):
                same = (ours[one] == theirs[other]) & (ours[one] > 0)
                near_ours[one] |= same
                near_theirs[other] |= same
        near = self._by_class(ours * near_ours) + self._by_class(theirs * near_theirs)
        return near, self._by_class(ours) + self._by_class(theirs)


Box = tuple[slice, ...]


def _edges(values: Tensor, known: Tensor) -> Tensor:
    """Voxels with a neighbour of another class, of the six; a neighbour outside the patch or unlabelled is none."""
    edge = torch.zeros_like(known)
    for axis in range(1, 4):
        size = values.shape[axis]
        low, high = values.narrow(axis, 0, size - 1), values.narrow(axis, 1, size - 1)
        both_known = known.narrow(axis, 0, size - 1) & known.narrow(axis, 1, size - 1)
        differ = (low != high) & both_known
        edge.narrow(axis, 0, size - 1).logical_or_(differ)
        edge.narrow(axis, 1, size - 1).logical_or_(differ)
    return edge


def _half_ball(tolerance: float) -> list[tuple[int, int, int]]:
    """The offsets within a distance, one of each opposite pair, the nearest first."""
    return sorted(_positive_offsets(tolerance), key=lambda offset: (sum(a * a for a in offset), offset))


def _positive_offsets(tolerance: float) -> Iterator[tuple[int, int, int]]:
    reach = range(-int(tolerance), int(tolerance) + 1)
    for z in reach:
        for y in reach:
            for x in reach:
                if z * z + y * y + x * x <= tolerance * tolerance and (z, y, x) >= (0, 0, 0):
                    yield z, y, x


def _overlap(offset: tuple[int, int, int], shape: Sequence[int]) -> tuple[Box, Box]:
    """The voxels of a batch that have one at the offset, and those."""
    here, there = [slice(None)], [slice(None)]
    for step, size in zip(offset, shape, strict=True):
        length = max(0, size - abs(step))
        here.append(slice(max(0, -step), max(0, -step) + length))
        there.append(slice(max(0, step), max(0, step) + length))
    return tuple(here), tuple(there)


def _mean_ratio(part: NDArray[np.float64], whole: NDArray[np.float64]) -> NDArray[np.float64]:
    """100 · part / whole, the mean over the classes where `whole` is not zero; NaN where there is none."""
    occurs = whole > 0
    ratios = np.divide(100 * part, whole, out=np.zeros_like(part), where=occurs)
    means = np.full(len(part), np.nan)
    np.divide(ratios.sum(1), occurs.sum(1), out=means, where=occurs.any(1))
    return means
