"""Finds the splits of a data root, however it is laid out: folders or files named after them, at the usual places."""

from __future__ import annotations

import mimetypes
import os
import re
import shlex
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote, urlsplit

from stoker.core.console import shown, some
from stoker.core.errors import UserError, did_you_mean
from stoker.core.redact import redact_text
from stoker.io.stores import StoreDown, is_url
from stoker.tasks.images.layouts.sample_index import decode_name, encode_name

SPLIT_NAMES = {"train": ("train",), "val": ("val", "valid", "validation", "test")}
"""Names of a split, the preferred one first."""
BASES = ("", "ILSVRC/Data/CLS-LOC", "Data/CLS-LOC", "data")
"""Places of the splits below the root: the root itself, as Kaggle unpacks ImageNet, and `data` of a Hugging Face
repository."""
FILE_KINDS = (".tar", ".parquet")
LABELLED = (*FILE_KINDS, ".csv", ".jsonl", "index.json")
"""Files that hold labels, by the end of their names; a pack has an index.json."""
LISTS = (".csv", ".tsv", ".jsonl")
TRIED = 16


class Entries(NamedTuple):
    """What a folder or URL contains directly, without hidden names; sorted."""

    folders: tuple[str, ...]
    files: tuple[str, ...]
    versions: dict[str, Sequence[Any]]
    """For a URL's files, what shows that one has been replaced. A folder's are looked up when needed."""


@dataclass(frozen=True)
class FoundSplit:
    folder: str
    """Relative to the root; "" for the root itself."""
    files: tuple[str, ...] = ()
    """Names in that folder, if the split is some of its files."""
    name: str = ""
    """Its name there, such as `valid`."""
    note: str | None = None
    """What the user should know about the choice."""


def split_place(root: str, split: str) -> str:
    """The folder or URL of a split; `split=""` is the root itself."""
    if root.startswith("file://"):
        root = unquote(urlsplit(root).path)
    if is_url(root):
        return f"{root.rstrip('/')}/{split}".rstrip("/")
    # Absolute: a worker may have another working directory.
    return os.path.abspath(os.path.join(os.path.expanduser(root), split))  # noqa: PTH100, PTH118, PTH111


def check_folder(root: str, split: str) -> None:
    """Raises UserError if a split does not exist, and says what does."""
    place = split_place(root, split)
    try:
        if stat.S_ISDIR(os.stat(place).st_mode):  # noqa: PTH116 - Path.is_dir hides what went wrong
            return
        raise UserError("data-not-found", f"{shown(place)} is a file, not a folder", hint="data_root=FOLDER")
    except (FileNotFoundError, NotADirectoryError):
        pass
    except OSError as error:
        raise not_readable(place, error) from None
    base = Path(split_place(root, ""))
    if base.is_dir():
        there = _names_in(base)
        raise UserError(
            "split-not-found",
            f"{shown(str(base))} has no folder {shown(split)}",
            why=f"it contains {some(there)}" if there else "it is empty",
            hint=did_you_mean(split, there)
            or _without_splits(base)
            or f"data_root must contain {split}/CLASS/IMAGE.jpg",
        )
    existing = base
    while not existing.is_dir() and existing != existing.parent:
        existing = existing.parent
    missing = base.relative_to(existing).parts[0]
    there = _names_in(existing)
    raise UserError(
        "data-not-found",
        f"{shown(str(base))} does not exist",
        why=f"{existing} exists and contains {some(there)}" if there else f"{existing} exists and is empty",
        # Names in a folder are not chosen to differ: two changed letters make another word, and /nope is not /home.
        hint=did_you_mean(missing, there, most_edits=1) or "data_root=FOLDER",
    )


def _without_splits(base: Path) -> str | None:
    """How to train on a folder that has its classes, or a list of them, at its top."""
    entries = [entry for entry in base.iterdir() if not entry.name.startswith(".")]
    lists = sorted(entry.name for entry in entries if entry.suffix in LISTS and entry.is_file())
    if len(lists) == 1:
        return f"samples_csv={lists[0]}, if it says which class each image has; with val_fraction=0.1 for validation"
    if sum(any(map(_is_image, _names_in(entry)[:TRIED])) for entry in entries[:TRIED] if entry.is_dir()) >= 2:
        return "val_fraction=0.1, if these folders are classes: it sets a tenth of each aside for validation"
    return None


def _is_image(name: str) -> bool:
    return str(mimetypes.guess_type(name)[0]).startswith("image/")


def not_readable(path: str, error: OSError) -> UserError:
    """The error for a folder that exists and cannot be listed."""
    return UserError(
        "data-not-readable",
        f"{shown(path)} cannot be listed: {error.strerror or error}",
        why="all samples must be listed before training can start",
        hint=f"ls -ld {shlex.quote(path)}" if path.isprintable() else None,
    )


def _names_in(folder: Path) -> list[str]:
    try:
        return sorted(entry.name for entry in folder.iterdir() if not entry.name.startswith("."))
    except OSError:
        return []


def list_entries(place: str) -> Entries | None:
    """What a place contains; None if it does not exist."""
    if is_url(place):
        from stoker.io.object_store import ObjectStore

        folders, objects = ObjectStore(place).entries()
        if not folders and not objects:
            return None  # an object store has no empty folders
        return Entries(tuple(folders), tuple(objects), objects)
    folder_names: list[bytes] = []
    file_names: list[bytes] = []
    try:
        with os.scandir(encode_name(place)) as found:
            for entry in found:
                if not entry.name.startswith(b"."):
                    (folder_names if entry.is_dir() else file_names).append(entry.name)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise not_readable(place, error) from None
    return Entries(tuple(map(decode_name, sorted(folder_names))), tuple(map(decode_name, sorted(file_names))), {})


def find_split(root: str, split: str) -> FoundSplit | None:
    """Where a split is below the root; None if there is none."""
    names = SPLIT_NAMES.get(split)
    if names is None or split_place(root, "").startswith(("http://", "https://")):  # a web server does not list
        return FoundSplit(split)
    try:
        return _search(root, names)
    except StoreDown as error:
        # Keys that may read but not list are common, and packed shards need no more.
        if error.name == "credentials-refused":
            return FoundSplit(split)
        raise


def require_split(root: str, split: str) -> FoundSplit:
    """The same; raises UserError if there is none, and says what there is. `split=""` is the root itself."""
    found = find_split(root, split) if split else FoundSplit("")
    place = split_place(root, "")
    if not is_url(place):
        check_folder(root, split if found is None else found.folder)
    elif found is None:
        raise UserError(
            "split-not-found",
            f"{redact_text(place)} has no {split}/",
            why=f"nothing there is called {' or '.join(SPLIT_NAMES.get(split, (split,)))}",
            hint=f"data_root must contain {split}/CLASS/IMAGE.jpg, or see docs/bring-your-data.md",
        )
    assert found is not None
    return found


def _search(root: str, names: tuple[str, ...]) -> FoundSplit | None:
    first: FoundSplit | None = None
    for base in BASES:
        entries = list_entries(split_place(root, base))
        if entries is None:
            continue
        found = _named(root, entries, base, names)
        if _named(root, entries, base, SPLIT_NAMES["train"]) is not None:
            return found  # the splits of a data set are side by side
        first = first or found
    return first


def _named(root: str, entries: Entries, base: str, names: tuple[str, ...]) -> FoundSplit | None:
    for name in names:
        below = f"{base}/{name}" if base else name
        note = None if name == names[0] else f"there is no {names[0]}/: using {shown(name)} for validation"
        if name in entries.folders and (note is None or _has_labels(split_place(root, below))):
            last = f"{base}/{names[-1]}" if base else names[-1]
            if below != last and names[-1] in entries.folders and _has_labels(split_place(root, last)):
                note = f"{f'{note}; ' if note else ''}{last}/ is not used"
            return FoundSplit(below, name=name, note=note)
        for kind in FILE_KINDS:
            if files := tuple(file for file in entries.files if _is_part(file, name, kind)):
                return FoundSplit(base, files, name, note)
    return None


def _has_labels(place: str) -> bool:
    """Whether a folder has classes or any file that may name them: `test/` is often a competition's, without labels."""
    entries = list_entries(place)
    return entries is not None and bool(entries.folders or any(file.endswith(LABELLED) for file in entries.files))


def _is_part(file: str, split: str, kind: str) -> bool:
    """Whether a file is a part of a split by its name, such as `imagenet-train-000012.tar`."""
    return file.endswith(kind) and split in re.split(r"[^a-z]+", file.removesuffix(kind).lower())
