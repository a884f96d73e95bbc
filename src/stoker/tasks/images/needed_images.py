"""Which images and lists a config or a subset needs, by the same index and choice as in training.

Paths stay as they are at the source, so training finds the copy's layout by the same rules. A subset chosen again from
the copy is the same subset: classes and images are taken by the smallest hashes, and those are all in it.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from stoker.config import Config
from stoker.core.console import Advance, Say, some
from stoker.core.errors import UserError, did_you_mean
from stoker.core.redact import redact_text
from stoker.core.units import count
from stoker.io.stores import is_url
from stoker.tasks.images.data import chosen_record, open_split
from stoker.tasks.images.layouts.imagenet import DEVKITS
from stoker.tasks.images.layouts.sample_index import SampleIndex, SampleSet, all_samples
from stoker.tasks.images.layouts.splits import find_split, split_place
from stoker.tasks.images.layouts.subset import choose_subset
from stoker.tasks.needed_files import Selection


def needed_files(
    config: Config, class_list: tuple[str, ...] | None, progress: Advance | None, say: Say | None
) -> tuple[str, Selection]:
    """The root that a config reads from, and the parts of it that it needs."""
    root = config.data_root
    assert root is not None
    has_lists = config.train_csv or config.samples_csv or config.val_csv
    is_split = bool(has_lists) or config.val_fraction is not None or find_split(root, "train") is not None
    train = _open(config, "train" if is_split else "", class_list, None, progress, say)
    parts = [train]
    if is_split and (has_lists or config.val_fraction or find_split(root, "val") is not None):
        parts.append(_open(config, "val", None, train.classes, progress, say))
    base = split_place(root, "")
    chosen = _Chosen(base)
    for samples in parts:
        chosen.add(samples)
    if not is_url(base) and "layout" not in train.index.facts and not train.index.shards:
        chosen.keep_folders(train)
    record = chosen_record(config, train, parts[1] if len(parts) > 1 else None)
    if record is None and class_list is not None:
        wider = config.model_copy(update={"subset_classes": len(class_list)})
        record = chosen_record(wider, train, parts[1] if len(parts) > 1 else None)
    return root, chosen.selection(record)


def _open(
    config: Config,
    split: str,
    class_list: tuple[str, ...] | None,
    classes: tuple[str, ...] | None,
    progress: Advance | None,
    say: Say | None,
) -> SampleSet:
    index, among = open_split(config, split, progress=progress, say=say)
    per_class = config.subset_val_per_class if split == "val" else config.subset_train_per_class
    if config.val_fraction is not None and split:
        # The copy is divided again when it is trained on, so each class has to be whole.
        among, per_class = None, None
    if class_list is not None:
        classes = _known(index, class_list)
    if config.subset_classes is None and per_class is None and classes is None:
        return all_samples(index)
    return choose_subset(
        index, classes=config.subset_classes, per_class=per_class, seed=config.subset_seed, names=classes, among=among
    )


def _known(index: SampleIndex, names: tuple[str, ...]) -> tuple[str, ...]:
    known = set(index.classes)
    if strangers := [name for name in names if name not in known]:
        raise UserError(
            "class-unknown",
            f"{redact_text(index.root)} has no {count(len(strangers), 'class', 'classes')} {some(strangers)}",
            hint=did_you_mean(strangers[0], index.classes) or "a line of the list is the name of a class folder",
        )
    wanted = set(names)
    return tuple(name for name in index.classes if name in wanted)


class _Chosen:
    """Collects the files of the splits."""

    def __init__(self, base: str) -> None:
        self._base = base
        self._paths: set[str] = set()
        self._folders: set[str] = set()
        self._support = {""} | {folder for folder in DEVKITS if folder}
        self._empty: list[str] = []

    def add(self, samples: SampleSet) -> None:
        index, below = samples.index, self._below(samples.index)
        folder = below.rstrip("/")
        # Every folder from the root to the split: lists and labels may be in any of them.
        self._support |= {folder, *("/".join(folder.split("/")[:depth]) for depth in range(folder.count("/") + 1))}
        if index.shards:
            self._paths |= {below + shard for shard in index.shards}
            self._folders.add(folder)
            return
        members = np.arange(len(samples), dtype=np.int64)
        # A list is tried out on a few of its rows, wherever they are, so all of them have to be there.
        indices = np.arange(len(index)) if index.facts.get("layout") == "list" else samples.indices(members)
        for sample in indices.tolist():
            path = below + index.name(sample)
            self._paths.add(path)
            self._folders.add(path.rpartition("/")[0])

    def keep_folders(self, samples: SampleSet) -> None:
        below = self._below(samples.index)
        self._empty += [below + name for name in samples.classes]

    def selection(self, record: dict[str, Any] | None) -> Selection:
        return Selection(
            tuple(sorted(self._folders)),
            frozenset(self._paths),
            frozenset(self._support),
            empty_folders=tuple(self._empty),
            record=record,
        )

    def _below(self, index: SampleIndex) -> str:
        place = index.root.rstrip("/")
        if place == self._base:
            return ""
        assert place.startswith(f"{self._base}/"), (place, self._base)
        return place[len(self._base) + 1 :] + "/"
