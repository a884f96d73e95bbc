"""Other labels for ImageNet's 1,000 classes: those of ImageNet-V2's folders, and the reassessed ('ReaL') ones."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stoker.data.index.sample_index import SampleIndex
from stoker.errors import UserError
from stoker.training.verdicts import RealScore, percent

CLASSES = 1000
_WORDNET_ID = re.compile(r"n\d{8}")
_VAL_NAME = re.compile(r"ILSVRC2012_val_(\d{8})")


def is_imagenet(classes: Sequence[str]) -> bool:
    """Whether a model's outputs are ImageNet's 1,000 classes in their usual, sorted order."""
    return len(classes) == CLASSES and list(classes) == sorted(classes) and all(map(_WORDNET_ID.fullmatch, classes))


def are_class_numbers(folders: Sequence[str]) -> bool:
    """Whether class folders are named by number, as ImageNet-V2's are: 0 to 999, which do not sort as numbers."""
    return all(name.isascii() and name.isdigit() and name == str(int(name)) for name in folders) and all(
        int(name) < CLASSES for name in folders
    )


def read_real_labels(path: Path, classes: Sequence[str]) -> list[list[int]]:
    """The classes of each validation image in their order; an empty list where nobody could tell."""
    if not is_imagenet(classes):
        raise UserError(
            "real-labels-need-imagenet",
            f"{path} numbers ImageNet's {CLASSES} classes, and the checkpoint has {len(classes)} others",
            why="its numbers would mean other classes",
        )
    try:
        labels = json.loads(path.read_text())
    except OSError as error:
        raise UserError("real-labels-unreadable", f"{path}: {error.strerror}", hint="--real-labels real.json") from None
    except (ValueError, RecursionError):
        raise _not_real(path, "it is no JSON") from None
    if not isinstance(labels, list) or not labels:
        raise _not_real(path, "it is no list")
    for number, entry in enumerate(labels, 1):
        if not isinstance(entry, list) or not all(type(label) is int and 0 <= label < CLASSES for label in entry):
            raise _not_real(path, f"entry {number} is {str(entry)[:60]}")
    return labels


def image_numbers(index: SampleIndex, samples: NDArray[np.int64], labels: Sequence[Any], path: Path) -> list[int]:
    """Which entry of the ReaL labels belongs to each sample, by the number in its name."""
    numbers = []
    for sample in samples.tolist():
        name = index.name(sample)
        match = _VAL_NAME.search(name)
        number = int(match[1]) if match else 0
        if not 1 <= number <= len(labels):
            seen = f"{path} has entries 1 to {len(labels):,}" if match else "its name holds no number of an image"
            raise UserError(
                "real-labels-other-images",
                f"{name} has no ReaL label: {seen}",
                why="ReaL labels are of ImageNet's validation images, by the numbers in their names",
                hint="file names like ILSVRC2012_val_00000293.JPEG",
            )
        numbers.append(number - 1)
    return numbers


def real_score(best: NDArray[np.int64], entries: Sequence[Sequence[int]]) -> RealScore:
    """The share of first choices that are among the image's labels; images without any do not count."""
    judged = [guess in labels for guess, labels in zip(best[:, 0].tolist(), entries, strict=True) if labels]
    return RealScore(percent(np.array(judged, bool)), len(judged), len(entries) - len(judged))


def _not_real(path: Path, what: str) -> UserError:
    return UserError(
        "real-labels-wrong",
        f"{path} does not hold ReaL labels: {what}",
        why=f"they are one JSON list, with a list of classes (0 to {CLASSES - 1}) for each validation image",
        hint="real.json of github.com/google-research/reassessed-imagenet",
    )
