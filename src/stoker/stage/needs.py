"""Which files of a source a config or a subset needs, by the same index and choice as in training; and the config that
trains from the copy.

Paths stay as they are at the source, so training finds the copy's layout by the same rules. A subset chosen again from
the copy is the same subset: classes and images are taken by the smallest hashes, and those are all in it.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np

from stoker.config import Config
from stoker.core.console import Advance, Say, some
from stoker.core.errors import ConfigError, UserError, did_you_mean
from stoker.core.files import write_text
from stoker.core.redact import redact_text
from stoker.core.units import count
from stoker.io.stores import is_url
from stoker.stage.copying import Selection, VolumeSelection
from stoker.tasks.images.data import chosen_record, open_split
from stoker.tasks.images.layouts.imagenet_labels import DEVKITS
from stoker.tasks.images.layouts.listing import split_place
from stoker.tasks.images.layouts.sample_index import SampleIndex, SampleSet, all_samples
from stoker.tasks.images.layouts.splits import find_split
from stoker.tasks.images.layouts.subset import choose_subset
from stoker.tasks.volumes.cases.cases import open_cases
from stoker.tasks.volumes.formats.opening import local_path

_NOT_TRAINED_ON = ("test_images/", "imagesTs/")


def select_for(
    config: Config, class_list: tuple[str, ...] | None = None, progress: Advance | None = None, say: Say | None = None
) -> tuple[str, Selection]:
    """The root that a config reads from, and the parts of it that it needs."""
    if config.data_root is None:
        raise ConfigError("data_root is not set", name="no-data", hint="data_root=/folder/with/train/and/val")
    if config.task != "classify":
        if class_list is not None or config.subset_classes is not None:
            raise UserError("no-classes", "volumes have no class folders to choose from", hint="leave out the classes")
        return _volumes(config.data_root)
    return config.data_root, _images(config, class_list, progress, say)


def _volumes(root: str) -> tuple[str, Selection]:
    if not root.endswith((".yaml", ".yml")):
        open_cases(root)  # reports errors before anything is copied
        return root, Selection(left_out=_NOT_TRAINED_ON)
    folder = root.rpartition("/")[0] or "."
    if not is_url(folder):
        folder = str(Path(folder).expanduser().resolve())
    listed = open_cases(root)
    refs = [ref.location for case in listed.cases for ref in (*case.images, *([case.label] if case.label else []))]
    outside = [ref for ref in refs if not local_path(ref).startswith(f"{folder}/")]
    if outside:
        raise UserError(
            "volumes-elsewhere",
            f"{count(len(outside), 'volume')} of {root} outside its folder: {some(outside)}",
            why="a copy keeps the paths below the folder of the list",
            hint="put the volumes below the folder of the list, or stage their folders one by one",
        )
    paths = tuple(sorted({local_path(ref)[len(folder) + 1 :] for ref in refs}))
    return folder, VolumeSelection(wanted_paths=(root.rpartition("/")[2], *paths))


def _images(config: Config, class_list: tuple[str, ...] | None, progress: Advance | None, say: Say | None) -> Selection:
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
    return chosen.selection(record)


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
    subset = choose_subset(
        index, classes=config.subset_classes, per_class=per_class, seed=config.subset_seed, names=classes, among=among
    )
    return SampleSet(index, subset.classes, subset.indices, subset.labels)


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


def write_config_of_copy(file: Path, config: Config, overrides: list[str], folder: str, output: Path | None) -> Path:
    """Writes a config with the original one as its base and the copy as its data_root; returns its path."""
    target = (output or Path(folder) / file.name).absolute()
    base = os.path.relpath(file.resolve(), target.parent.resolve())
    root = folder
    if config.task != "classify" and config.data_root is not None and config.data_root.endswith((".yaml", ".yml")):
        root = f"{folder}/{config.data_root.rpartition('/')[2]}"
    keys = dict(override.split("=", 1) for override in overrides)
    keys.pop("data_root", None)
    lines = [f"base: {json.dumps(base)}", f"data_root: {json.dumps(root)}"]
    lines += [f"{key}: {value}" for key, value in keys.items()]
    write_text(target, "\n".join(lines) + "\n")
    return target
