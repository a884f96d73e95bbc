"""Opens a split that is not made of class folders: a flat folder with a file of labels, a list, or tars or parquet
files of others. Each way gives the same index."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from stoker.core.console import Advance, Say, shown
from stoker.core.errors import UserError
from stoker.core.redact import redact_text
from stoker.core.units import count
from stoker.io.stores import is_url
from stoker.tasks.images.layouts.foreign_tars import list_tars
from stoker.tasks.images.layouts.imagenet_labels import LabelFileWrong, classes_of_images, exists, find_labels
from stoker.tasks.images.layouts.kept_index import keep_or_make
from stoker.tasks.images.layouts.listing import CLOCK_TICK_NS, IMAGE_SUFFIXES, split_place
from stoker.tasks.images.layouts.parquet_files import list_parquet
from stoker.tasks.images.layouts.sample_index import SampleIndex, encode_name
from stoker.tasks.images.layouts.sample_lists import class_order, has_labels, index_of_labels, read_list, rows_of_split
from stoker.tasks.images.layouts.splits import Entries, list_entries

METADATA = ("metadata.csv", "metadata.jsonl")
"""Files in which Hugging Face `datasets` keeps the labels of a folder of images."""
# Rows of a list that are tried; a wrong data_root is noticed before training, without a request for a million files.
FILES_TRIED = 16

Make = Callable[[], SampleIndex]


def open_labelled_place(
    place: str,
    files: Sequence[str],
    *,
    index_dir: Path | None,
    progress: Advance | None = None,
    rebuild: bool = False,
    say: Say | None = None,
) -> SampleIndex | None:
    """The index of a place with its labels in files; None if it has class folders, or no known layout.

    `files` are those of the place that belong to the split; empty for all."""
    entries = None if place.startswith(("http://", "https://")) else list_entries(place)
    if entries is None:
        return None
    mine = list(files) or list(entries.files)
    tars = [name for name in mine if name.endswith(".tar")]
    parquets = [name for name in mine if name.endswith(".parquet")]
    metadata = next((name for name in METADATA if name in entries.files), None)
    flat = [name for name in mine if encode_name(name.lower()).endswith(IMAGE_SUFFIXES)]

    def opened(kind: str, depends_on: Sequence[str], make: Make) -> SampleIndex:
        state = _states(place, depends_on, entries)
        return keep_or_make(place, kind, state, make, index_dir=index_dir, rebuild=rebuild, say=say)

    if metadata is not None and (files or not parquets) and has_labels(f"{place}/{metadata}"):
        note = f"labels of {shown(redact_text(place))} from its {metadata}, as in Hugging Face datasets"
        path = f"{place}/{metadata}"
        return opened(metadata, [metadata], lambda: told(_index_of_list(path, place, ""), [note], None))
    if entries.folders and not files:
        return None
    if tars:
        return opened("tar " + " ".join(files), tars, lambda: list_tars(place, tars, progress))
    if parquets:
        return opened("parquet " + " ".join(files), parquets, lambda: list_parquet(place, parquets, progress))
    labels = find_labels(place) if flat else None
    if labels is None:
        return None
    return opened("flat", ["", labels], lambda: _index_of_flat(place, flat, labels))


def open_list(
    path: str,
    root: str,
    split: str,
    *,
    index_dir: Path | None,
    rebuild: bool = False,
    say: Say | None = None,
) -> SampleIndex:
    """The index of the rows of a list that belong to a split ("" for all); paths in it are relative to the root."""
    file, root = _find_list(path, root), split_place(root, "")
    state = _states("", [file], None)
    kind = f"list {file} {split}"
    index = keep_or_make(
        root, kind, state, lambda: _index_of_list(file, root, split), index_dir=index_dir, rebuild=rebuild, say=say
    )
    return told(index, index.facts["notes"], say)


def list_splits(path: str, root: str) -> list[str]:
    """The splits that a list has: train and val, or "" if it has no column of splits."""
    file, root = _find_list(path, root), split_place(root, "")
    samples = read_list(file, root)
    return (
        [split for split in ("train", "val") if rows_of_split(file, samples, split)[0]] if samples.has_splits else [""]
    )


def _find_list(path: str, root: str) -> str:
    if is_url(path):
        return path
    places = dict.fromkeys([split_place(root, path), os.path.abspath(os.path.expanduser(path))])  # noqa: PTH100, PTH111
    found = next((place for place in places if exists(place)), None)
    if found is None:
        raise UserError(
            "list-not-found",
            f"there is no {' and no '.join(redact_text(place) for place in places)}",
            why="the images and their labels are listed in it",
            hint="a path relative to data_root or to the current folder",
        )
    return found


def _index_of_list(path: str, root: str, split: str) -> SampleIndex:
    samples = read_list(path, root)
    rows, notes = rows_of_split(path, samples, split)
    if not rows:
        raise UserError("split-not-found", f"{redact_text(path)} has no rows of the split {split}")
    if not is_url(root):
        tried = rows[:: max(1, len(rows) // FILES_TRIED)]
        if not any(os.path.exists(os.path.join(root, row.path)) for row in tried):  # noqa: PTH110, PTH118
            hint = f"paths are relative to data_root: is {shown(root)} right?"
            raise LabelFileWrong(path, tried[0].line, f"{shown(tried[0].path)} does not exist", hint)
    labels = [row.label for row in rows]
    facts = {"layout": "list", "has_splits": samples.has_splits, "notes": notes}
    return index_of_labels(root, [row.path for row in rows], labels, class_order(labels), facts)


def _index_of_flat(place: str, names: Sequence[str], labels_file: str) -> SampleIndex:
    classes = classes_of_images(labels_file, names)
    labels = [classes[name] for name in names]
    note = (
        f"{count(len(names), 'image')} of {shown(redact_text(place))}: classes from {shown(redact_text(labels_file))}"
    )
    return index_of_labels(place, names, labels, class_order(labels), {"layout": "flat", "notes": [note]})


def _states(place: str, names: Sequence[str], entries: Entries | None) -> dict[str, Any]:
    """What shows that a file has been replaced: its size and time, or its version in an object store; None if it is so
    recent that it could change again unnoticed."""
    states: dict[str, Any] = {}
    for name in names:
        if entries is not None and is_url(place) and name in ("", *entries.versions):
            everything = hashlib.blake2b("\n".join(entries.files).encode(), digest_size=8).hexdigest()
            states[name] = list(entries.versions[name]) if name else everything
            continue
        path = name if name.startswith("/") or is_url(name) or not place else f"{place}/{name}".rstrip("/")
        if is_url(path):
            folder, _, file = path.rpartition("/")
            siblings = list_entries(folder)
            states[name] = list(siblings.versions[file]) if siblings and file in siblings.versions else None
            continue
        try:
            found = os.stat(path)  # noqa: PTH116
        except OSError as error:
            raise UserError("data-not-readable", f"{shown(path)}: {error.strerror}", hint="ls -l the folder") from None
        recent = found.st_mtime_ns > time.time_ns() - CLOCK_TICK_NS
        states[name] = None if recent else [found.st_size, found.st_mtime_ns]
    return states


def told(index: SampleIndex, notes: Sequence[str], say: Say | None) -> SampleIndex:
    """The index with these notes for the user, which are printed."""
    if say is not None:
        for note in notes:
            say(note)
    return replace(index, facts={**index.facts, "notes": list(notes)})
