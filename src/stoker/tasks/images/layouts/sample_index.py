"""Every sample of a split, as arrays that are mapped from disk and shared by all workers: no Python object per file."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from stoker.core.errors import UserError
from stoker.core.files import atomic_file, has_whole_seal, sealed, write_text
from stoker.io.stores import Location

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


@dataclass(frozen=True)
class SampleIndex:
    """The samples of one split; a sample's index is its number here, from 0."""

    root: str
    """The folder or URL that paths are relative to."""
    classes: tuple[str, ...]
    labels: NDArray[np.int32]
    name_bytes: NDArray[np.uint8]
    """All names in UTF-8, one after the other."""
    name_ends: NDArray[np.int64]
    """Where each name ends in `name_bytes`."""
    sizes: NDArray[np.int64] | None = None
    """Bytes of each sample, if the listing included them."""
    shards: tuple[str, ...] = ()
    """Names of the tar files; empty if each sample is its own file."""
    shard_of: NDArray[np.int32] | None = None
    offsets: NDArray[np.int64] | None = None
    """Where each sample begins in its shard."""
    facts: dict[str, Any] = field(default_factory=dict)
    """Further facts from when the index was made, to notice that it is stale."""
    folder: Path | None = None
    """Where it is saved, if it is."""
    digest: str = ""
    """Hash of the samples, the classes and their order; empty before the index is saved or loaded."""

    def __len__(self) -> int:
        return len(self.labels)

    def name(self, index: int) -> str:
        """A sample's name: its path below the root, or the path it had before it was packed."""
        start = int(self.name_ends[index - 1]) if index else 0
        return decode_name(bytes(self.name_bytes[start : int(self.name_ends[index])]))

    def location(self, index: int) -> Location:
        return next(self.locations([index]))

    @property
    def are_files(self) -> bool:
        """Whether each sample is a separate file."""
        return self.shard_of is None

    def bytes_of(self, index: int) -> int | None:
        """Bytes of a sample, if the listing included them."""
        return None if self.sizes is None else int(self.sizes[index])

    def locations(self, indices: Sequence[int]) -> Iterator[Location]:
        """Where the bytes of these samples are; looked up at once, because single array elements are slow."""
        wanted = np.array(indices, np.int64)
        sizes = [None] * len(wanted) if self.sizes is None else self.sizes[wanted].tolist()
        if self.shard_of is not None and self.offsets is not None:
            shards, offsets = self.shard_of[wanted].tolist(), self.offsets[wanted].tolist()
            for shard, offset, size in zip(shards, offsets, sizes, strict=True):
                yield Location(self.shards[shard], offset, size)
            return
        names, ends = np.asarray(self.name_bytes).data, self.name_ends[wanted].tolist()
        starts = np.where(wanted > 0, self.name_ends[wanted - 1], 0).tolist()
        for start, end, size in zip(starts, ends, sizes, strict=True):
            yield Location(decode_name(bytes(names[start:end])), 0, size)

    def __reduce__(self) -> Any:
        # A worker process maps the same file instead of receiving a copy of it.
        if self.folder is not None:
            return _load_same, (self.folder, self.root, self.digest)
        return SampleIndex, tuple(getattr(self, part.name) for part in fields(self))


def save_index(index: SampleIndex, folder: Path) -> SampleIndex:
    """Writes the index into a folder and returns it mapped from there. The meta file is written last: a folder without
    one is unfinished."""
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
        "xxh3": {name: checksum(array) for name, array in present.items()},
        "facts": index.facts,
    }
    write_text(folder / META, json.dumps(sealed(meta), indent=1, ensure_ascii=True) + "\n")
    return load_index(folder)


def load_index(folder: Path) -> SampleIndex:
    """The index in a folder, mapped rather than read; raises IndexUnreadable if it is not what was saved."""
    try:
        meta = json.loads((folder / META).read_text())
        if meta["format"] != FORMAT:
            raise IndexUnreadable(folder, f"it has format {meta['format']}; this version reads format {FORMAT}")
        if has_whole_seal(meta) is False:
            raise ValueError(f"{META} changed after it was written")
        arrays = {
            name: np.load(folder / f"{name}.npy", mmap_mode="r", allow_pickle=False)
            for name in meta["arrays"]
            if name in _ARRAYS
        }
        if wrong := [name for name, array in arrays.items() if array.dtype != _ARRAYS[name] or array.ndim != 1]:
            raise ValueError(f"{', '.join(wrong)}: unexpected array type")
        index = SampleIndex(
            root=meta["root"],
            classes=tuple(meta["classes"]),
            shards=tuple(meta["shards"]),
            facts=meta["facts"],
            folder=folder,
            digest=meta["digest"],
            **arrays,
        )
        if reason := _inconsistency(index, meta["samples"]) or _difference(index, meta.get("xxh3")):
            raise IndexUnreadable(folder, reason, damaged=True)
    except FileNotFoundError as error:
        raise IndexUnreadable(folder, str(error), damaged=Path(error.filename or META).name != META) from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise IndexUnreadable(folder, str(error), damaged=True) from None
    return index


def sorted_index(
    root: str,
    classes: tuple[str, ...],
    labels: NDArray[np.int32],
    names: Sequence[str],
    facts: dict[str, Any],
    shards: Sequence[str] = (),
    **columns: Sequence[int],
) -> SampleIndex:
    """An index of samples in any order, sorted by class and name as class folders are; `columns` are other arrays."""
    numbers, encoded = labels.tolist(), [encode_name(name) for name in names]
    order = sorted(range(len(encoded)), key=lambda at: (numbers[at], encoded[at]))
    packed = pack_names([encoded[at] for at in order])
    arrays: dict[str, Any] = {name: np.array(values, _ARRAYS[name])[order] for name, values in columns.items()}
    return SampleIndex(root, classes, labels[order], *packed, shards=tuple(shards), facts=facts, **arrays)


def part_of(index: SampleIndex, indices: NDArray[np.int64]) -> SampleIndex:
    """An index of only some samples, in the same order; its samples are renumbered."""
    lengths = np.diff(index.name_ends, prepend=0)
    kept = np.zeros(len(index), bool)
    kept[indices] = True
    chosen = np.flatnonzero(kept)
    part = replace(
        index,
        labels=np.asarray(index.labels)[chosen],
        name_bytes=np.asarray(index.name_bytes)[np.repeat(kept, lengths)],
        name_ends=np.cumsum(lengths[chosen]),
        sizes=None if index.sizes is None else np.asarray(index.sizes)[chosen],
        shard_of=None if index.shard_of is None else np.asarray(index.shard_of)[chosen],
        offsets=None if index.offsets is None else np.asarray(index.offsets)[chosen],
        folder=None,
    )
    return replace(part, digest=digest_of(part))


def digest_of(index: SampleIndex) -> str:
    """Hash of the samples, the classes and their order; the same wherever the data is stored."""
    digest = hashlib.blake2b(digest_size=16)
    for names in (index.classes, index.shards):
        digest.update(b"\0".join(map(encode_name, names)) + b"\0\0")
    for name, array in present_arrays(index).items():
        digest.update(f"{name} {len(array)} ".encode())
        digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()


def present_arrays(index: SampleIndex) -> dict[str, NDArray[Any]]:
    """The arrays of this index, in the types in which they are saved."""
    return {
        name: np.asarray(getattr(index, name), kind)
        for name, kind in _ARRAYS.items()
        if getattr(index, name) is not None
    }


def encode_name(name: str) -> bytes:
    """A file's name as the file system has it, whatever the locale."""
    return name.encode("utf-8", "surrogateescape")


def decode_name(name: bytes) -> str:
    """The same as text; bytes that are not UTF-8 survive `encode_name`."""
    return name.decode("utf-8", "surrogateescape")


def pack_names(names: list[bytes]) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Names as the two arrays of an index."""
    ends = np.cumsum([len(name) for name in names], dtype=np.int64)
    return np.frombuffer(b"".join(names), np.uint8), ends


def _load_same(folder: Path, root: str, digest: str) -> SampleIndex:
    index = load_index(folder)
    if index.digest != digest:
        # A worker whose indices differ from its parent's would train on wrong labels.
        raise IndexUnreadable(folder, "it was replaced while a run was using it")
    return replace(index, root=root)


def _difference(index: SampleIndex, known: Any) -> str | None:
    """How it differs from what was saved: a flipped label or a swapped offset would silently train on wrong labels."""
    if known is None:  # saved by an earlier version, which hashed everything at once, ten times as slowly
        return None if digest_of(index) == index.digest else "its arrays or classes changed after it was written"
    changed = [name for name, array in present_arrays(index).items() if checksum(array) != known.get(name)]
    return f"{', '.join(f'{name}.npy' for name in changed)} changed after it was written" if changed else None


def checksum(array: NDArray[Any]) -> str:
    """Checksum of an array of an index, to notice that its file changed."""
    # xxh3 reads a mapped file at the speed of memory (results/index).
    return xxhash.xxh3_64_hexdigest(np.ascontiguousarray(array).data)


def _inconsistency(index: SampleIndex, samples: int) -> str | None:
    arrays = present_arrays(index)
    lengths = {len(array) for name, array in arrays.items() if name != "name_bytes"}
    if lengths != {samples}:
        return f"its arrays have {sorted(lengths)} entries instead of {samples}"
    if samples and int(index.name_ends[-1]) != len(index.name_bytes):
        return "name_bytes is truncated"
    for name, limit in (("labels", len(index.classes)), ("shard_of", len(index.shards))):
        if samples and name in arrays and not (arrays[name].min() >= 0 and arrays[name].max() < limit):
            return f"{name} has values outside 0 .. {limit - 1}"
    if outside := next((shard for shard in index.shards if shard.startswith("/") or ".." in shard.split("/")), None):
        return f"the shard {outside!r} is outside its folder"
    return None


class IndexUnreadable(UserError):
    """An index that is missing, damaged or of another version."""

    def __init__(self, folder: Path, reason: str, *, damaged: bool = False) -> None:
        super().__init__(
            "index-unreadable",
            f"the index in {folder} cannot be used: {reason}",
            why="it lists the samples, their classes and where their bytes are",
            hint="run stoker pack again for shards; the index of class folders is rebuilt by the next start",
        )
        self.reason = reason
        self.damaged = damaged
        """Whether it is there, and of this version, but not as it was saved."""


@dataclass(frozen=True)
class SampleSet:
    """All samples of an index, or a subset of them with its own labels.

    Its samples are numbered 0 .. n-1 as members, which are what a sampler permutes."""

    index: SampleIndex
    classes: tuple[str, ...]
    chosen: NDArray[np.int64] | None = None
    """Each member's index; None for all samples, where a member is an index."""
    chosen_labels: NDArray[np.int32] | None = None

    def __len__(self) -> int:
        return len(self.index) if self.chosen is None else len(self.chosen)

    def indices(self, members: NDArray[np.int64]) -> NDArray[np.int64]:
        """The members' indices in the data set."""
        return members if self.chosen is None else self.chosen[members]

    def labels(self, members: NDArray[np.int64]) -> NDArray[np.int64]:
        labels = self.index.labels if self.chosen_labels is None else self.chosen_labels
        return labels[members].astype(np.int64)


def all_samples(index: SampleIndex) -> SampleSet:
    return SampleSet(index, index.classes)


def repeated(samples: SampleSet, at_least: int) -> SampleSet:
    """The samples repeated into one long epoch: with a small folder we would otherwise measure epoch starts."""
    times = -(-at_least // len(samples))
    if times <= 1:
        return samples
    members = np.tile(np.arange(len(samples), dtype=np.int64), times)
    labels = samples.labels(members).astype(np.int32)
    return SampleSet(samples.index, samples.classes, samples.indices(members), labels)
