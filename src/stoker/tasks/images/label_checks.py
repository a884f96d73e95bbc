"""Do the folders hold the classes that they are named after? By ImageNet's file names, or by a trained network."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stoker.core.console import shown, some
from stoker.core.finding import Finding
from stoker.core.units import count
from stoker.tasks.checks import Check, Subject, failed, first_lines, passed, unknown
from stoker.tasks.images.data_checks import in_turns
from stoker.tasks.images.layouts.imagenet import (
    DEVKIT_FIRST,
    are_class_numbers,
    is_synset,
    real_labels,
    spoken,
    synsets,
    synsets_in_names,
    validation_numbers,
)
from stoker.tasks.images.layouts.sample_index import SampleIndex, SampleSet
from stoker.tasks.images.permuted_labels import (
    EXPLAINED,
    FolderMapping,
    closed_cycles,
    describe_mapping,
    likely_mapping,
)

# ReaL labels agree with the official labels of 42,164 of the 46,837 validation images that have any: 90.0 %. By class
# the worst is 18 % (tape player), then 39 %; by any 50 neighbouring classes at least 84 %. Images spread at random
# agree for 0.1 %, folders in a random order for 0.4 %, shifted by one for 1.7 %. Measured with the official list, which
# is not part of this project.
EXPECTED_SHARE = 0.9
LEAST_SHARE = 0.75
MANY_FOLDERS = 50
LEAST_SHARE_OF_FEW = 0.35
# A folder holds another class if hardly any image agrees with its own and most with the other.
OWN_BELOW = 0.15
OTHER_FROM = 0.5
LEAST_IMAGES = 8
"""Labelled images that a folder needs before it is judged on its own."""
LEAST_IN_ALL = 20
SHOWN_FOLDERS = 12

# For the check by a network.
IMAGES_PER_CLASS = 8
DEEP_IMAGES_PER_CLASS = 50
SECONDS = 45.0
DEEP_SECONDS = 900.0
WEAK_SHARE = 0.2
"""Share of the way from chance to perfect below which a network cannot judge labels."""
MOVED_SHARE = 0.2
"""Share of the folders that have to be permuted to be sure, unless they form closed cycles, such as a swap."""


def check_validation_names(subject: Subject) -> Finding | None:
    """Every ILSVRC2012_val_… file against the ReaL labels of its number."""
    train, val = subject.data.train, subject.data.val
    if val is None:
        return None
    samples, numbers = validation_numbers(val.index)
    if not len(samples):
        return None
    table = real_labels()
    known = (numbers >= 1) & (numbers <= len(table))
    if not known.any():
        return unknown("timm's table of ReaL labels is not there, or the file names have other numbers")
    own = _imagenet_classes(train, val)
    if own is None:
        return unknown(
            f"{shown(val.index.root)} has ImageNet's validation images, but its folders have other names than synsets",
            "name the folders n01440764, n01443537, …",
        )
    labels = np.asarray(val.index.labels)[samples[known]]
    votes = _votes(labels, [table[number - 1] for number in numbers[known].tolist()], own, len(synsets()))
    if votes.images.sum() < LEAST_IN_ALL:
        return unknown(f"only {count(int(votes.images.sum()), 'validation image')} with a known ReaL label")
    return _judge_votes(votes, val.index, own)


@dataclass(frozen=True)
class _Votes:
    """What the ReaL labels show about each folder."""

    counts: NDArray[np.float64]
    """Images of each class (folders, classes); one with several labels is divided among them."""
    images: NDArray[np.int64]
    """Images with ReaL labels."""
    agreeing: NDArray[np.int64]
    """Images with the folder's own class among their labels."""

    @property
    def share(self) -> float:
        return float(self.agreeing.sum() / self.images.sum())

    @property
    def own_shares(self) -> NDArray[np.float64]:
        return self.agreeing / np.maximum(self.images, 1)


def _votes(labels: NDArray[np.int32], entries: Sequence[Sequence[int]], own: Sequence[int], classes: int) -> _Votes:
    votes = _Votes(np.zeros((len(own), classes)), np.zeros(len(own), np.int64), np.zeros(len(own), np.int64))
    for folder, entry in zip(labels.tolist(), entries, strict=True):
        if not entry or own[folder] < 0:
            continue
        for label in entry:
            votes.counts[folder, label] += 1 / len(entry)
        votes.images[folder] += 1
        votes.agreeing[folder] += own[folder] in entry
    return votes


def _judge_votes(votes: _Votes, index: SampleIndex, own: Sequence[int]) -> Finding:
    mapping = likely_mapping(votes.counts, own)
    held = np.array([-1 if label is None else label for label in mapping.holds])
    of_other = votes.counts[np.arange(len(own)), held] / np.maximum(votes.images, 1)
    folders = int((votes.images > 0).sum())
    least = LEAST_SHARE if folders >= MANY_FOLDERS else LEAST_SHARE_OF_FEW
    sure = votes.own_shares < OWN_BELOW
    if votes.share >= least or mapping.explained < EXPLAINED:
        # Most folders are right, or nothing is clear: then each one has to be a clear case.
        sure &= (votes.images >= LEAST_IMAGES) & (of_other >= OTHER_FROM)
    wrong = [folder for folder in mapping.moved if sure[folder]]
    total = int(votes.images.sum())
    seen = (
        f"{votes.share:.1%} of {total:,} validation images agree with their folder by ReaL labels "
        f"(right folders: about {EXPECTED_SHARE:.0%})"
    )
    facts: dict[str, Any] = {"share": round(votes.share, 4), "images": total, "folders": folders}
    if votes.share >= least and not wrong:
        return passed(seen, **facts)
    if folders < len(synsets()) and _numbers_a_subset(mapping, index.classes):
        return passed(f"the folders number {folders} of ImageNet's classes in their order (ReaL labels)", **facts)
    names = [shown(name) for name in index.classes]
    spoken_names = [spoken(synset) for synset in synsets()]
    facts |= {"holds": {index.classes[folder]: synsets()[held[folder]] for folder in wrong}}
    if not wrong:
        return failed(
            f"{seen}: no order of the folders explains it, the images are spread over them",
            "sort the images into folders again, by a list of file names and synsets such as LOC_val_solution.csv",
            **facts,
        )
    lines = [f"{names[folder]} holds {spoken_names[held[folder]]}" for folder in wrong]
    lines = first_lines(lines, SHOWN_FOLDERS, " (--json lists all)")
    if _in_devkit_order(mapping, names):
        return failed(
            f"{seen}: numbered in the order of the devkit (ILSVRC2012_ID), not of the names",
            "sort the images again: the numbers of ILSVRC2012_validation_ground_truth.txt are those of meta.mat",
            *lines, **facts,
        )  # fmt: skip
    return failed(
        f"{seen}: {count(len(wrong), 'folder')} of {folders} permuted, "
        f"{describe_mapping(mapping.only(wrong), names, synsets())}",
        f"rename the folders below {shown(index.root)} to what they hold, or sort the images again",
        *lines, **facts,
    )  # fmt: skip


def _in_devkit_order(mapping: FolderMapping, folders: Sequence[str]) -> bool:
    order = sorted(range(len(folders)), key=lambda folder: mapping.own[folder])
    held = [mapping.holds[folder] for folder in order[: len(DEVKIT_FIRST)]]
    numbers = {synset: number for number, synset in enumerate(synsets())}
    return held == [numbers[synset] for synset in DEVKIT_FIRST]


def _numbers_a_subset(mapping: FolderMapping, folders: Sequence[str]) -> bool:
    """Whether folders named 0, 1, 2, … hold ascending classes: a subset that was renumbered."""
    if any(own >= 0 and name != str(own) for own, name in zip(mapping.own, folders, strict=True)):
        return False  # other names, or numbers that the training files explain
    pairs = sorted((own, held) for own, held in zip(mapping.own, mapping.holds, strict=True) if held is not None)
    held = [label for _, label in pairs]
    return len(held) >= 0.8 * len(mapping.own) and held == sorted(held)


def _imagenet_classes(train: SampleSet, val: SampleSet) -> list[int] | None:
    """ImageNet's number of the class that each folder of val stands for, -1 if it is not to be trained; None if the
    folder names do not show it."""
    numbers = {synset: number for number, synset in enumerate(synsets())}
    folders = val.index.classes
    if not any(name in numbers for name in folders):
        # Names of another kind: those of the training files say what they mean.
        numbers = {folder: numbers[synset] for folder, synset in _synset_of_folders(train.index).items()}
    if not any(name in numbers for name in folders):
        if not are_class_numbers(folders):
            return None
        numbers = {name: int(name) for name in folders}
    trained = set(train.classes)
    return [numbers.get(name, -1) if name in trained else -1 for name in folders]


def _synset_of_folders(index: SampleIndex) -> dict[str, str]:
    """The class of each folder, if nearly all of its files have the same known synset in their names."""
    found = {}
    for folder, members in _names_by_folder(index).items():
        values, counts = np.unique(members, return_counts=True)
        synset = f"n{values[counts.argmax()]:08d}"
        if counts.max() >= 0.9 * counts.sum() and synset in set(synsets()):
            found[index.classes[folder]] = synset
    return found


def _names_by_folder(index: SampleIndex) -> dict[int, NDArray[np.int64]]:
    """For each folder the numbers of the synsets in its files' names."""
    samples, numbers = synsets_in_names(index)
    if not len(samples):
        return {}
    labels = np.asarray(index.labels)[samples]
    order = np.argsort(labels, kind="stable")
    folders, starts = np.unique(labels[order], return_index=True)
    parts = np.split(numbers[order], starts[1:])
    return dict(zip(folders.tolist(), parts, strict=True))


def check_training_names(subject: Subject) -> Finding | None:
    """The synset that ImageNet's training files have in their names against the folder's."""
    index = subject.data.train.index
    trained = set(subject.data.train.classes)
    files = wrong = 0
    strangers: list[tuple[str, dict[int, int]]] = []
    for folder, numbers in _names_by_folder(index).items():
        name = index.classes[folder]
        if not is_synset(name) or name not in trained:
            continue
        files += len(numbers)
        others = numbers[numbers != int(name[1:])]
        if len(others):
            wrong += len(others)
            values, counts = np.unique(others, return_counts=True)
            strangers.append((name, dict(zip(values.tolist(), counts.tolist(), strict=True))))
    if not files:
        return None
    if not wrong:
        return passed(f"{files:,} training files have their folder's synset in their names", files=files)
    lines = []
    for name, others in strangers[:SHOWN_FOLDERS]:
        synset, images = max(others.items(), key=lambda pair: pair[1])
        lines.append(f"{spoken(name)} has {count(images, 'file')} of {spoken(f'n{synset:08d}')}")
    return failed(
        f"{wrong:,} of {files:,} training files are in another folder than the synset in their names: "
        f"{count(len(strangers), 'folder')}, {some([name for name, _ in strangers])}",
        "move each file to the folder that its name begins with, or unpack ILSVRC2012_img_train.tar again",
        *lines,
        files=files,
        wrong=wrong,
        folders=[name for name, _ in strangers],
    )


def check_by_model(subject: Subject) -> Finding | None:
    """A few images of every class, classified by a network that knows them."""
    train, val = subject.data.train, subject.data.val
    samples = train if val is None else val
    if subject.weights is None:
        by_names = check_validation_names(subject)
        if by_names is not None and by_names.status != "unknown":
            return None  # the file names already answer it
        return unknown(
            "whether the folders hold their classes: file names do not say, a trained network would",
            f"stoker verify {subject.path} --weights FILE (a checkpoint, or published weights of the same classes)",
        )
    from stoker.tasks.images.image_prediction import predicted_classes
    from stoker.tasks.images.models import open_for_classes

    trained = open_for_classes(subject.weights, subject.config, train.classes, subject.say)
    numbers = {name: number for number, name in enumerate(trained.classes)}
    own = [numbers.get(name, -1) for name in samples.classes]
    if (known := sum(label >= 0 for label in own)) < 2:
        return unknown(
            f"{subject.weights} knows none of the classes: {some(list(samples.classes))}",
            "--weights with a network that was trained on these classes",
        )
    per_class, seconds = (DEEP_IMAGES_PER_CLASS, DEEP_SECONDS) if subject.deep else (IMAGES_PER_CLASS, SECONDS)
    counts = predicted_classes(trained, samples, in_turns(samples, per_class), time.monotonic() + seconds)
    return _judge_confusion(counts, own, samples, trained.classes, subject.weights, known)


def _judge_confusion(
    counts: NDArray[np.int64], own: Sequence[int], samples: SampleSet, outputs: Sequence[str], weights: Path, known: int
) -> Finding:
    rows = [folder for folder, label in enumerate(own) if label >= 0]
    images = int(counts[rows].sum())
    right = int(sum(counts[folder, own[folder]] for folder in rows))
    share, chance = right / max(1, images), 1 / known
    mapping = likely_mapping(counts, own)
    wrong = _surely_moved(mapping, known)
    seen = f"{share:.1%} of {images:,} images of {known} classes are recognised by {weights}"
    facts: dict[str, Any] = {"share": round(share, 4), "images": images, "classes": known}
    if wrong:
        folders = [shown(name) for name in samples.classes]
        lines = [f"{folders[folder]} holds {outputs[mapping.moved[folder]]}" for folder in wrong[:SHOWN_FOLDERS]]
        facts |= {"holds": {samples.classes[folder]: outputs[mapping.moved[folder]] for folder in wrong}}
        return failed(
            f"{seen}: {count(len(wrong), 'folder')} permuted, "
            f"{describe_mapping(mapping.only(wrong), folders, outputs)}",
            f"rename the folders below {shown(samples.index.root)} to what they hold",
            *lines,
            **facts,
        )
    if share < chance + WEAK_SHARE * (1 - chance):
        return unknown(
            f"{seen}, and no order of the folders explains the rest: the network does not know these images, or they "
            f"are spread over the folders",
            "--weights with a network that is known to be good on these classes",
            **facts,
        )
    return passed(seen, **facts)


def _surely_moved(mapping: FolderMapping, known: int) -> list[int]:
    """The permuted folders: many, or those that hold each other's classes."""
    many = len(mapping.moved) >= max(2, MOVED_SHARE * known)
    return list(mapping.moved) if many else closed_cycles(mapping)


LABEL_CHECKS = (
    Check("val-labels", "labels", "validation images in the right folders", check_validation_names, cheap=True),
    Check("train-labels", "labels", "training files in the right folders", check_training_names),
    Check("labels-by-network", "labels", "folders against what a trained network sees", check_by_model),
)
