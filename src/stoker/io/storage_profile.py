"""How fast any storage is, folder or object store: latency, small reads by how many at once, and large reads.

Reads files that exist and writes nothing. A cold read is one whose file was dropped from this host's page cache before;
what a server has cached cannot be dropped from here.
"""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np

from stoker.core.console import Advance
from stoker.core.errors import UserError
from stoker.io.storage_speed import IN_MEMORY, LEAST_READS, Read, Round, dropped, read_round, read_warm
from stoker.io.stores import Location, ReadFailure, is_url, open_store
from stoker.profile.mounts import mount_of

SMALL_READ = 114_660
"""Bytes: an image of MLPerf Storage's ResNet-50, which is ImageNet's mean."""
LARGE_READ = 8 << 20
LEAST_LARGE = 1 << 20
"""Bytes of a file from which it is read in parts: a shard, or a volume."""
AT_ONCE = (1, 4, 16, 64)
AT_ONCE_REMOTE = (1, 4, 16, 64, 256)
LARGE_AT_ONCE = 16
MOST_LISTED = 20_000
LISTING_S = 5.0
MOST_TARGETS = 20_000


@dataclass(frozen=True)
class StorageProfile:
    """What was measured; None where it could not be."""

    source: str
    kind: str | None
    remote: bool | None
    files: int
    """Files that were found in the time for listing; there may be more."""
    mean_bytes: float
    small_bytes: float
    """Mean size of a small read."""
    cold: tuple[Round, ...] = ()
    """Small reads, each of bytes that are not in this host's memory."""
    warm: Round | None = None
    """The same by one reader, from the page cache."""
    large: Round | None = None
    """Cold."""
    missing: tuple[str, ...] = ()
    """What was not measured, and why."""

    @property
    def best(self) -> Round | None:
        """The fastest round of small, cold reads."""
        return max(self.cold, key=lambda one: one.bytes_per_second, default=None)


def profile_storage(source: str, seconds: float, advance: Advance = lambda _done, _total: None) -> StorageProfile:
    """Measures for about `seconds`, after listing some files; raises UserError if there is nothing to read."""
    files = _objects(source) if is_url(source) and urlsplit(source).scheme != "file" else _files(source)
    readable = [one for one in files.sizes if one[1] > 0]
    if not readable:
        raise UserError(
            "nothing-to-read", f"{source} holds no file with content", why="storage is measured by reading files",
            hint="give a folder, file or URL that holds data",
        )  # fmt: skip
    np.random.default_rng(0).shuffle(readable)
    counts = AT_ONCE_REMOTE if files.remote else AT_ONCE
    steps = len(counts) + 2
    each_s = seconds / steps
    small, large = small_targets(readable), _large_targets(readable)
    # The first are given out again only when all were, and have left the page cache again.
    in_turn = cycle(small)

    def cold_round(places: Iterable[Location], at_once: int, least: int) -> Round | None:
        if not files.remote_store:
            places = dropped(places, each_s, enough=LEAST_READS * at_once)
        return read_round(files.read, list(places), at_once, each_s, least)

    missing: list[str] = []
    cold: list[Round] = []
    if files.kind in IN_MEMORY:
        missing.append(f"cold reads: {source} is in memory ({files.kind})")
    else:
        for done, at_once in enumerate(counts):
            advance(done, steps)
            if done and not cold:
                break  # if one reader finds nothing cold, more do not
            one = cold_round(islice(in_turn, len(small)), at_once, max(LEAST_READS, at_once))
            if one is not None:
                cold.append(one)
        if not cold:
            missing.append(
                "cold reads: these files cannot be dropped from the page cache (in memory, or being written), "
                "or there are too few of them"
            )
        elif len(cold) < len(counts):
            missing.append(f"more than {cold[-1].at_once} cold reads at once: too few files, or too little time")
    advance(len(counts), steps)
    warm = None if files.remote_store else read_warm(files.read, small, each_s)
    advance(len(counts) + 1, steps)
    bulk = cold_round(large, LARGE_AT_ONCE, 1) if files.kind not in IN_MEMORY else None
    if not large:
        missing.append("large reads: no file has a megabyte")
    elif bulk is None and cold:
        missing.append("large reads: too few files, or too little time")
    advance(steps, steps)
    return StorageProfile(
        source, files.kind, files.remote, len(files.sizes), sum(size for _, size in readable) / len(readable),
        sum(place.size or 0 for place in small) / len(small), tuple(cold), warm, bulk, tuple(missing),
    )  # fmt: skip


def small_targets(files: Sequence[tuple[str, int]]) -> list[Location]:
    """Whole files below a megabyte, as a loader of images reads them, and SMALL_READ bytes from many places of larger
    ones, taking one place from each file in turn: a few shards are sampled all over, and of many files none is read
    twice."""
    rng, found = np.random.default_rng(0), list[Location]()
    places = {path: min(size // (4 * SMALL_READ), MOST_TARGETS) if size >= LEAST_LARGE else 1 for path, size in files}
    for turn in range(max(places.values())):
        some = [(path, size) for path, size in files if places[path] > turn]
        rng.shuffle(some)
        for path, size in some:
            width = size if size < LEAST_LARGE else SMALL_READ
            begin = size * turn // places[path]
            offset = begin + int(rng.integers(max(1, size // places[path] - width)))
            found.append(Location(path, min(offset, size - width) if turn or size > width else 0, width))
        if len(found) >= MOST_TARGETS:
            break
    return found


def _large_targets(files: Sequence[tuple[str, int]]) -> list[Location]:
    return [
        Location(path, offset, min(LARGE_READ, size - offset))
        for path, size in files
        if size >= LEAST_LARGE
        for offset in range(0, min(size, 64 * LARGE_READ), LARGE_READ)
        if size - offset >= LEAST_LARGE
    ]


@dataclass(frozen=True)
class _Files:
    """What can be read, and how."""

    kind: str | None
    remote: bool | None
    remote_store: bool
    """An object store: this host caches nothing of it."""
    sizes: list[tuple[str, int]]
    read: Read


# What there is to read.


def _files(source: str) -> _Files:
    path = Path(urlsplit(source).path) if is_url(source) else Path(source)
    try:
        about = path.stat()
    except OSError as error:
        raise UserError(
            "no-such-path", f"{source} cannot be opened: {error.strerror}", hint=f"ls {path.parent}"
        ) from None
    sizes = [(str(path.absolute()), about.st_size)] if stat.S_ISREG(about.st_mode) else list(_walk(path.absolute()))
    mount = mount_of(path)
    kind, remote = (None, None) if mount is None else (mount.kind, mount.remote)
    return _Files(kind, remote, False, sizes, _read_file)


def _walk(top: Path) -> Iterator[tuple[str, int]]:
    """Some files from all over the tree: the folders in random order, for a limited time."""
    rng, end, found = np.random.default_rng(0), time.monotonic() + LISTING_S, 0
    folders = [str(top)]
    while folders:
        at = int(rng.integers(len(folders)))
        folders[at], folders[-1] = folders[-1], folders[at]
        try:
            with os.scandir(folders.pop()) as entries:
                for entry in entries:
                    if entry.is_dir(follow_symlinks=False):
                        folders.append(entry.path)
                    elif entry.is_file():
                        yield entry.path, entry.stat().st_size
                        found += 1
                    if found >= MOST_LISTED or (found and time.monotonic() > end):
                        return
        except OSError:
            continue  # a folder without read permission; others may have it


def _read_file(target: Location) -> int:
    descriptor = os.open(target.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        if target.offset:
            # Otherwise the kernel would read ahead, which does not help a random read.
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)
        got, size = 0, target.size or 0
        while got < size and (part := os.pread(descriptor, size - got, target.offset + got)):
            got += len(part)
        return got
    finally:
        os.close(descriptor)


def _objects(source: str) -> _Files:
    from stoker.io.object_store import ObjectStore  # slow to import, and folders do not need it

    store = open_store(source)
    assert isinstance(store, ObjectStore)
    sizes, end = list[tuple[str, int]](), time.monotonic() + LISTING_S
    for path, size in store.list():
        sizes.append((path, size))
        if len(sizes) >= MOST_LISTED or time.monotonic() > end:
            break
    if not sizes:
        # A single object.
        parent, _, name = source.rstrip("/").rpartition("/")
        if not urlsplit(parent).netloc:
            raise _nothing_below(source)
        store = open_store(parent)
        try:
            sizes = [(name, store.about(name).size)]
        except ReadFailure:
            raise _nothing_below(source) from None
    reader = store
    scheme = urlsplit(source).scheme
    return _Files(scheme, True, True, sizes, lambda place: len(reader.read(*place)))


def _nothing_below(source: str) -> UserError:
    return UserError(
        "nothing-to-read", f"there is no object at or below {source}", why="storage is measured by reading objects",
        hint="check the bucket and the folder in the URL",
    )  # fmt: skip
