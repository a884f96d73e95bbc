"""Lists, which are CSV or JSON Lines files with a row for each image; and what all files of labels share."""

from __future__ import annotations

import csv
import io
import json
import os
import posixpath
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from stoker.core.console import Say, shown, some
from stoker.core.errors import UserError
from stoker.core.redact import redact_text
from stoker.core.units import count
from stoker.io.stores import ReadFailure, is_url, open_store
from stoker.tasks.images.layouts.kept_index import index_of_files, states_of_files
from stoker.tasks.images.layouts.sample_index import SampleIndex, encode_name, sorted_index
from stoker.tasks.images.layouts.splits import SPLIT_NAMES, split_place

PATH_COLUMNS = ("path", "image", "filename", "file_name", "file", "image_path", "filepath")
LABEL_COLUMNS = ("label", "class", "class_name", "category", "target")
# Names that say it less clearly, for a list that the user names.
UNUSUAL_PATHS = ("file_path", "img", "img_path", "image_name", "img_name", "image_id", "img_id", "name", "id")
UNUSUAL_LABELS = ("labels", "class_id", "label_name", "category_name")
SPLIT_COLUMNS = ("split", "set", "subset", "partition")
SPLITS = {"train": ("train", "training"), "val": (*SPLIT_NAMES["val"], "dev")}
# Rows of a list that are tried; a wrong data_root is noticed before training, without a request for a million files.
FILES_TRIED = 16


class LabelFileWrong(UserError):
    """A file of labels that cannot be trusted, with the line at fault."""

    def __init__(self, path: str, line: int | None, seen: str, hint: str) -> None:
        where = f"{redact_text(path)}, line {line:,}" if line is not None else redact_text(path)
        super().__init__("labels-unusable", f"{where}: {seen}", why="images would get wrong classes", hint=hint)


def exists(path: str) -> bool:
    if not is_url(path):
        return Path(path).is_file()
    folder, _, name = path.rpartition("/")
    try:
        open_store(folder).about(name)
    except ReadFailure:
        return False
    return True


def read_text(path: str) -> str:
    """A file's text, or an object's; a byte order mark is dropped."""
    try:
        return read_bytes(path).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise LabelFileWrong(path, line, "it is not UTF-8 text", "save it as UTF-8") from None


def read_bytes(path: str) -> bytes:
    """The content of a file or object; raises UserError."""
    folder, _, name = path.rpartition("/")
    try:
        return bytes(open_store(folder or "/").read(name))
    except ReadFailure as failure:
        raise UserError(
            "data-not-readable",
            f"{redact_text(path)} cannot be read: {failure.detail or failure.reason}",
            why="the classes of the images are in it",
            hint="check its name and permissions",
        ) from None


def open_list(path: str, root: str, split: str, *, index_dir: Path | None, say: Say | None = None) -> SampleIndex:
    """The index of the rows of a list that belong to a split ("" for all); paths in it are relative to the root."""
    file, root = _find_list(path, root), split_place(root, "")
    make = lambda: index_of_list(file, root, split)  # noqa: E731
    index = index_of_files(root, f"list {file} {split}", states_of_files("", [file], None), make, index_dir, say)
    if say is not None:
        for note in index.facts["notes"]:
            say(note)
    return index


def list_splits(path: str, root: str) -> list[str]:
    """The splits that a list has: train and val, or "" if it has no column of splits."""
    file, root = _find_list(path, root), split_place(root, "")
    rows = read_list(file, root)
    return [split for split in ("train", "val") if rows_of_split(file, rows, split)[0]] if rows[0].split else [""]


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


def index_of_list(path: str, root: str, split: str) -> SampleIndex:
    listed = read_list(path, root)
    rows, notes = rows_of_split(path, listed, split)
    if not rows:
        raise UserError("split-not-found", f"{redact_text(path)} has no rows of the split {split}")
    if not is_url(root):
        tried = rows[:: max(1, len(rows) // FILES_TRIED)]
        if not any(os.path.exists(os.path.join(root, row.path)) for row in tried):  # noqa: PTH110, PTH118
            hint = f"paths are relative to data_root: is {shown(root)} right?"
            raise LabelFileWrong(path, tried[0].line, f"{shown(tried[0].path)} does not exist", hint)
    facts = {"layout": "list", "has_splits": listed[0].split is not None, "notes": notes}
    return sorted_index(root, *numbered([row.label for row in rows]), [row.path for row in rows], facts)


class ListedSample(NamedTuple):
    path: str
    """Relative to the root."""
    label: str
    split: str | None
    """None for all if the list has no column of splits."""
    line: int


def read_list(path: str, root: str) -> list[ListedSample]:
    """The rows of a CSV, TSV or JSON Lines file; raises LabelFileWrong, with the line, for anything doubtful."""
    rows: list[ListedSample] = []
    first_line: dict[str, int] = {}
    columns: tuple[str, str, str | None] | None = None
    for line, record in _records(path):
        if columns is None:
            columns = _columns(path, line, list(record))
        image, label, split = (record.get(name) if name else None for name in columns)
        if image is None or label is None or not image.strip() or not label.strip():
            lacking = columns[0] if image is None or not image.strip() else columns[1]
            raise LabelFileWrong(path, line, f"no {lacking}", "every row needs an image and its label")
        if columns[2] and not (split or "").strip():
            raise LabelFileWrong(path, line, f"no {columns[2]}", "every row needs a split, or none of them")
        name = _below(path, line, root, image.strip())
        if name in first_line:
            seen = f"{shown(name)} is already in line {first_line[name]:,}"
            raise LabelFileWrong(path, line, seen, "list it once")
        first_line[name] = line
        rows.append(ListedSample(name, label.strip(), split.strip().lower() if split else None, line))
    if not rows:
        raise LabelFileWrong(path, None, "it has no rows", "the first line names the columns: path,label")
    return rows


def has_labels(path: str) -> bool:
    """Whether a list labels images, by its columns: the metadata of captions or boxes does not."""
    first = next(_records(path), None)
    words = {name.lower() for name in first[1]} if first else set()
    return not words.isdisjoint(PATH_COLUMNS) and not words.isdisjoint(LABEL_COLUMNS)


def rows_of_split(path: str, rows: list[ListedSample], split: str) -> tuple[list[ListedSample], list[str]]:
    """The rows of a split, and notes; all of them if the list has no column of splits."""
    if not rows[0].split or not split:
        return rows, []
    present = {row.split for row in rows}
    name = next((name for name in SPLITS[split] if name in present), None)
    if name is None:
        return [], []
    notes = []
    known = {name for names in SPLITS.values() for name in names}
    if strange := sorted(str(one) for one in present if one not in known):
        line = next(row.line for row in rows if row.split == strange[0])
        wanted = "train, val, valid, validation, dev or test"
        raise LabelFileWrong(path, line, f"the split {shown(strange[0])} is unknown", f"use {wanted}")
    if split == "val" and name != "val":
        notes.append(f"{shown(path)} has no rows of split val: using {name} for validation")
    return [row for row in rows if row.split == name], notes


def numbered(
    labels: Sequence[str], classes: tuple[str, ...] | None = None
) -> tuple[tuple[str, ...], NDArray[np.int32]]:
    """The classes of these labels, and the number of each label's class. Unless given, classes are sorted as class
    folders are, or by number if all are numbers."""
    if classes is None:
        found = set(labels)
        if all(label.isascii() and label.isdigit() for label in found):
            classes = tuple(sorted(found, key=lambda label: (int(label), label)))
        else:
            classes = tuple(sorted(found, key=encode_name))
    number_of = {name: number for number, name in enumerate(classes)}
    return classes, np.array([number_of[label] for label in labels], np.int32)


def _records(path: str) -> Iterator[tuple[int, dict[str, str | None]]]:
    """The line and the values of each row."""
    text = read_text(path)
    return _json_records(path, text) if path.endswith(".jsonl") else _csv_records(path, text)


def _csv_records(path: str, text: str) -> Iterator[tuple[int, dict[str, str | None]]]:
    first = text.partition("\n")[0]
    delimiter = max(",\t;", key=first.count)
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    try:
        header = [cell.strip() for cell in next(reader, [])]
        if len(set(header)) != len(header):
            raise LabelFileWrong(path, 1, f"a column appears twice: {some(header)}", "give each column its own name")
        for cells in reader:
            if not cells:
                continue
            if len(cells) != len(header):
                seen = f"{count(len(cells), 'value')} for {count(len(header), 'column')}"
                raise LabelFileWrong(path, reader.line_num, seen, 'put a name with a comma in quotes: "a,b.jpg",cat')
            yield reader.line_num, dict(zip(header, cells, strict=True))
    except csv.Error as error:
        raise LabelFileWrong(path, reader.line_num, f"not a CSV: {error}", "check its quotes") from None


def _json_records(path: str, text: str) -> Iterator[tuple[int, dict[str, str | None]]]:
    for line, content in enumerate(text.splitlines(), 1):
        if not content.strip():
            continue
        try:
            record = json.loads(content)
        except ValueError:
            record = None
        if not isinstance(record, dict):
            raise LabelFileWrong(path, line, "not a JSON object", '{"file_name": "1.jpg", "label": "cat"}')
        yield line, {name: None if value is None else str(value) for name, value in record.items()}


def _columns(path: str, line: int, header: list[str]) -> tuple[str, str, str | None]:
    """The columns of images, labels and, if there is one, splits."""
    by_name = {name.lower(): name for name in reversed(header)}
    known = {
        "images": (*PATH_COLUMNS, *UNUSUAL_PATHS), "labels": (*LABEL_COLUMNS, *UNUSUAL_LABELS), "splits": SPLIT_COLUMNS
    }  # fmt: skip
    found = {what: next((by_name[word] for word in words if word in by_name), None) for what, words in known.items()}
    rest = [name for name in header if name not in found.values()]
    lacking = [what for what in ("images", "labels") if found[what] is None]
    if len(lacking) == len(rest) == 1:
        found[lacking[0]] = rest[0]  # it can be nothing else
    elif lacking:
        seen = f"no column of {lacking[0]} among {some(header)}"
        raise LabelFileWrong(path, min(line, 1), seen, f"name the column {' or '.join(known[lacking[0]][:3])}")
    return str(found["images"]), str(found["labels"]), found["splits"]


def _below(path: str, line: int, root: str, image: str) -> str:
    """The image's path below the root, however it is written; refuses one that is elsewhere."""
    prefix = root.rstrip("/") + "/"
    name = posixpath.normpath(image.removeprefix(prefix))
    if name.startswith(("/", "../")) or name == ".." or "://" in image.removeprefix(prefix):
        raise LabelFileWrong(path, line, f"{shown(image)} is outside {shown(root)}", "paths are relative to data_root")
    return name
