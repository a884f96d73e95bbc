"""Labels of other classes: which class's images a folder really holds, and the alarm 'labels?' while training.

A real run took 35 hours with validation folders that did not match their labels: 56 to 89 % on the training images
of 100 classes, 1 % in validation, and the learning rate was blamed.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

# A folder's class is clear if it has this share of the folder's images, and at least this many of them.
CLEAR_SHARE = 0.25
CLEAR_IMAGES = 2.0
# And this much more than the folder's own class: a network takes similar classes for each other.
CLEAR_MARGIN = 1.5
# And if guesses would hardly look like that: the probability that one of the classes does in this folder, for a network
# that gives every answer as often as this one, whatever it sees. A few folders of many do by accident, but they do not
# hold each other's classes.
ACCIDENT = 0.05
EXPLAINED = 0.3
"""Share of all images that a permutation has to explain: with less it may be an accident."""
PATTERN_SHARE = 0.8
"""Share of the clear folders that a rule such as 'shifted by one' has to explain."""
KNOWN_SHARE = 0.3
"""Share of the images in the other folders that a network has to recognise, before some folders are called swapped."""
NAMED_PAIRS = 4


@dataclass(frozen=True)
class FolderMapping:
    """What each folder holds, as far as it is clear."""

    holds: tuple[int | None, ...]
    """For each folder the number of the class whose images it holds; None where that is not clear."""
    own: tuple[int, ...]
    """For each folder the number of the class that its name stands for; -1 if that is unknown."""
    explained: float
    """Share of all images that are of the class that `holds` gives for their folder."""

    @property
    def moved(self) -> dict[int, int]:
        """The folders that clearly hold another class than their own, and which."""
        pairs = ((folder, held, own) for folder, (held, own) in self._pairs() if own >= 0)
        return {folder: held for folder, held, own in pairs if held is not None and held != own}

    def only(self, folders: Collection[int]) -> FolderMapping:
        """The same mapping with only these folders moved."""
        stays = (held if held == own or folder in folders else None for folder, (held, own) in self._pairs())
        return replace(self, holds=tuple(stays))

    def _pairs(self) -> Iterator[tuple[int, tuple[int | None, int]]]:
        return enumerate(zip(self.holds, self.own, strict=True))


def likely_mapping(counts: NDArray[Any], own: Sequence[int] | None = None) -> FolderMapping:
    """The classes that folders hold, from counts (folders, classes) of how often images were taken for each class.

    `own` gives each folder's own class; by default folder and class have the same number.
    """
    numbers = tuple(range(len(counts))) if own is None else tuple(own)
    found = np.asarray(counts, np.float64)
    images, of_folder = found.sum(), found.sum(1)
    holds: list[int | None] = [None] * len(found)
    explained = 0.0
    if images:
        from scipy.optimize import linear_sum_assignment

        # Together, not one by one: of two folders that look like one class, the other may look like its own as well.
        folders, classes = linear_sum_assignment(found / np.maximum(of_folder, 1.0)[:, None], maximize=True)
        of_class = found.sum(0)
        by_chance = _chance_of(found[folders, classes], of_folder[folders], of_class[classes] / images)
        answers = np.count_nonzero(of_class)
        for folder, label, chance in zip(folders.tolist(), classes.tolist(), by_chance.tolist(), strict=True):
            seen = found[folder, label]
            own_seen = found[folder, numbers[folder]] if numbers[folder] not in (-1, label) else 0.0
            least = max(CLEAR_IMAGES, CLEAR_SHARE * of_folder[folder], CLEAR_MARGIN * own_seen)
            if seen >= least and chance * answers < ACCIDENT:
                holds[folder] = label
                explained += float(seen / images)
    return FolderMapping(tuple(holds), numbers, explained)


def _chance_of(seen: Any, images: Any, probability: Any) -> NDArray[np.float64]:
    """How probable it is that at least so many of a folder's images get an answer that has this probability."""
    from scipy.stats import binom

    return np.asarray(binom.sf(np.floor(seen) - 1, np.ceil(images), np.minimum(probability, 1.0)))


def fewest_images(classes: int) -> int:
    """From how many validation images per class on a network halfway between guessing and perfect shows one."""
    images = np.arange(2, 1000)
    recognised = np.ceil(images * (1 + 1 / classes) / 2)
    enough = _chance_of(recognised, images, 1 / classes) * classes < ACCIDENT
    return int(images[enough.argmax()])


def closed_cycles(mapping: FolderMapping) -> list[int]:
    """The moved folders that hold each other's classes: a swap, or a longer cycle. A single one may be a class that the
    network takes for another."""
    folder_of = {label: folder for folder, label in enumerate(mapping.own) if label >= 0}
    goes = {folder: folder_of.get(held, -1) for folder, held in mapping.moved.items()}
    found = []
    for start in goes:
        at, steps = goes[start], 0
        while at in goes and at != start and steps <= len(goes):
            at, steps = goes[at], steps + 1
        if at == start:
            found.append(start)
    return found


def describe_mapping(mapping: FolderMapping, folders: Sequence[str], classes: Sequence[str]) -> str:
    """How the moved folders are permuted: the rule if there is one, else pairs of folder and class."""
    moved = mapping.moved
    pairs = [f"{folders[folder]} holds {classes[held]}" for folder, held in moved.items()]
    more = f" and {len(pairs) - NAMED_PAIRS} more" if len(pairs) > NAMED_PAIRS else ""
    listed = f"{', '.join(pairs[:NAMED_PAIRS])}{more}"
    if len(moved) == 2 and set(moved.values()) == {mapping.own[folder] for folder in moved}:
        return " and ".join(folders[folder] for folder in moved) + " are swapped"
    rule = _rule(mapping, folders)
    return listed if rule is None else f"{rule} ({listed})"


def _rule(mapping: FolderMapping, folders: Sequence[str]) -> str | None:
    folder_of = {label: folder for folder, label in enumerate(mapping.own) if label >= 0}
    # Where each clear folder's images belong; -1 for a class without a folder.
    belongs = {f: folder_of.get(held, -1) for f, held in enumerate(mapping.holds) if held is not None}
    if len(belongs) < 3:
        return None  # any two folders are 'shifted'
    number = len(folders)
    steps = Counter((there - here) % number for here, there in belongs.items() if there >= 0)
    step, times = steps.most_common(1)[0] if steps else (0, 0)
    if step and times >= PATTERN_SHARE * len(belongs):
        if step in (1, number - 1):
            which = "next" if step == 1 else "previous"
            return f"shifted by one: each folder holds the images of the {which} class"
        ahead = step if step <= number // 2 else step - number
        return f"shifted by {abs(ahead)}: each folder holds the class {abs(ahead)} {'after' if ahead > 0 else 'before'}"
    for right, wrong, permuted in _other_orders(folders):
        fits = sum(permuted[here] == there for here, there in belongs.items())
        if fits >= PATTERN_SHARE * len(belongs):
            return f"the images were sorted into the folders by names in the order of {wrong} instead of {right}"
    return None


def _other_orders(folders: Sequence[str]) -> list[tuple[str, str, dict[int, int]]]:
    """Permutations that arise when two programs sort the same names differently: for each folder, where its images
    belong."""
    orders = {
        "text": _sorted_by(folders, str),
        "numbers": _sorted_by(folders, _with_numbers),
        "text regardless of case": _sorted_by(folders, str.casefold),
    }
    found = []
    for right, ours in orders.items():
        for wrong, theirs in orders.items():
            if ours != theirs:
                # The class with number i in their order went into the folder with number i in ours.
                found.append((right, wrong, dict(zip(ours, theirs, strict=True))))
    return found


def _sorted_by(folders: Sequence[str], key: Callable[[str], Any]) -> list[int]:
    return sorted(range(len(folders)), key=lambda at: key(folders[at]))


def _with_numbers(name: str) -> list[int | str]:
    # Text and numbers alternate, so that like is compared with like.
    return [int(part) if part.isdigit() else part for part in re.split(r"([0-9]+)", name)]


# Accuracies as shares of the way from chance level to 100 %. In the case above the model was at 0.56 and above when
# someone looked; with right labels, a model at 0.3 in training is never at chance level in validation.
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
    seen: str
    permutation: str | None
    too_few: str = ""
    """Why a permutation could not be seen."""

    def details(self) -> dict[str, Any]:
        return {"seen": self.seen, "permutation": self.permutation, "hint": HINT}

    def text(self) -> str:
        permuted = f"the folders of val/ seem to be permuted: {self.permutation}"
        unclear = self.too_few or "no order of the folders of val/ explains it"
        return f"warning: labels? {self.seen}; {permuted if self.permutation else unclear}\nhint: {HINT}"


def can_judge(figures: Figures, classes: int) -> bool:
    """Whether it makes sense to look at which class was taken for which: not before the model has learned something."""
    return figures.val_acc1 is not None and _has_learned(figures, classes) is not False


def judge_labels(figures: Figures, counts: NDArray[Any] | None, classes: Sequence[str]) -> LabelAlarm | None:
    """The alarm, if there is reason for one; `counts` (label, predicted class) is None if nothing was counted.

    Folders that hold each other's classes are one at any accuracy. Where validation is at chance level, so are any that
    together explain many images, and even none.
    """
    number = len(classes)
    if not can_judge(figures, number):
        return None
    learned, seen, too_few = _has_learned(figures, number), _seen(figures, number), ""
    at_chance = _is_at_chance(figures, number)
    if counts is not None:
        # Outputs beyond the classes have no folder.
        mapping = likely_mapping(counts[:number])
        outputs = [*classes, *(f"output {extra}" for extra in range(number, counts.shape[1]))]
        wrong = list(mapping.moved) if at_chance and mapping.explained >= EXPLAINED else closed_cycles(mapping)
        if not at_chance and _recognised(counts, wrong) < KNOWN_SHARE:
            wrong = []  # a network that knows few classes takes some for each other
        if wrong and (learned or number >= FEW_CLASSES):
            return LabelAlarm(seen, describe_mapping(mapping.only(wrong), classes, outputs))
        if _effective_classes(counts) < SPREAD * number:
            return None
        if (images := counts[:number].sum() / number) < (fewest := fewest_images(number)):
            too_few = f"{images:.1f} validation images per class are too few to see a permutation: it takes {fewest}"
    return LabelAlarm(seen, None, too_few) if at_chance and learned and number >= FEW_CLASSES else None


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


def _recognised(counts: NDArray[Any], without: Sequence[int]) -> float:
    """The share of images that are recognised in all folders but these."""
    rest = np.setdiff1d(np.arange(len(counts)), without)
    return float(counts[rest, rest].sum() / max(1, counts[rest].sum()))


def _is_at_chance(figures: Figures, classes: int) -> bool:
    return figures.val_acc1 is not None and figures.val_acc1 <= _accuracy(AT_CHANCE, classes)


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
    if not _is_at_chance(figures, classes):
        return f"{train}, val/acc1 {figures.val_acc1:.1f} %"
    return f"{train}, but val/acc1 {figures.val_acc1:.1f} % is no better than chance ({100 / classes:.3g} %)"


def _effective_classes(counts: NDArray[Any]) -> float:
    """The effective number of classes among the answers: rare ones count less."""
    predicted = counts.sum(0, dtype=np.float64)
    total = predicted.sum()
    return 0.0 if not total else float(total**2 / np.square(predicted).sum())
