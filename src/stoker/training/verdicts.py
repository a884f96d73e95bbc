"""What a trained model got right and wrong, class by class: plain records, for printing and for programs."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

MOST_CONFUSED = 10


class ClassScore(NamedTuple):
    """How one class fared."""

    name: str
    images: int
    acc1: float
    """Percent."""
    acc5: float


class Confusion(NamedTuple):
    """Images of one class that were taken for another."""

    name: str
    taken_for: str
    wrong: int
    images: int
    """All images of the class."""


@dataclass(frozen=True)
class RealScore:
    """Accuracy by the reassessed labels of ImageNet's validation images, of which one image may have several."""

    acc1: float | None
    images: int
    left_out: int
    """Images to which nobody could give a label."""


@dataclass(frozen=True)
class Evaluation:
    """A checkpoint's verdicts on every image of a split, each counted once."""

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
    """Mean cross-entropy; None without images, or where it is no number."""
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
        """The classes that have images, worst first; of equal ones the larger first."""
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

    def confused(self, most: int = MOST_CONFUSED) -> list[Confusion]:
        """The pairs of classes that were confused most often."""
        images = np.bincount(self.labels, minlength=len(self.classes))
        wrong = self.best[:, 0] != self.labels
        # One number for a pair: a matrix of 21,841 classes would take 4 GB.
        pairs, counts = np.unique(self.labels[wrong] * len(self.classes) + self.best[wrong, 0], return_counts=True)
        first = np.argsort(-counts, kind="stable")[:most]
        return [
            Confusion(self.classes[label], self.classes[guess], int(counts[number]), int(images[label]))
            for number in first
            for label, guess in [divmod(int(pairs[number]), len(self.classes))]
        ]

    def matrix(self) -> NDArray[np.int64]:
        """How many images of each class (row) were taken for each class (column)."""
        size = len(self.classes)
        return np.bincount(self.labels * size + self.best[:, 0], minlength=size * size).reshape(size, size)

    def as_dict(self) -> dict[str, Any]:
        """Everything, as `--json` prints it."""
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


class Guess(NamedTuple):
    """A class and how probable the model holds it to be."""

    name: str
    probability: float


@dataclass(frozen=True)
class Prediction:
    """What the model takes an image for, the most probable class first."""

    path: str
    guesses: tuple[Guess, ...]


@dataclass(frozen=True)
class Difference:
    """How far an exported model's output is from the checkpoint's own."""

    what: str
    """The images, in words."""
    max_abs: float
    tolerance: float

    @property
    def is_too_large(self) -> bool:
        return not self.max_abs <= self.tolerance  # also where it is no number


def percent(hits: NDArray[np.bool_]) -> float | None:
    """The share of hits; None of nothing."""
    return 100 * int(hits.sum()) / len(hits) if len(hits) else None


def finite_or_none(value: float) -> float | None:
    """A number that JSON can hold, or None."""
    return value if math.isfinite(value) else None


def _renamed(record: dict[str, Any]) -> dict[str, Any]:
    return {"class": record.pop("name"), **record}
