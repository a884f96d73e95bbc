"""Finds a split, and lists its class folders as arrays, so that no Python object outlives the listing of its class.

Names are handled as the file system's bytes: they sort alike on every machine, and names that are not UTF-8 survive. No
file is asked for its type or size: over a network each question is a round trip.
"""

from __future__ import annotations

import os
import shlex
import stat
import time
from array import array
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import unquote, urlsplit

import numpy as np
from numpy.typing import NDArray

from stoker.core.console import Advance, shown, some
from stoker.core.errors import UserError, did_you_mean
from stoker.io.stores import is_url
from stoker.tasks.images.layouts.sample_index import SampleIndex, decode_name, encode_name, pack_names

IMAGE_SUFFIXES = (
    b".jpg", b".jpeg", b".jfif", b".png", b".webp", b".bmp", b".tif", b".tiff", b".gif", b".ppm", b".pgm",
)  # fmt: skip
# Requests in flight to a network file system; on a local one they wait for the GIL, and do no harm.
THREADS = 16
# A folder that changed just before it was listed may change again without getting a new time: the coarsest clocks of
# file systems in use tick every two seconds.
CLOCK_TICK_NS = 2_000_000_000


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
        there = _entries(base)
        raise UserError(
            "split-not-found",
            f"{shown(str(base))} has no folder {shown(split)}",
            why=f"it contains {some(there)}" if there else "it is empty",
            hint=did_you_mean(split, there) or f"data_root must contain {split}/CLASS/IMAGE.jpg",
        )
    existing = base
    while not existing.is_dir() and existing != existing.parent:
        existing = existing.parent
    missing = base.relative_to(existing).parts[0]
    there = _entries(existing)
    raise UserError(
        "data-not-found",
        f"{shown(str(base))} does not exist",
        why=f"{existing} exists and contains {some(there)}" if there else f"{existing} exists and is empty",
        # Names in a folder are not chosen to differ: two changed letters make another word, and /nope is not /home.
        hint=did_you_mean(missing, there, most_edits=1) or "data_root=FOLDER",
    )


def not_readable(path: str, error: OSError) -> UserError:
    """The error for a folder that exists and cannot be listed."""
    return UserError(
        "data-not-readable",
        f"{shown(path)} cannot be listed: {error.strerror or error}",
        why="all samples must be listed before training can start",
        hint=f"ls -ld {shlex.quote(path)}" if path.isprintable() else None,
    )


def _entries(folder: Path) -> list[str]:
    try:
        return sorted(entry.name for entry in folder.iterdir() if not entry.name.startswith("."))
    except OSError:
        return []


@dataclass(frozen=True)
class Seen:
    """The state of a class when it was listed."""

    folders: Mapping[str, int | None] = field(default_factory=dict)
    """When each folder last changed, in ns; None if that was too recent to distinguish it from the next change."""
    left_out: Mapping[str, int] = field(default_factory=dict)
    """How many files were skipped, by suffix."""


@dataclass(frozen=True)
class ClassListing:
    """The samples of one class, sorted by name."""

    name: str
    name_bytes: NDArray[np.uint8]
    name_ends: NDArray[np.int64]
    sizes: NDArray[np.int64] | None
    seen: Seen

    def __len__(self) -> int:
        return len(self.name_ends)


def class_names(place: str) -> list[str]:
    """The class folders of a split, sorted, without hidden ones."""
    try:
        with os.scandir(encode_name(place)) as entries:
            names = sorted(e.name for e in entries if not e.name.startswith(b".") and e.is_dir())
    except OSError as error:
        raise not_readable(place, error) from None
    return [decode_name(name) for name in names]


def list_classes(place: str, names: Sequence[str], progress: Advance | None = None) -> list[ClassListing]:
    """The listings of these class folders; progress counts folders."""
    listings = []
    with ThreadPoolExecutor(min(THREADS, max(1, len(names)))) as pool:
        try:
            for listing in pool.map(lambda name: list_class(place, name), names):
                listings.append(listing)
                if progress is not None:
                    progress(len(listings), len(names))
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    return listings


def list_class(place: str, name: str) -> ClassListing:
    """Every image below one class folder. Anything named like an image counts, even a folder: reading it will fail and
    report it."""
    root = encode_name(place)
    names: list[bytes] = []
    folders: dict[str, int | None] = {}
    left_out: Counter[str] = Counter()
    waiting: list[tuple[bytes, frozenset[tuple[int, int]]]] = [(encode_name(name), frozenset())]
    while waiting:
        folder, ancestors = waiting.pop()
        path = os.path.join(root, folder)  # noqa: PTH118 - pathlib takes no bytes
        try:
            # Before the listing: a change while we list gives a later time.
            state, now_ns = os.stat(path), time.time_ns()  # noqa: PTH116
            identity = (state.st_dev, state.st_ino)
            if identity in ancestors:
                continue  # a link to a folder above
            folders[decode_name(folder)] = state.st_mtime_ns if state.st_mtime_ns < now_ns - CLOCK_TICK_NS else None
            with os.scandir(path) as entries:
                for entry in entries:
                    if entry.name.startswith(b"."):
                        continue
                    inner = folder + b"/" + entry.name
                    if entry.name.lower().endswith(IMAGE_SUFFIXES):
                        names.append(inner)
                    elif entry.is_dir():
                        waiting.append((inner, ancestors | {identity}))
                    else:
                        left_out[_suffix(entry.name)] += 1
        except OSError as error:
            raise not_readable(decode_name(path), error) from None
    names.sort()
    return ClassListing(name, *pack_names(names), None, Seen(folders, left_out))


def list_objects(objects: Iterable[tuple[str, int]], progress: Advance | None = None) -> list[ClassListing]:
    """The same from (path, size) of every object below a split, in any order."""
    found: dict[bytes, tuple[bytearray, array[int], array[int]]] = {}
    left_out: dict[bytes, Counter[str]] = {}
    for count, (path, size) in enumerate(objects, 1):
        if progress is not None and count % 1000 == 0:
            progress(count, None)
        name = encode_name(path)
        class_name, _, rest = name.partition(b"/")
        if not rest or rest.endswith(b"/") or name.startswith(b".") or b"/." in name:
            continue
        if not rest.lower().endswith(IMAGE_SUFFIXES):
            left_out.setdefault(class_name, Counter())[_suffix(rest.rpartition(b"/")[2])] += 1
            continue
        names, ends, sizes = found.setdefault(class_name, (bytearray(), array("q"), array("q")))
        names += name
        ends.append(len(names))
        sizes.append(size)
    return [_sorted_class(name, *found[name], left_out.get(name, {})) for name in sorted(found)]


def class_of_index(index: SampleIndex, name: str, seen: Seen) -> ClassListing:
    """The listing of a class according to an index."""
    label = index.classes.index(name)
    first, end = np.searchsorted(index.labels, [label, label + 1])
    start = int(index.name_ends[first - 1]) if first else 0
    ends = index.name_ends[first:end] - start
    stop = start + (int(ends[-1]) if len(ends) else 0)
    sizes = None if index.sizes is None else np.array(index.sizes[first:end])
    return ClassListing(name, np.array(index.name_bytes[start:stop]), ends, sizes, seen)


def index_of_classes(root: str, listings: Sequence[ClassListing]) -> SampleIndex:
    """One index of all classes, in this order."""
    counts = np.array([len(listing) for listing in listings], np.int64)
    starts = np.cumsum([0, *(len(listing.name_bytes) for listing in listings)])
    sizes = [listing.sizes for listing in listings if listing.sizes is not None]
    return SampleIndex(
        root=root,
        classes=tuple(listing.name for listing in listings),
        labels=np.repeat(np.arange(len(listings), dtype=np.int32), counts),
        name_bytes=np.concatenate([listing.name_bytes for listing in listings]),
        name_ends=np.concatenate([one.name_ends + start for one, start in zip(listings, starts, strict=False)]),
        sizes=np.concatenate(sizes) if len(sizes) == len(listings) else None,
    )


def _sorted_class(
    name: bytes, names: bytearray, ends: array[int], sizes: array[int], left_out: Mapping[str, int]
) -> ClassListing:
    starts = [0, *ends[:-1]]
    parts = sorted((bytes(names[start:end]), size) for start, end, size in zip(starts, ends, sizes, strict=True))
    packed = pack_names([part for part, _ in parts])
    sorted_sizes = np.array([size for _, size in parts], np.int64)
    return ClassListing(decode_name(name), *packed, sorted_sizes, Seen(left_out=left_out))


def _suffix(name: bytes) -> str:
    return decode_name(os.path.splitext(name)[1].lower()) or "no suffix"  # noqa: PTH122 - pathlib takes no bytes
