"""What is known about ImageNet without its images: class names, counts, and the classes of the validation images.

The names and the ReaL labels (Beyer et al., 'Are we done with ImageNet?', 2020) are read from the package data of timm,
without importing it: that takes seconds.
"""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from stoker.tasks.images.layouts.sample_index import SampleIndex

CLASSES = 1000
TRAIN_IMAGES = 1_281_167
VAL_IMAGES = 50_000
TRAIN_PER_CLASS = (732, 1300)
VAL_PER_CLASS = 50
DEVKIT_FIRST = ("n02119789", "n02100735", "n02110185")
"""The classes 1 to 3 of the devkit (ILSVRC2012_ID in meta.mat), whose order is not that of the names."""

_SYNSET = re.compile(r"n\d{8}")
# A name's last part, up to the zero that ends it in `_ended_names`.
_VAL_NAME = re.compile(rb"ILSVRC2012_val_(\d{8})[^/\0]*\0")
_TRAIN_NAME = re.compile(rb"(?<![^/\0])n(\d{8})_[^/\0]*\0")


@cache
def synsets() -> tuple[str, ...]:
    """The 1,000 classes in the order of their numbers, which is that of their names; empty if timm lacks the list."""
    text = _read("imagenet_synsets.txt")
    return tuple(text.split()) if text is not None else ()


@cache
def real_labels() -> tuple[tuple[int, ...], ...]:
    """The ReaL classes of the 50,000 validation images by number; empty if timm lacks them. 3,163 images have none."""
    text = _read("imagenet_real_labels.json")
    return tuple(map(tuple, json.loads(text))) if text is not None else ()


def spoken(name: str) -> str:
    """The name of a class, with its meaning if it is one of WordNet's numbers: n01440764 tench."""
    meaning = _lemmas().get(name) if is_synset(name) else None
    return name if meaning is None else f"{name} {meaning}"


@cache
def _lemmas() -> dict[str, str]:
    """The first word for each of WordNet's numbers."""
    lines = (line.partition("\t") for line in (_read("imagenet_synset_to_lemma.txt") or "").splitlines())
    return {synset: names.partition(",")[0].strip() for synset, _, names in lines}


def is_synset(name: str) -> bool:
    """Whether a folder is named like a class of ImageNet, any of its 21,841."""
    return _SYNSET.fullmatch(name) is not None


def is_whole_imagenet(classes: Sequence[str]) -> bool:
    """Whether these are the 1,000 classes."""
    return len(classes) == len(synsets()) > 0 and set(classes) == set(synsets())


def is_imagenet(classes: Sequence[str]) -> bool:
    """Whether a model's outputs are ImageNet's 1,000 classes in their usual, sorted order."""
    return len(classes) == CLASSES and list(classes) == sorted(classes) and all(map(is_synset, classes))


def are_class_numbers(folders: Sequence[str]) -> bool:
    """Whether class folders are named by number, as ImageNet-V2's are: 0 to 999, which do not sort as numbers."""
    return all(name.isascii() and name.isdigit() and name == str(int(name)) and int(name) < CLASSES for name in folders)


def validation_numbers(index: SampleIndex) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The samples named ILSVRC2012_val_…, and their numbers from 1."""
    return _found(index, _VAL_NAME)


def synsets_in_names(index: SampleIndex) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The samples named like ImageNet's training images, n01440764_18.JPEG, and the numbers of the synsets in them."""
    return _found(index, _TRAIN_NAME)


def _found(index: SampleIndex, pattern: re.Pattern[bytes]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The samples whose last part of the name matches, and the numbers in it."""
    # One pass over all names: a million of them one by one would take longer than everything else.
    ends = np.asarray(index.name_ends)
    text = np.insert(np.asarray(index.name_bytes), ends, 0).tobytes()
    starts, numbers = [], []
    for match in pattern.finditer(text):
        starts.append(match.start())
        numbers.append(int(match[1]))
    samples = np.searchsorted(ends + np.arange(len(ends)), np.array(starts, np.int64), side="right")
    return samples.astype(np.int64), np.array(numbers, np.int64)


def _read(name: str) -> str | None:
    package = importlib.util.find_spec("timm")
    if package is None or package.origin is None:
        return None
    file = Path(package.origin).parent / "data" / "_info" / name
    return file.read_text(encoding="utf-8") if file.is_file() else None
