"""What labels may be: the classes 0 … n-1, and one value that is never trained on and never counted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from stoker.core.errors import UserError
from stoker.tasks.volumes.formats.volume import Volume, Voxels, sizes_text


class BadLabels(UserError):
    """Labels that contradict the config; the whole data set is in doubt, so quarantine is not enough."""


@dataclass(frozen=True)
class LabelRules:
    """The classes of a data set."""

    classes: int
    ignore: int | None = None
    """Unlabelled voxels have this value; it is not one of the classes."""

    def __post_init__(self) -> None:
        if not 1 <= self.classes < 32_767:
            raise BadLabels("bad-classes", f"{self.classes} classes", why="there are 1 to 32,766")
        if self.ignore is not None and (0 <= self.ignore < self.classes or not -32_768 <= self.ignore <= 32_767):
            raise BadLabels(
                "bad-ignore-label",
                f"the ignore label is {self.ignore}, and there are {self.classes} classes",
                why=f"the classes are 0 to {self.classes - 1}; the ignore label must be another number of 16 bits",
                hint="for background 0, foreground 1 and unlabelled 2: two classes, ignore label 2",
            )

    @property
    def dtype(self) -> np.dtype[Any]:
        """Type of labels in a batch: one byte if that is enough."""
        return np.dtype(np.uint8 if 0 <= self.outside <= 255 and self.classes <= 256 else np.int16)

    @property
    def outside(self) -> int:
        """The label in a batch that is never trained on and never counted: the ignore label, or the number after the
        last class. Voxels outside a volume have it, so it is needed even where every voxel is labelled."""
        return self.classes if self.ignore is None else self.ignore

    def check_kind(self, case: str, label: Volume) -> None:
        if label.dtype.kind not in "iu":
            raise BadLabels(
                "float-labels",
                f"case {case}: the labels in {label.name} are {label.dtype}",
                why="a label is a class number: 0.9999 is not one, and rounding would hide a resampled or scaled mask",
                hint="save the labels as uint8",
            )

    def check_values(self, case: str, name: str, voxels: Voxels) -> None:
        if not voxels.size:
            return
        low, high = int(voxels.min()), int(voxels.max())
        # The number after the last class is the usual ignore label: then the extremes say enough.
        if low >= 0 and high < self.classes + (self.ignore == self.classes):
            return
        strange = (voxels < 0) | (voxels >= self.classes)
        if self.ignore is not None:
            strange &= voxels != self.ignore
        if strange.any():
            values = np.unique(voxels[strange])
            shown = ", ".join(map(str, values[:5].tolist())) + (" …" if len(values) > 5 else "")
            ignored = "" if self.ignore is None else f" and {self.ignore} for unlabelled"
            raise BadLabels(
                "label-out-of-range",
                f"case {case}: {name} has the labels {shown}",
                why=f"expected are 0 to {self.classes - 1}{ignored}",
                hint="check the number of classes and the ignore label",
            )


def check_pair(case: str, images: tuple[Volume, ...], label: Volume | None) -> None:
    """Refuses an image and a label, or channels, whose grids do not match."""
    first = images[0]
    others = [*images[1:], *([label] if label is not None else [])]
    for other in others:
        if other.shape != first.shape:
            turned = sorted(other.shape) == sorted(first.shape)
            why = (
                "the sizes agree in another order: one of the two was saved with its axes swapped"
                if turned
                else "every voxel of the image needs its label"
            )
            raise BadLabels(
                "shapes-differ",
                f"case {case}: {first.name} is {sizes_text(first.shape)}, {other.name} is {sizes_text(other.shape)}",
                why=why,
                hint="save both with the axes z, y, x" if turned else "check that both belong to the same volume",
            )
        if (
            first.affine is not None
            and other.affine is not None
            and not np.allclose(first.affine, other.affine, rtol=1e-3, atol=1e-3)
        ):
            raise BadLabels(
                "orientations-differ",
                f"case {case}: {first.name} and {other.name} have different orientations or voxel sizes",
                why="the shapes agree, but the voxels are not at the same places",
                hint="resample one onto the grid of the other",
            )
