"""The score of the Vesuvius surface competition, by its published definition.

0.30 TopoScore + 0.35 surface Dice at 2 voxels + 0.35 / (1 + 0.3 VOI), the mean over volumes. Every value but 0 is
foreground; voxels that the label leaves open are background in both masks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from stoker.core.console import Advance
from stoker.tasks.volumes.formats.opening import library_missing
from stoker.tasks.volumes.scores.surface_dice import Mask, surface_dice
from stoker.tasks.volumes.scores.topology import Topology, compare_topology

TOPOLOGY, SURFACE, VARIATION = 0.30, 0.35, 0.35
TOLERANCE = 2.0
"""Voxels."""
ALPHA = 0.3
"""Of VOI in the score."""


class Variation(NamedTuple):
    """Variation of information between the components of two masks, in bits."""

    splits: float
    """What has to be said of a voxel to name its predicted component, given its label's: components torn apart."""
    merges: float
    """The other way round: components grown together."""

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
    """Of the 26-connected components, over the voxels of either mask; what is background in one is a part as well."""
    try:
        import cc3d
    except ModuleNotFoundError as error:
        raise library_missing(error) from None
    union = prediction | label
    ours, theirs = (
        cc3d.connected_components(mask, connectivity=26)[union].astype(np.int64) for mask in (prediction, label)
    )
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
