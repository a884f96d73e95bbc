"""'labels?': training learns while validation stays at chance level. Says once how the labels seem to be permuted.

Somebody trained for 35 hours with validation folders that did not match their labels: 56 to 89 % on the training images
of 100 classes, 1 % in validation, and the learning rate was blamed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from stoker.tasks.images.label_mapping import EXPLAINED, describe_mapping, likely_mapping

# Accuracies as shares of the way from chance level to 100 %. In the case above the model was at 0.56 and above when
# somebody looked; with right labels, a model at 0.3 in training is never at chance level in validation.
LEARNED = 0.3
AT_CHANCE = 0.05
# Share of a constant guess's loss. Where all batches are mixed there is no training accuracy; a model whose mixed,
# smoothed loss is this low has a clear opinion about most images.
LEARNED_LOSS = 0.75
# With few classes, chance level is where a small model that overfits ends up, and what an untrained one answers can
# look like a permutation: then it takes both, a permutation and a model that has learned.
FEW_CLASSES = 10
# The answers of a model that collapsed, such as a moving average of weights that is hardly older than the run, are few
# classes: the labels are not to blame. In effective numbers (1 / sum of squared shares), as a share of all classes.
SPREAD = 0.25
MOST_CLASSES = 4096
"""With more classes nothing is counted: the counts would take more than 64 MB of the device's memory."""
HINT = "stoker verify CONFIG"


@dataclass(frozen=True)
class Figures:
    """An epoch's results; None where a figure was not measured."""

    val_acc1: float | None
    """Percent, like `train_acc1`."""
    train_acc1: float | None = None
    train_loss: float | None = None
    """Set only for a cross-entropy, whose value at chance level is known."""


@dataclass(frozen=True)
class LabelAlarm:
    """Why the validation labels are in doubt."""

    seen: str
    permutation: str | None

    def details(self) -> dict[str, Any]:
        """For the event in metrics.jsonl."""
        return {"seen": self.seen, "permutation": self.permutation, "hint": HINT}

    def text(self) -> str:
        """The alarm in words."""
        permuted = f"the folders of val/ seem to be permuted: {self.permutation}"
        likely = permuted if self.permutation else "no order of the folders of val/ explains it"
        return f"warning: labels? {self.seen}; {likely}\nhint: {HINT}"


def is_suspicious(figures: Figures, classes: int) -> bool:
    """Whether to look at which class was taken for which: validation is at chance level, training is not."""
    if figures.val_acc1 is None or figures.val_acc1 > _accuracy(AT_CHANCE, classes):
        return False
    return _has_learned(figures, classes) is not False


def judge_labels(figures: Figures, counts: NDArray[Any] | None, classes: Sequence[str]) -> LabelAlarm | None:
    """The alarm, if there is reason for one; `counts` (label, predicted class) is None if nothing was counted."""
    number = len(classes)
    if not is_suspicious(figures, number):
        return None
    learned = _has_learned(figures, number)
    seen = _seen(figures, number)
    if counts is not None:
        # Outputs beyond the classes have no folder.
        mapping = likely_mapping(counts[:number])
        outputs = [*classes, *(f"output {extra}" for extra in range(number, counts.shape[1]))]
        if mapping.moved and mapping.explained >= EXPLAINED and (learned or number >= FEW_CLASSES):
            return LabelAlarm(seen, describe_mapping(mapping, classes, outputs))
        if _effective_classes(counts) < SPREAD * number:
            return None
    return LabelAlarm(seen, None) if learned and number >= FEW_CLASSES else None


class Confusion:
    """Counts what validation images are taken for, on the device and without waiting for it."""

    def __init__(self, classes: int, device: torch.device) -> None:
        self._classes = classes
        self._counts = torch.zeros(classes * classes, dtype=torch.int32, device=device)

    def reset(self) -> None:
        self._counts.zero_()

    def add(self, logits: Tensor, labels: Tensor) -> None:
        """Adds a batch: logits (samples, classes), labels (samples,)."""
        cells = labels * self._classes + logits.argmax(1)
        # Not bincount: on a GPU it reads the largest cell first, and so waits for the model.
        self._counts.index_add_(0, cells, torch.ones_like(cells, dtype=torch.int32))

    def total(self) -> NDArray[np.int32]:
        """Counts (label, predicted class) over all ranks, which all have to call it; waits for the device."""
        if dist.is_available() and dist.is_initialized():
            dist.all_reduce(self._counts)
        counts: NDArray[np.int32] = self._counts.reshape(self._classes, self._classes).cpu().numpy()
        return counts


def _accuracy(share: float, classes: int) -> float:
    """Percent at this share of the way from chance level to 100 %."""
    chance = 100.0 / classes
    return chance + share * (100.0 - chance)


def _has_learned(figures: Figures, classes: int) -> bool | None:
    """Whether the model knows the training images; None if no metric shows it."""
    if figures.train_acc1 is not None:
        return figures.train_acc1 >= _accuracy(LEARNED, classes)
    if figures.train_loss is not None:
        return figures.train_loss <= LEARNED_LOSS * math.log(classes)
    return None


def _seen(figures: Figures, classes: int) -> str:
    if figures.train_acc1 is not None:
        train = f"train/acc1 is {figures.train_acc1:.1f} %"
    elif figures.train_loss is not None:
        train = f"train/loss is {figures.train_loss:.2f} (a guess: {math.log(classes):.2f})"
    else:
        train = "the model distinguishes the validation images"
    return f"{train}, but val/acc1 {figures.val_acc1:.1f} % is no better than chance ({100 / classes:.3g} %)"


def _effective_classes(counts: NDArray[Any]) -> float:
    """The effective number of classes among the answers: rare ones count less."""
    predicted = counts.sum(0, dtype=np.float64)
    total = predicted.sum()
    return 0.0 if not total else float(total**2 / np.square(predicted).sum())
