"""Dice, IoU and surface Dice of validation patches, counted on the device: the cheap approximation while training.

Each patch is scored alone, so surfaces end at its border and voxels that two patches share count twice;
`stoker eval` scores whole volumes exactly (scores/whole.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stoker.core.errors import UserError

MOST_TOLERANCE = 16.0
"""Voxels. Surfaces are spread over a ball line by line: 13 lines for a tolerance of 2, 797 for 16."""
_BYTE, _LONG = 8, 63
"""Classes that have a bit each in a byte, and in 64 bits with a sign."""
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
        self._bits = torch.uint8 if classes <= 1 + _BYTE else torch.int64
        self._groups = _bit_tables(classes, self._bits, device)
        self._reach = _reach(tolerance)

    def add(self, logits: Tensor, labels: Tensor, cases: Sequence[int] | NDArray[Any], valid: Any = None) -> None:
        """Adds a batch: logits (N, classes, z, y, x), labels (N, z, y, x); `cases` and `valid` (N) are on the host.

        Patches that are not valid, and voxels whose label is the ignore label, do not count."""
        known = labels != self._ignore
        # Not argmax, which takes ten times as long on a CPU.
        guess = logits.detach().max(1).indices.to(self._small) * known
        truth = labels.to(self._small) * known
        overlap = [self._by_class(values) for values in (truth * (guess == truth), guess, truth)]
        counts = torch.stack([*overlap, *self._surfaces(guess, truth, known)], dim=2).to(self.tensor.dtype)
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
        scores = self.per_case().items()
        return {name: float(np.nanmean(values)) for name, values in scores if not np.isnan(values).all()}

    def _by_class(self, values: Tensor) -> Tensor:
        """How often each class occurs in each sample (N, classes); bincount would wait to learn its size."""
        flat = values.flatten(1).long()
        return flat.new_zeros(len(flat), self._classes).scatter_add_(1, flat, flat.new_ones(()).expand_as(flat))

    def _surfaces(self, guess: Tensor, truth: Tensor, known: Tensor) -> tuple[Tensor, Tensor]:
        """By class: voxels of either surface with the other's within the tolerance, and voxels of both surfaces."""
        surfaces = guess * _edges(guess, known), truth * _edges(truth, known)
        near = torch.zeros_like(known), torch.zeros_like(known)
        for table in self._groups:
            # A bit for each class, so that all of them are spread at once.
            bits = [table[one.long()] for one in surfaces]
            spread = [_spread(one, self._reach) for one in bits]
            for which in (0, 1):
                near[which].logical_or_((bits[which] & spread[1 - which]) != 0)
        found = [self._by_class(one * close) for one, close in zip(surfaces, near, strict=True)]
        return found[0] + found[1], self._by_class(surfaces[0]) + self._by_class(surfaces[1])


def _edges(values: Tensor, known: Tensor) -> Tensor:
    """Voxels with a neighbour of another class among the six; those outside the patch or unlabelled do not count."""
    edge = torch.zeros_like(known)
    for axis in range(1, 4):
        size = values.shape[axis]
        differ = values.narrow(axis, 0, size - 1) != values.narrow(axis, 1, size - 1)
        differ &= known.narrow(axis, 0, size - 1)
        differ &= known.narrow(axis, 1, size - 1)
        edge.narrow(axis, 0, size - 1).logical_or_(differ)
        edge.narrow(axis, 1, size - 1).logical_or_(differ)
    return edge


def _bit_tables(classes: int, kind: torch.dtype, device: torch.device) -> list[Tensor]:
    """The bit of each class; as many tables as are needed for all classes but 0 to have one."""
    width = _BYTE if kind == torch.uint8 else _LONG
    tables = []
    for first in range(1, classes, width):
        last = min(classes, first + width)
        values = [1 << number - first if first <= number < last else 0 for number in range(classes)]
        tables.append(torch.tensor(values, dtype=kind, device=device))
    return tables


def _reach(tolerance: float) -> dict[int, list[tuple[int, int]]]:
    """The ball as lines along x: for each half-length of a line, the steps along z and y where it lies."""
    lines: dict[int, list[tuple[int, int]]] = {}
    steps = range(-int(tolerance), int(tolerance) + 1)
    for z in steps:
        for y in steps:
            left = tolerance * tolerance - z * z - y * y
            if left >= 0:
                lines.setdefault(int(left**0.5), []).append((z, y))
    return dict(sorted(lines.items()))


def _spread(bits: Tensor, reach: dict[int, list[tuple[int, int]]]) -> Tensor:
    """Every bit at all voxels of the ball around it."""
    depth, height, width = bits.shape[1:]
    found, lines, length = torch.zeros_like(bits), bits.clone(), 0
    for wanted, steps in reach.items():
        while length < wanted:
            length += 1
            if length < width:
                lines[..., length:].bitwise_or_(bits[..., :-length])
                lines[..., :-length].bitwise_or_(bits[..., length:])
        for z, y in steps:
            if abs(z) < depth and abs(y) < height:
                to = found[:, max(0, z) : depth + min(0, z), max(0, y) : height + min(0, y)]
                to.bitwise_or_(lines[:, max(0, -z) : depth + min(0, -z), max(0, -y) : height + min(0, -y)])
    return found


def _mean_ratio(part: NDArray[np.float64], whole: NDArray[np.float64]) -> NDArray[np.float64]:
    """100 · part / whole, the mean over the classes where `whole` is not zero; NaN where there is none."""
    occurs = whole > 0
    ratios = np.divide(100 * part, whole, out=np.zeros_like(part), where=occurs)
    means = np.full(len(part), np.nan)
    np.divide(ratios.sum(1), occurs.sum(1), out=means, where=occurs.any(1))
    return means
