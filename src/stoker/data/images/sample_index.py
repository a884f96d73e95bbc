"""Every sample of a split as arrays: no Python object for each file, mapped from disk, shared by all workers."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from stoker.errors import UserError
from stoker.files import atomic_file, write_text

# Every sample of a split as arrays: no Python object for each file, mapped from disk, shared by all workers.

FORMAT = 1
META = "index.json"
_ARRAYS = {
    "labels": np.int32,
    "name_bytes": np.uint8,
    "name_ends": np.int64,
    "sizes": np.int64,
    "shard_of": np.int32,
    "offsets": np.int64,
}


class Location(NamedTuple):
    """Where a sample's bytes are: a path below the split's root, and the part of it that counts."""

    path: str
    offset: int
    size: int | None
    """None where only the file system knows: the whole file."""


@dataclass(frozen=True)
class SampleIndex:
    """The samples of one split, numbered from 0."""

    root: str
    """Folder or URL below which the paths are."""
    classes: tuple[str, ...]
    labels: NDArray[np.int32]
    name_bytes: NDArray[np.uint8]
    """All names in UTF-8, one after the other."""
    name_ends: NDArray[np.int64]
    """Where each name ends in `name_bytes`."""
    sizes: NDArray[np.int64] | None = None
    """Bytes of each sample, where the listing told."""
    shards: tuple[str, ...] = ()
    """Names of the tar files; empty where each sample is a file of its own."""
    shard_of: NDArray[np.int32] | None = None
    offsets: NDArray[np.int64] | None = None
    """Where each sample begins in its shard."""
    facts: dict[str, Any] = field(default_factory=dict)
    """What else was written down when the index was made: for noticing that it is stale."""
    folder: Path | None = None
    """Where it is kept, if it is."""
    digest: str = ""
    """Hash of what the numbers mean: samples, classes, their order; empty before it was saved or loaded."""

    def __len__(self) -> int:
        return len(self.labels)

    def name(self, sample: int) -> str:
        """The sample's name: its path below the root, or the path it had before it was packed."""
        start = int(self.name_ends[sample - 1]) if sample else 0
        return decode_name(bytes(self.name_bytes[start : int(self.name_ends[sample])]))

    def location(self, sample: int) -> Location:
        """Where the sample's bytes are."""
        size = None if self.sizes is None else int(self.sizes[sample])
        if self.shard_of is None or self.offsets is None:
            return Location(self.name(sample), 0, size)
        return Location(self.shards[int(self.shard_of[sample])], int(self.offsets[sample]), size)

    def __reduce__(self) -> Any:
        # A worker process maps the same file instead of receiving a copy of it.
        if self.folder is not None:
            return _load_same, (self.folder, self.root, self.digest)
        return SampleIndex, tuple(getattr(self, part.name) for part in fields(self))


def save_index(index: SampleIndex, folder: Path) -> SampleIndex:
    """Writes the index into a folder and returns it as mapped from there; the meta file comes last, so a
    folder without one is an unfinished write."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / META).unlink(missing_ok=True)
    present = present_arrays(index)
    for name, array in present.items():
        with atomic_file(folder / f"{name}.npy", "wb") as stream:
            np.save(stream, array, allow_pickle=False)
    meta = {
        "format": FORMAT,
        "root": index.root,
        "samples": len(index),
        "digest": digest_of(index),
        "classes": list(index.classes),
        "shards": list(index.shards),
        "arrays": sorted(present),
        "facts": index.facts,
    }
    write_text(folder / META, json.dumps(meta, indent=1, ensure_ascii=True) + "\n")
    return load_index(folder)


def load_index(folder: Path) -> SampleIndex:
    """The index that is kept in a folder, mapped and not read; raises IndexUnreadable where it is not whole."""
    try:
        meta = json.loads((folder / META).read_text())
        if meta["format"] != FORMAT:
            raise IndexUnreadable(folder, f"it has format {meta['format']}, this program reads {FORMAT}")
        arrays = {
            name: np.load(folder / f"{name}.npy", mmap_mode="r", allow_pickle=False)
            for name in meta["arrays"]
            if name in _ARRAYS
        }
        if wrong := [name for name, array in arrays.items() if array.dtype != _ARRAYS[name] or array.ndim != 1]:
            raise ValueError(f"{', '.join(wrong)}: not the expected type")
        index = SampleIndex(
            root=meta["root"],
            classes=tuple(meta["classes"]),
            shards=tuple(meta["shards"]),
            facts=meta["facts"],
            folder=folder,
            digest=meta["digest"],
            **arrays,
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise IndexUnreadable(folder, str(error)) from None
    if reason := _what_is_wrong(index, meta["samples"]):
        raise IndexUnreadable(folder, reason)
    return index


def digest_of(index: SampleIndex) -> str:
    """Hash of samples, classes and their order; the same wherever the data lies."""
    digest = hashlib.blake2b(digest_size=16)
    for names in (index.classes, index.shards):
        digest.update(b"\0".join(map(encode_name, names)) + b"\0\0")
    for name, array in present_arrays(index).items():
        digest.update(f"{name} {len(array)} ".encode())
        digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()


def present_arrays(index: SampleIndex) -> dict[str, NDArray[Any]]:
    """The arrays that this index has, in the types in which they are kept."""
    return {
        name: np.asarray(getattr(index, name), kind)
        for name, kind in _ARRAYS.items()
        if getattr(index, name) is not None
    }


def encode_name(name: str) -> bytes:
    """A file's name as the file system has it, whatever the locale."""
    return name.encode("utf-8", "surrogateescape")


def decode_name(name: bytes) -> str:
    """The same as text; bytes that are no UTF-8 come back unchanged from `encode_name`."""
    return name.decode("utf-8", "surrogateescape")


def pack_names(names: list[bytes]) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Names as the two arrays that an index holds."""
    ends = np.cumsum([len(name) for name in names], dtype=np.int64)
    return np.frombuffer(b"".join(names), np.uint8), ends


def _load_same(folder: Path, root: str, digest: str) -> SampleIndex:
    index = load_index(folder)
    if index.digest != digest:
        # A worker with other numbers than its parent would train on wrong labels.
        raise IndexUnreadable(folder, "it was replaced while a run was using it")
    return replace(index, root=root)


def _what_is_wrong(index: SampleIndex, samples: int) -> str | None:
    arrays = present_arrays(index)
    lengths = {len(array) for name, array in arrays.items() if name != "name_bytes"}
    if lengths != {samples}:
        return f"its arrays have {sorted(lengths)} entries in place of {samples}"
    if samples and int(index.name_ends[-1]) != len(index.name_bytes):
        return "its names are cut off"
    for name, limit in (("labels", len(index.classes)), ("shard_of", len(index.shards))):
        if samples and name in arrays and not (arrays[name].min() >= 0 and arrays[name].max() < limit):
            return f"{name} has numbers outside 0 .. {limit - 1}"
    if outside := next((shard for shard in index.shards if shard.startswith("/") or ".." in shard.split("/")), None):
        return f"the shard {outside!r} lies outside its folder"
    return None


class IndexUnreadable(UserError):
    """An index that is missing, torn or of another version."""

    def __init__(self, folder: Path, reason: str) -> None:
        super().__init__(
            "index-unreadable",
            f"the index in {folder} cannot be used: {reason}",
            why="it tells which samples there are and where their bytes begin",
            hint="make it again: stoker pack for shards; an index of class folders is made anew by the next start",
        )


# The samples that take part: all of an index, or a subset with labels of its own.


@dataclass(frozen=True)
class SampleSet:
    """Numbers 0 .. n-1 for the order to permute, and what they stand for."""

    index: SampleIndex
    classes: tuple[str, ...]
    chosen: NDArray[np.int64] | None = None
    """Numbers in the index; None where all take part."""
    chosen_labels: NDArray[np.int32] | None = None

    def __len__(self) -> int:
        return len(self.index) if self.chosen is None else len(self.chosen)

    def numbers(self, members: NDArray[np.int64]) -> NDArray[np.int64]:
        """The members' numbers in the index."""
        return members if self.chosen is None else self.chosen[members]

    def labels(self, members: NDArray[np.int64]) -> NDArray[np.int64]:
        """The members' classes."""
        labels = self.index.labels if self.chosen_labels is None else self.chosen_labels
        return labels[members].astype(np.int64)


def all_samples(index: SampleIndex) -> SampleSet:
    """Every sample of an index."""
    return SampleSet(index, index.classes)
