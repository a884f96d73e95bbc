"""The result of `stoker eval`: the record, its text, and the confusion matrix as a picture."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from stoker.core.console import format_table
from stoker.core.units import count

MOST_CONFUSED = 10
MOST_WORST_CLASSES = 10
MOST_UNREADABLE = 20
# With more classes their names would overlap in the picture.
MOST_NAMED_CLASSES = 60


class ClassScore(NamedTuple):
    """The accuracy of one class."""

    name: str
    images: int
    acc1: float
    """Percent."""
    acc5: float


class ConfusedPair(NamedTuple):
    """Images of one class that were classified as another."""

    name: str
    taken_for: str
    wrong: int
    images: int
    """All images of the class."""


@dataclass(frozen=True)
class RealScore:
    """Accuracy by the reassessed (ReaL) labels of ImageNet's validation images; an image may have several."""

    acc1: float | None
    images: int
    left_out: int
    """Images without a ReaL label."""


@dataclass(frozen=True)
class Evaluation:
    """How a checkpoint classified every image of a split, each counted once."""

    checkpoint: str
    model: str
    averaged: bool
    epoch: int
    step: int
    place: str
    """Folder or URL of the images."""
    classes: tuple[str, ...]
    labels: NDArray[np.int64]
    """The class of each image."""
    best: NDArray[np.int64]
    """(images, up to 5) classes with the highest scores, the highest first."""
    loss: float | None
    """Mean cross-entropy; None without images, or if it is NaN or infinite."""
    unreadable: tuple[tuple[str, str], ...] = ()
    """Name and reason of each image that was left out."""
    real: RealScore | None = None

    @property
    def images(self) -> int:
        return len(self.labels)

    @property
    def acc1(self) -> float | None:
        """Percent of the images whose class had the highest score."""
        return percent(self.best[:, 0] == self.labels)

    @property
    def acc5(self) -> float | None:
        """Percent of the images whose class was among the five highest; with fewer classes, among all."""
        return percent((self.best == self.labels[:, None]).any(axis=1))

    def per_class(self) -> list[ClassScore]:
        """The classes that have images, worst first; ties are ordered by size, largest first."""
        images = np.bincount(self.labels, minlength=len(self.classes))
        hits1 = np.bincount(self.labels[self.best[:, 0] == self.labels], minlength=len(self.classes))
        among = (self.best == self.labels[:, None]).any(axis=1)
        hits5 = np.bincount(self.labels[among], minlength=len(self.classes))
        scores = [
            ClassScore(self.classes[number], int(images[number]), 100 * hits1[number] / images[number].item(),
                       100 * hits5[number] / images[number].item())
            for number in np.flatnonzero(images)
        ]  # fmt: skip
        return sorted(scores, key=lambda score: (score.acc1, score.acc5, -score.images))

    def confused(self, most: int = MOST_CONFUSED) -> list[ConfusedPair]:
        """The pairs of classes that were confused most often."""
        images = np.bincount(self.labels, minlength=len(self.classes))
        wrong = self.best[:, 0] != self.labels
        # One number for a pair: a matrix of 21,841 classes would take 4 GB.
        pairs, counts = np.unique(self.labels[wrong] * len(self.classes) + self.best[wrong, 0], return_counts=True)
        first = np.argsort(-counts, kind="stable")[:most]
        return [
            ConfusedPair(self.classes[label], self.classes[guess], int(counts[number]), int(images[label]))
            for number in first
            for label, guess in [divmod(int(pairs[number]), len(self.classes))]
        ]

    def matrix(self) -> NDArray[np.int64]:
        """How many images of each class (row) were classified as each class (column)."""
        size = len(self.classes)
        return np.bincount(self.labels * size + self.best[:, 0], minlength=size * size).reshape(size, size)

    def as_dict(self) -> dict[str, Any]:
        """The document that `--json` prints."""
        return {
            "checkpoint": self.checkpoint,
            "model": self.model,
            "weights": "averaged" if self.averaged else "raw",
            "epoch": self.epoch,
            "step": self.step,
            "data": self.place,
            "images": self.images,
            "acc1": self.acc1,
            "acc5": self.acc5,
            "loss": self.loss,
            "real": None if self.real is None else asdict(self.real),
            "unreadable": [{"name": name, "reason": reason} for name, reason in self.unreadable],
            "per_class": [_renamed(score._asdict()) for score in self.per_class()],
            "confused": [_renamed(pair._asdict()) for pair in self.confused()],
            "confusion": {"classes": list(self.classes), "matrix": self.matrix().tolist()},
        }


def percent(hits: NDArray[np.bool_]) -> float | None:
    """Hits in percent; None without images."""
    return 100 * int(hits.sum()) / len(hits) if len(hits) else None


def finite_or_none(value: float) -> float | None:
    """The number, or None if JSON cannot hold it."""
    return value if math.isfinite(value) else None


def _renamed(record: dict[str, Any]) -> dict[str, Any]:
    return {"class": record.pop("name"), **record}


def evaluation_text(found: Evaluation, *, all_classes: bool = False) -> str:
    """Scores, the worst classes or all of them, and the pairs that were confused most."""
    weights = "averaged weights" if found.averaged else "raw weights"
    parts = [
        f"{found.model} after {count(found.epoch, 'epoch')} ({count(found.step, 'step')}), {weights}\n"
        f"{found.place}: {count(found.images, 'image')}",
        f"top-1 {_percent(found.acc1)}   top-5 {_percent(found.acc5)}   "
        f"loss {'none' if found.loss is None else f'{found.loss:.4f}'}",
    ]
    if found.real is not None:
        parts.append(
            f"ReaL top-1 {_percent(found.real.acc1)} of {found.real.images:,} images; "
            f"{found.real.left_out:,} without a label were left out"
        )
    scores = found.per_class()
    shown = scores if all_classes else scores[:MOST_WORST_CLASSES]
    title = f"{len(shown)} worst of {len(scores)} classes" if len(shown) < len(scores) else "classes, worst first"
    rows = [(score.name, f"{score.images:,}", f"{score.acc1:.2f}", f"{score.acc5:.2f}") for score in shown]
    parts.append(f"{title}\n{format_table(rows, ('class', 'images', 'top-1 %', 'top-5 %'))}")
    pairs = [
        (pair.name, pair.taken_for, f"{pair.wrong:,} of {pair.images:,}", f"{100 * pair.wrong / pair.images:.1f}")
        for pair in found.confused()
    ]
    if pairs:
        parts.append(f"most confused\n{format_table(pairs, ('class', 'predicted as', 'images', '%'))}")
    if found.unreadable:
        lines = [f"  {name}: {reason}" for name, reason in found.unreadable[:MOST_UNREADABLE]]
        more = len(found.unreadable) - len(lines)
        lines += [f"  and {more:,} more"] if more > 0 else []
        parts.append("\n".join([f"{len(found.unreadable):,} unreadable images were left out:", *lines]))
    return "\n\n".join(parts)


def plot_confusion(found: Evaluation, path: Path) -> None:
    """Draws the confusion matrix into a PNG file; each row is a class, and its shares add up to one."""
    import matplotlib

    matplotlib.use("Agg")  # needs no screen
    from matplotlib import pyplot

    matrix = found.matrix()
    images = matrix.sum(axis=1, keepdims=True)
    shares = matrix / images.clip(min=1)
    side = min(14.0, max(5.0, 0.35 * len(found.classes)))
    figure, axes = pyplot.subplots(figsize=(side + 1, side), dpi=120)
    drawn = axes.imshow(shares, cmap="Blues", vmin=0, vmax=1, interpolation="nearest")
    axes.set_xlabel("predicted class")
    axes.set_ylabel("true class")
    axes.set_title(f"{found.model}: top-1 {_percent(found.acc1)} of {found.images:,} images")
    if len(found.classes) <= MOST_NAMED_CLASSES:
        axes.set_xticks(range(len(found.classes)), found.classes, rotation=90)
        axes.set_yticks(range(len(found.classes)), found.classes)
    figure.colorbar(drawn, label="share of the class")
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="png")
    pyplot.close(figure)


def _percent(value: float | None) -> str:
    return "none" if value is None else f"{value:.2f} %"
