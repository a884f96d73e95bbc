"""Exact scores of a whole volume: Dice, IoU and surface Dice of every class, and the competition's score on demand."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from stoker.core.console import Advance
from stoker.tasks.volumes.scores.competition import SurfaceScore, score_surface
from stoker.tasks.volumes.scores.surface_dice import ISOTROPIC, Spacing, count_surfaces

ScoreName = Literal["segmentation", "vesuvius-surface"]
SLAB = 32
"""Slices that are counted together."""


@dataclass(frozen=True)
class ClassScores:
    """The scores of one class, 0 to 1; None if it is neither in the prediction nor in the label."""

    dice: float | None
    iou: float | None
    surface_dice: float | None


@dataclass(frozen=True)
class VolumeScores:
    """The scores of one volume."""

    id: str
    classes: tuple[ClassScores, ...]
    """Of the classes 1, 2, …"""
    labelled: float
    """Share of the voxels that are labelled, and so were scored."""
    competition: SurfaceScore | None = field(default=None)

    @property
    def dice(self) -> float | None:
        """The mean over the classes that occur; None if none does."""
        return mean_of([one.dice for one in self.classes])

    @property
    def iou(self) -> float | None:
        return mean_of([one.iou for one in self.classes])

    @property
    def surface_dice(self) -> float | None:
        return mean_of([one.surface_dice for one in self.classes])

    @property
    def rank(self) -> float:
        """What volumes are ordered by, the worst first; one without anything to score comes last."""
        if self.competition is not None:
            return self.competition.score
        return 2.0 if self.dice is None else self.dice


def score_volume(
    name: str,
    prediction: NDArray[Any],
    label: NDArray[Any],
    *,
    classes: int,
    ignore: int | None,
    tolerance: float = 2.0,
    spacing: Spacing = ISOTROPIC,
    score: ScoreName = "segmentation",
    processes: int = 1,
    progress: Advance | None = None,
) -> VolumeScores:
    """Scores a prediction (z, y, x) of classes. Voxels whose label is `ignore` do not count for Dice and IoU; for
    surfaces, which need neighbours, they are background in both. `progress` counts the octants of the competition's
    score, which take the longest."""
    matrix, known = confusion(prediction, label, classes, ignore)
    scores = []
    for number in range(1, classes):
        both, ours, theirs = matrix[number, number], matrix[:, number].sum(), matrix[number].sum()
        if not ours + theirs:
            scores.append(ClassScores(None, None, None))
            continue
        one, two = prediction == number, label == number
        if ignore is not None:
            one &= label != ignore
        surface = count_surfaces(one, two, tolerance, spacing).dice(spacing)
        scores.append(ClassScores(float(2 * both / (ours + theirs)), float(both / (ours + theirs - both)), surface))
    competition = score_surface(prediction, label, ignore, processes, progress) if score == "vesuvius-surface" else None
    return VolumeScores(name, tuple(scores), known / max(1, label.size), competition)


def confusion(
    prediction: NDArray[Any], label: NDArray[Any], classes: int, ignore: int | None
) -> tuple[NDArray[np.int64], int]:
    """How many voxels of each class (row) were given each class (column), and how many are labelled."""
    matrix, known = np.zeros(classes * classes, np.int64), 0
    for begin in range(0, len(label), SLAB):
        ours, theirs = prediction[begin : begin + SLAB], label[begin : begin + SLAB]
        if ignore is not None:
            labelled = theirs != ignore
            ours, theirs = ours[labelled], theirs[labelled]
        known += theirs.size
        pairs = theirs.astype(np.int64).ravel() * classes + ours.ravel()
        matrix += np.bincount(pairs, minlength=classes * classes)
    return matrix.reshape(classes, classes), known


def mean_of(values: list[float | None]) -> float | None:
    """The mean over what there is; None if there is nothing."""
    there = [value for value in values if value is not None]
    return sum(there) / len(there) if there else None
