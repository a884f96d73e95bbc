"""Is the data there, whole, and the same classes in training and validation? Without reading an image."""

from __future__ import annotations

import shlex
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stoker.core.console import shown, some
from stoker.core.errors import UserError
from stoker.core.finding import Finding
from stoker.core.units import count
from stoker.io.stores import is_url
from stoker.tasks.checks import Check, Subject, failed, passed, unknown
from stoker.tasks.images.layouts import imagenet
from stoker.tasks.images.layouts.listing import class_names
from stoker.tasks.images.layouts.sample_index import SampleIndex
from stoker.tasks.images.layouts.splits import split_place

LIKE_VALIDATION = ("val", "dev", "test", "eval", "holdout")
"""Prefixes of folder names that people use for validation."""
# A class with less than a tenth of the usual number of images was probably cut short, unless there are many of them:
# then the data has a long tail.
SMALL_SHARE = 0.1
RARE_SHARE = 0.05
USUAL_LEAST = 20
"""If the usual class has fewer images, a small one says nothing."""
CLOSE_SHARE = 0.001
"""ImageNet with this many images more or less, and every class in its range, is complete: people remove broken ones."""
SHOWN_CLASSES = 12


def check_present(subject: Subject) -> Finding:
    """Training images can be listed, and there are several classes."""
    try:
        train, val = subject.data.train, subject.data.val
    except UserError as error:
        if error.name == "classes-differ":
            return passed(f"{shown(str(subject.config.data_root))} has train and val")  # another check's finding
        why = f" ({error.why})" if error.why else ""
        return failed(f"{error.seen}{why}", error.hint or "data_root=FOLDER", reason=error.name)
    validation = "no validation images" if val is None else f"{len(val):,} validation images"
    return passed(
        f"{len(train):,} training images in {len(train.classes):,} classes, {validation}",
        train=len(train),
        val=None if val is None else len(val),
        classes=len(train.classes),
    )


def check_validation_split(subject: Subject) -> Finding:
    """There is a validation split; if not, suggests a folder that may be meant."""
    train, val = subject.data.train, subject.data.val
    if val is not None:
        return passed(f"{len(val):,} images in {shown(val.index.root)}")
    root = str(subject.config.data_root)
    lost = "without one there is no val/acc1, and no best checkpoint"
    names = [] if is_url(root) else class_names(split_place(root, ""))
    for name in (name for name in names if name != "train" and name.lower().startswith(LIKE_VALIDATION)):
        folders = class_names(split_place(root, name))
        same = len(set(folders) & set(train.index.classes))
        if same:
            link = shlex.quote(f"{split_place(root, '')}/val")
            return failed(
                f"there is no val/, but {shown(name)}/ has {same:,} of the {len(train.classes):,} classes; {lost}",
                f"ln -s {shlex.quote(name)} {link}",
                found=name,
            )
    return unknown(f"no validation split; {lost}", "put validation images into val/CLASS/ beside train/")


def check_counts(subject: Subject) -> Finding:
    """Images per class: against ImageNet's own numbers, or among each other."""
    train, val = subject.data.train, subject.data.val
    counts = _counts(train.index, train.classes)
    facts: dict[str, Any] = {"images": int(counts.sum()), "fewest": int(counts.min()), "most": int(counts.max())}
    if imagenet.is_whole_imagenet(train.index.classes) and imagenet.is_whole_imagenet(train.classes):
        held = None if val is None else _counts(val.index, train.classes)
        return _judge_imagenet(counts, held, train.classes, facts)
    seen = f"{counts.sum():,} training images, {counts.min():,} to {counts.max():,} in a class"
    empty = [name for name, images in zip(train.classes, counts.tolist(), strict=True) if not images]
    if empty:
        return failed(
            f"{count(len(empty), 'class', 'classes')} without training images: {some(empty)}",
            f"copy their images to {shown(train.index.root)} again, or --skip class-counts if that is meant",
            empty=empty,
            **facts,
        )
    usual = float(np.median(counts))
    small = np.flatnonzero(counts < SMALL_SHARE * usual)
    facts["median"] = usual
    if len(small) and usual >= USUAL_LEAST:
        names = [f"{shown(train.classes[at])} ({counts[at]:,})" for at in small]
        if len(small) <= max(1, RARE_SHARE * len(counts)):
            return failed(
                f"{seen}; strangely few in {some(names)}, where the usual class has {usual:,.0f}",
                f"copy these folders to {shown(train.index.root)} again, or --skip class-counts if they are whole",
                small=[train.classes[at] for at in small],
                **facts,
            )
        return passed(f"{seen}: a long tail, {len(small):,} classes have less than a tenth of the usual", **facts)
    return passed(seen, **facts)


def _judge_imagenet(
    counts: NDArray[np.int64], held: NDArray[np.int64] | None, classes: tuple[str, ...], facts: dict[str, Any]
) -> Finding:
    low, high = imagenet.TRAIN_PER_CLASS
    wrong = [f"train/{classes[at]}: {counts[at]:,} ({low} to {high:,})" for at in _outside(counts, low, high)]
    total = int(counts.sum())
    seen = f"ImageNet: {total:,} training images"
    whole = abs(total - imagenet.TRAIN_IMAGES) <= CLOSE_SHARE * imagenet.TRAIN_IMAGES
    if held is not None:
        each = imagenet.VAL_PER_CLASS
        wrong += [f"val/{classes[at]}: {held[at]:,} ({each})" for at in _outside(held, each, each)]
        seen += f", {held.sum():,} for validation"
        facts["val_images"] = int(held.sum())
    expected = f"{imagenet.TRAIN_IMAGES:,} and {imagenet.VAL_IMAGES:,}"
    if wrong or not whole:
        more = [f"and {len(wrong) - SHOWN_CLASSES} more"] if len(wrong) > SHOWN_CLASSES else []
        return failed(
            f"{seen}, instead of {expected}; {count(len(wrong), 'class folder')} of another size than ImageNet's",
            "copy or unpack these folders again, or --skip class-counts if you chose a part on purpose",
            *wrong[:SHOWN_CLASSES],
            *more,
            **facts,
        )
    same = total == imagenet.TRAIN_IMAGES and (held is None or int(held.sum()) == imagenet.VAL_IMAGES)
    return passed(seen + (", as published" if same else f" (published: {expected})"), **facts)


def _outside(counts: NDArray[np.int64], low: int, high: int) -> list[int]:
    return [int(at) for at in np.flatnonzero((counts < low) | (counts > high))]


def check_classes_agree(subject: Subject) -> Finding | None:
    """Training and validation have the same classes, and each of them images."""
    try:
        train, val = subject.data.train, subject.data.val
    except UserError as error:
        if error.name != "classes-differ":
            raise
        return failed(error.seen, error.hint or "the class folders of train and val must have the same names")
    if val is None:
        return None
    counts = _counts(val.index, train.classes)
    lacking = [name for name, images in zip(train.classes, counts.tolist(), strict=True) if not images]
    if lacking:
        return failed(
            f"{shown(val.index.root)} has no images of {len(lacking):,} of the {len(train.classes):,} classes: "
            f"{some(lacking)}; nothing would show how well they are learned",
            f"copy them to {shown(val.index.root)}/{shown(lacking[0])}/ and so on",
            lacking=lacking,
        )
    return passed(f"train and val have the same {len(train.classes):,} classes", classes=len(train.classes))


def _counts(index: SampleIndex, classes: tuple[str, ...]) -> NDArray[np.int64]:
    """Number of images of each of these classes, by name; 0 for one without a folder."""
    images = np.bincount(index.labels, minlength=len(index.classes))
    of_name = dict(zip(index.classes, images.tolist(), strict=True))
    return np.array([of_name.get(name, 0) for name in classes], np.int64)


SPLIT_CHECKS = (
    Check("data-present", "data", "training data can be listed", check_present),
    Check("validation-split", "data", "a validation split", check_validation_split),
    Check("class-counts", "data", "images in each class", check_counts, cheap=True),
    Check("classes-agree", "data", "the same classes in train and val", check_classes_agree, cheap=True),
)
