"""A part of a data set, chosen by hashing names: the same seed chooses the same part on every machine.

Classes and files are ranked by a hash of the seed and their name, and those with the smallest hashes are taken. Neither
the order of the listing nor other classes or files make a difference.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stoker.core.console import some
from stoker.core.errors import UserError, did_you_mean
from stoker.core.units import count
from stoker.tasks.images.layouts.sample_index import SampleIndex, SampleSet, encode_name


def choose_subset(
    index: SampleIndex,
    *,
    classes: int | None,
    per_class: int | None,
    seed: int,
    names: Sequence[str] | None = None,
    among: NDArray[np.int64] | None = None,
) -> SampleSet:
    """A subset of this many classes and images per class; None means all. `names` gives the classes instead: for
    validation, those of the training subset, so that both number them alike. `among` are the samples to choose from,
    ascending; None means all."""
    chosen = _choose_classes(index, classes, seed) if names is None else _given_classes(index, names)
    new_label = np.full(len(index.classes), -1, np.int32)
    label_of = {name: label for label, name in enumerate(chosen)}
    for old, name in enumerate(index.classes):
        new_label[old] = label_of.get(name, -1)
    labels = new_label[index.labels]
    indices = np.flatnonzero(labels >= 0) if among is None else among[labels[among] >= 0]
    if per_class is not None:
        kept = [
            part if len(part) <= per_class else _lowest(index, part, per_class, seed, b"image")
            for part in _by_class(index, indices)
        ]
        indices = np.sort(np.concatenate(kept))
    return SampleSet(index, chosen, indices, labels[indices])


def split_samples(index: SampleIndex, fraction: float, seed: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Divides the samples into training and validation: this fraction of each class is for validation, rounded, but
    neither part is empty if a class has two images or more."""
    chosen = []
    for of_class in _by_class(index, np.arange(len(index), dtype=np.int64)):
        wanted = min(len(of_class) - 1, max(1, round(len(of_class) * fraction)))
        chosen.append(_lowest(index, of_class, wanted, seed, b"validation"))
    val = np.sort(np.concatenate(chosen)) if chosen else np.zeros(0, np.int64)
    return np.setdiff1d(np.arange(len(index), dtype=np.int64), val), val.astype(np.int64)


def subset_record(train: SampleSet, val: SampleSet | None, seed: int) -> dict[str, Any]:
    """The content of `subset.json`; null for a missing validation set."""
    splits = {"train": train, "val": val}
    return {
        "seed": seed,
        "classes": list(train.classes),
        "samples": {split: None if found is None else len(found) for split, found in splits.items()},
        "per_class": {split: None if found is None else _counts(found) for split, found in splits.items()},
    }


def _counts(samples: SampleSet) -> list[int]:
    counts: list[int] = np.bincount(samples.labels(np.arange(len(samples))), minlength=len(samples.classes)).tolist()
    return counts


def _choose_classes(index: SampleIndex, wanted: int | None, seed: int) -> tuple[str, ...]:
    if wanted is None:
        return index.classes
    images = np.bincount(index.labels, minlength=len(index.classes))
    filled = [name for name, number in zip(index.classes, images.tolist(), strict=True) if number]
    if wanted > len(filled):
        raise UserError(
            "subset-too-large",
            f"subset_classes is {wanted:,}; {index.root} has {count(len(filled), 'class', 'classes')} with images",
            hint=f"subset_classes={len(filled)}",
        )
    best = sorted(filled, key=lambda name: _rank(seed, b"class", encode_name(name)))[:wanted]
    chosen = set(best)
    return tuple(name for name in index.classes if name in chosen)


def _given_classes(index: SampleIndex, names: Sequence[str]) -> tuple[str, ...]:
    if not set(names) & set(index.classes):
        raise UserError(
            "classes-differ",
            f"{index.root} has none of the {count(len(names), 'chosen class', 'chosen classes')}: {some(list(names))}",
            why=f"it has {some(list(index.classes))}",
            hint=did_you_mean(names[0], index.classes) if names else None,
        )
    return tuple(names)  # in this order: the labels of training count on it


def _by_class(index: SampleIndex, indices: NDArray[np.int64]) -> list[NDArray[np.int64]]:
    """These samples of an index, divided by class."""
    ordered = indices[np.argsort(index.labels[indices], kind="stable")]
    return np.split(ordered, np.flatnonzero(np.diff(index.labels[ordered])) + 1)


def _lowest(index: SampleIndex, samples: NDArray[np.int64], wanted: int, seed: int, kind: bytes) -> NDArray[np.int64]:
    """The samples whose names have the smallest hashes."""
    ranks = [_rank(seed, kind, encode_name(index.name(sample))) for sample in samples.tolist()]
    return samples[np.argsort(np.array(ranks, np.uint64), kind="stable")[:wanted]]


def _rank(seed: int, kind: bytes, name: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(name, digest_size=8, key=b"%s %d" % (kind, seed)).digest(), "big")
