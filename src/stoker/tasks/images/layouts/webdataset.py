"""WebDataset tars made by others: `key.jpg` beside `key.cls` or `key.json`; indexed once, then read like our shards."""

from __future__ import annotations

import io
import json
import re
import tarfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import IO, Any, NamedTuple

import numpy as np

from stoker.core.console import Advance, shown
from stoker.core.errors import UserError
from stoker.core.redact import redact_text
from stoker.io.stores import Buffer, ReadFailure, SourceStore, open_store
from stoker.tasks.images.layouts.class_folders import IMAGE_SUFFIXES
from stoker.tasks.images.layouts.sample_index import SampleIndex, sorted_index
from stoker.tasks.images.layouts.sample_lists import LabelFileWrong, exists, numbered, read_text

CLASS_FILES = ("classes.txt", "labels.txt", "synsets.txt")
"""Names of the classes, one a line, in the order of their numbers; beside the tars."""
JSON_LABELS = ("label", "cls", "class", "target", "class_name")
# WebDataset's rule: the key ends at the first dot of the file's own name.
_MEMBER = re.compile(r"((?:.*/)?[^/.]+)\.([^/]+)")
_SUFFIXES = tuple(suffix.decode().lstrip(".") for suffix in IMAGE_SUFFIXES)
# A tar at a URL is read from its beginning to its end; a local one only where its headers are.
REMOTE_CHUNK = 8_000_000
LOCAL_CHUNK = 4096
MOST_LABEL_BYTES = 1_000_000
REMOTE_TARS_AT_ONCE = 8


class TarSample(NamedTuple):
    name: str
    label: str
    offset: int
    size: int


def list_tars(place: str, tars: Sequence[str], progress: Advance | None = None) -> SampleIndex:
    """The index of all images of these tars; progress counts tars."""
    store = open_store(place)
    samples: list[TarSample] = []
    shard_of: list[int] = []
    # One after the other if Python's parsing is the bottleneck, several if the network is.
    with ThreadPoolExecutor(REMOTE_TARS_AT_ONCE if store.is_remote else 1) as pool:
        try:
            for number, found in enumerate(pool.map(lambda tar: read_tar(store, place, tar), tars)):
                samples += found
                shard_of += [number] * len(found)
                if progress is not None:
                    progress(number + 1, len(tars))
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    if not samples:
        raise UserError(
            "no-images",
            f"the tar files of {shown(redact_text(place))} have no images",
            why=f"an image is a member KEY.{_SUFFIXES[0]}, with its label in KEY.cls or KEY.json",
            hint=f"tar -tf {shown(tars[0])}",
        )
    return _index(place, tars, samples, shard_of)


def read_tar(store: SourceStore, place: str, tar: str) -> list[TarSample]:
    """The images of one tar, with their labels; raises LabelFileWrong, with the key, for one without a label."""
    path = f"{place}/{tar}"
    samples: list[TarSample] = []
    seen: set[str] = set()
    for key, parts in _groups(store, path, tar):
        images = [(suffix, *where) for suffix, where in parts.items() if suffix.lower() in _SUFFIXES]
        if not images:
            continue
        if len(images) > 1:
            names = " and ".join(suffix for suffix, _, _, _ in images)
            raise LabelFileWrong(path, None, f"{shown(key)} has several images ({names})", "keep one of them per key")
        suffix, offset, size, _ = images[0]
        name = f"{key}.{suffix}"
        if key in seen:
            raise LabelFileWrong(path, None, f"{shown(name)} is in it twice", "write the tar again")
        seen.add(key)
        samples.append(TarSample(f"{tar}/{name}", _label(path, key, parts), offset, size))
    return samples


def _groups(store: SourceStore, path: str, tar: str) -> Iterator[tuple[str, dict[str, tuple[int, int, bytes]]]]:
    """Members that belong together are adjacent: the key, and by suffix the offset, size and (for labels) bytes."""
    now: str | None = None
    parts: dict[str, tuple[int, int, bytes]] = {}
    for name, offset, size, data in _members(store, path, tar):
        match = _MEMBER.fullmatch(name)
        if match is None or "/." in f"/{name}":
            continue
        key, suffix = match[1], match[2]
        if key != now:
            if now is not None:
                yield now, parts
            now, parts = key, {}
        parts[suffix] = offset, size, data
    if now is not None:
        yield now, parts


def _members(store: SourceStore, path: str, tar: str) -> Iterator[tuple[str, int, int, bytes]]:
    try:
        stream = _RangeFile(store, tar)
        # 'r:' is a plain tar: in a compressed one no image could be read on its own.
        with tarfile.open(fileobj=io.BufferedReader(stream, stream.chunk), mode="r:") as archive:
            for member in archive:
                if member.isreg():
                    data = b""
                    if member.name.endswith((".cls", ".json")) and member.size <= MOST_LABEL_BYTES:
                        content = archive.extractfile(member)
                        data = b"" if content is None else content.read()
                    yield member.name, member.offset_data, member.size, data
                archive.members = []  # type: ignore[attr-defined]  # tarfile would keep every one
    except (tarfile.TarError, EOFError, ReadFailure) as error:
        raise UserError(
            "tar-unreadable",
            f"{shown(redact_text(path))}: {error}",
            why="it is damaged, cut off or compressed, so single images cannot be read from it",
            hint="copy it again, or decompress it: gunzip FILE.tar.gz",
        ) from None


def _label(path: str, key: str, parts: dict[str, tuple[int, int, bytes]]) -> str:
    hint = 'a sample is KEY.jpg with its label in KEY.cls (digits) or KEY.json ({"label": 3})'
    if "cls" in parts:
        label = parts["cls"][2].decode("utf-8", "replace").strip()
        if not label or "\n" in label:
            raise LabelFileWrong(path, None, f"{shown(key)}.cls is {label[:40]!r}", hint)
        return label
    if "json" not in parts:
        raise LabelFileWrong(path, None, f"{shown(key)} has no label, only {', '.join(parts)}", hint)
    try:
        content: Any = json.loads(parts["json"][2])
    except ValueError:
        content = None
    known = content if isinstance(content, dict) else {}
    found = next((known[word] for word in JSON_LABELS if word in known), None)
    if isinstance(found, bool) or not isinstance(found, int | str):
        raise LabelFileWrong(path, None, f"{shown(key)}.json has no label: {str(content)[:60]}", hint)
    return str(found)


def _index(place: str, tars: Sequence[str], samples: list[TarSample], shard_of: list[int]) -> SampleIndex:
    labels = [sample.label for sample in samples]
    are_numbers = [label.isascii() and label.isdigit() for label in labels]
    notes: list[str] = []
    if not any(are_numbers):
        classes, values = numbered(labels)
    elif not all(are_numbers):
        odd = samples[are_numbers.index(not are_numbers[0])]
        seen = f"{shown(odd.name)} is labelled {odd.label!r}, others by {'numbers' if are_numbers[0] else 'names'}"
        raise LabelFileWrong(f"{place}/{tars[0]}", None, seen, "use numbers or names for all")
    else:
        classes, values, note = _numbered(place, np.array([int(label) for label in labels], np.int64))
        notes.append(note)
    return sorted_index(
        place,
        classes,
        values.astype(np.int32),
        [sample.name for sample in samples],
        {"layout": "webdataset", "notes": notes},
        shards=tars,
        sizes=[sample.size for sample in samples],
        shard_of=shard_of,
        offsets=[sample.offset for sample in samples],
    )


def _numbered(place: str, numbers: np.ndarray) -> tuple[tuple[str, ...], np.ndarray, str]:
    """Classes of numeric labels: by the file of names beside the tars or above them, else the numbers themselves."""
    above = place.rpartition("/")[0]
    paths = [f"{folder}/{name}" for folder in (place, above) for name in CLASS_FILES]
    path = next((path for path in paths if exists(path)), None)
    if path is None:
        classes = tuple(str(number) for number in np.unique(numbers).tolist())
        note = (
            f"the classes of {shown(redact_text(place))} are numbers; put their names into {CLASS_FILES[0]}, one a line"
        )
        return classes, np.searchsorted(np.unique(numbers), numbers), note
    names = read_class_names(path)
    if (highest := int(numbers.max())) >= len(names):
        seen = f"{len(names):,} names, but the label {highest} needs {highest + 1:,} (labels count from 0)"
        raise LabelFileWrong(path, None, seen, "one name for each label, in their order")
    return names, numbers, f"class names from {shown(redact_text(path))}"


def read_class_names(path: str) -> tuple[str, ...]:
    """One name a line, in the order of the labels; raises LabelFileWrong for an empty line or a name that repeats."""
    names = [line.strip() for line in read_text(path).rstrip().splitlines()]
    known: dict[str, int] = {}
    for line, name in enumerate(names, 1):
        if not name or name in known:
            seen = "it is empty" if not name else f"{shown(name)} is already in line {known[name]}"
            raise LabelFileWrong(path, line, seen, "one name for each label, in their order")
        known[name] = line
    return tuple(names)


class _RangeFile(io.RawIOBase):
    """An object of a store as a file that can be read and sought."""

    def __init__(self, store: SourceStore, path: str) -> None:
        self._store, self._path, self._at = store, path, 0
        self._size = store.about(path).size
        self.chunk = REMOTE_CHUNK if store.is_remote else LOCAL_CHUNK

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        self._at = max(0, base + offset)
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any) -> int:
        size = min(len(buffer), self._size - self._at)
        if size <= 0:
            return 0
        data: Buffer = self._store.read(self._path, self._at, size)
        buffer[:size] = data
        self._at += size
        return size


def open_range(store: SourceStore, path: str) -> IO[bytes]:
    """An object of a store as a file, read in the pieces that are requested."""
    return io.BufferedReader(_RangeFile(store, path), 1 << 16)
