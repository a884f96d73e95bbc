"""Exact scores of a whole volume: Dice, IoU and surface Dice of every class, and on demand the score of the Vesuvius
surface competition, by its published definition.

That score is 0.30 TopoScore + 0.35 surface Dice at 2 voxels + 0.35 / (1 + 0.3 VOI), the mean over volumes. Every value
but 0 is foreground; voxels that the label leaves open are background in both masks.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from stoker.core.console import Advance
from stoker.tasks.volumes.formats.opening import library
from stoker.tasks.volumes.scores.surface_dice import ISOTROPIC, Mask, Spacing, count_surfaces, surface_dice
from stoker.tasks.volumes.scores.topology import Topology, compare_topology

ScoreName = Literal["segmentation", "vesuvius-surface"]
SLAB = 32
"""Slices that are counted together."""
TOPOLOGY, SURFACE, VARIATION = 0.30, 0.35, 0.35
TOLERANCE = 2.0
"""Voxels."""
ALPHA = 0.3
"""Weight of VOI in its part of the score."""


class Variation(NamedTuple):
    """Variation of information between the components of two masks, in bits."""

    splits: float
    """Bits needed to name a voxel's predicted component once its labelled one is known: components torn apart."""
    merges: float
    """The reverse: components that have grown together."""

    @property
    def total(self) -> float:
        return self.splits + self.merges

    @property
    def score(self) -> float:
        return 1 / (1 + ALPHA * self.total)


@dataclass(frozen=True)
class SurfaceScore:
    """The competition's score of one volume, and its parts; each from 0 to 1."""

    topology: Topology
    surface_dice: float
    variation: Variation

    @property
    def score(self) -> float:
        return TOPOLOGY * self.topology.score + SURFACE * self.surface_dice + VARIATION * self.variation.score

    def as_dict(self) -> dict[str, Any]:
        return {
            "score": self.score,
            "topo_score": self.topology.score,
            "surface_dice_2": self.surface_dice,
            "voi_score": self.variation.score,
            "voi_splits": self.variation.splits,
            "voi_merges": self.variation.merges,
            "features": {
                name: {"matched": matched, "predicted": predicted, "labelled": labelled, "f1": f1}
                for name, matched, predicted, labelled, f1 in zip(
                    ("components", "tunnels", "cavities"),
                    self.topology.matched, self.topology.predicted, self.topology.labelled, self.topology.f1,
                    strict=True,
                )
            },
        }  # fmt: skip


def score_surface(
    prediction: NDArray[Any],
    label: NDArray[Any],
    ignore: int | None,
    processes: int = 1,
    progress: Advance | None = None,
) -> SurfaceScore:
    """Scores a volume; voxels whose label is `ignore` count as background."""
    ours, theirs = foreground(prediction, label, ignore)
    dice = surface_dice(ours, theirs, TOLERANCE)
    return SurfaceScore(
        topology=compare_topology(ours, theirs, processes, progress),
        surface_dice=1.0 if dice is None else dice,
        variation=variation_of_information(ours, theirs),
    )


def foreground(prediction: NDArray[Any], label: NDArray[Any], ignore: int | None) -> tuple[Mask, Mask]:
    """Both as masks, with background where the label leaves open what is there."""
    ours, theirs = prediction != 0, label != 0
    if ignore is not None:
        known = label != ignore
        ours &= known
        theirs &= known
    return ours, theirs


def variation_of_information(prediction: Mask, label: Mask) -> Variation:
    """Compares the 26-connected components of two masks, over the voxels that at least one of them sets; background in
    one mask counts as a component."""
    components, union = library("cc3d").connected_components, prediction | label
    ours, theirs = (components(mask, connectivity=26)[union].astype(np.int64) for mask in (prediction, label))
    if not len(ours):
        return Variation(0.0, 0.0)
    _, together = np.unique(ours * (int(theirs.max()) + 1) + theirs, return_counts=True)
    joint = _bits(together)
    # H(ours, theirs) - H(theirs) = H(ours | theirs); rounding must not make it negative.
    return Variation(max(0.0, joint - _bits(np.bincount(theirs))), max(0.0, joint - _bits(np.bincount(ours))))


def _bits(counts: NDArray[np.int64]) -> float:
    """The entropy of a distribution."""
    share = counts[counts > 0] / counts.sum()
    return float(-(share * np.log2(share)).sum())


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
    """The scores of the classes 1, 2, …"""
    labelled: float
    """Share of the voxels that have a label and were scored."""
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
        """Volumes are sorted by this, the worst first; one without anything to score comes last."""
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
