"""Storage: which file system a path is on, how fast it is, cold and warm, and how fast this host's own disk is.

Measuring reads files that exist, and needs neither root nor a change to the data.
"""

from __future__ import annotations

import itertools
import os
import re
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol
from urllib.parse import urlsplit

import numpy as np
from numpy.typing import NDArray

from stoker.core.console import Say
from stoker.io.prefetch import Located
from stoker.io.stores import Location, ReadFailure, Store, is_url
from stoker.profile.local_disk import MOUNTINFO
from stoker.profile.observed import StorageFacts

# As the kernel and the usual clients name them.
NETWORK_KINDS = frozenset(
    {
        "nfs", "nfs4", "cifs", "smb3", "smbfs", "lustre", "beegfs", "beegfs_nodev", "ceph", "gpfs", "wekafs", "afs",
        "glusterfs", "orangefs", "pvfs2", "panfs", "ocfs2", "gfs2", "9p", "davfs",
    }
)  # fmt: skip
LOCAL_FUSE = frozenset(
    {"fuse.fuse-overlayfs", "fuse.ntfs", "fuse.ntfs-3g", "fuse.exfat", "fuse.bindfs", "fuse.mergerfs"}
)
"""Most FUSE file systems are a bucket or another host (mountpoint-s3, gcsfuse, goofys, sshfs); these are not."""

AMBIGUOUS_KINDS = frozenset({"fuse", "virtiofs", "fuse.portal"})
NETWORK_SOURCES = frozenset({"mountpoint-s3", "s3fs", "gcsfuse", "goofys", "JuiceFS"})
"""Clients whose kind is just `fuse`, by the device column of the mount list."""


@dataclass(frozen=True)
class Mount:
    """The file system under a path."""

    kind: str
    remote: bool | None
    """None where its kind does not say: a FUSE file system may be anything."""


def mount_of(path: str | Path, mountinfo: Path = MOUNTINFO) -> Mount | None:
    """The file system that holds a path; None where the kernel does not say."""
    real = os.path.realpath(path)
    best: tuple[int, list[str]] | None = None
    try:
        lines = mountinfo.read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        left, _, right = line.partition(" - ")
        columns = left.split()
        if len(columns) < 5 or not right:
            continue
        point = re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), columns[4])
        # If several share a mount point, the last is visible.
        if _holds(point, real) and (best is None or len(point) >= best[0]):
            best = (len(point), right.split())
    if best is None:
        return None
    kind, *source = best[1][:2]
    return Mount(kind, is_remote(kind, *source))


def is_remote(kind: str, source: str = "") -> bool | None:
    """Whether a file system of this kind and source is reached over a network; None where the kind does not say."""
    if kind in NETWORK_KINDS or source in NETWORK_SOURCES:
        return True
    if kind in LOCAL_FUSE or kind == "fuseblk":
        return False
    if kind in AMBIGUOUS_KINDS:
        return None
    return kind.startswith("fuse.")


def _holds(point: str, path: str) -> bool:
    return point == "/" or path == point or path.startswith(point.rstrip("/") + "/")


# The same numbers as the loader's readers (stoker.io.prefetch).
LOCAL_READERS = 16
REMOTE_READERS = 64
# A fast disk reads these in a second, and more would not change the result.
MOST_SAMPLES = 2000
LEAST_SAMPLES = 4
WARM_SAMPLES = 64
# The kernel groups neighbouring pages, and drops a group as a whole or not at all.
LARGEST_FOLIO = 2 << 20
IN_MEMORY = frozenset({"tmpfs", "ramfs", "hugetlbfs"})
# Shares of the time for: one reader cold, the same warm, many readers cold.
_SHARES = (0.4, 0.2, 0.4)


@dataclass(frozen=True)
class Reading:
    """The result of one round of reads."""

    bytes: int
    samples: int
    seconds: float
    latency_s: float | None = None
    """Median time until the first byte."""

    @property
    def bytes_per_second(self) -> float | None:
        return self.bytes / self.seconds if self.bytes and self.seconds > 0 else None


class StoredSamples(Protocol):
    """The samples of a data set that are its members 0 .. n-1, and where they are stored."""

    @property
    def index(self) -> Located: ...

    def __len__(self) -> int: ...

    def indices(self, members: NDArray[np.int64]) -> NDArray[np.int64]:
        """The members' numbers in the index."""
        ...


def storage_at(place: str, known: StorageFacts) -> StorageFacts:
    """The known facts, and what can be said about a folder or URL without reading from it."""
    if is_url(place):
        return replace(known, remote=True, kind=urlsplit(place).scheme)
    mount = mount_of(place)
    return known if mount is None else replace(known, remote=mount.remote, kind=mount.kind)


def measure_storage(
    store: Store, samples: StoredSamples, facts: StorageFacts, seconds: float, missing: Say = lambda _text: None
) -> StorageFacts:
    """The known facts, and the speed of reading some of the samples for about `seconds`; reports to `missing` what
    could not be measured."""
    root = None if store.is_remote else store.url
    alone, together = _two_draws(samples)
    whole = samples.index.are_files
    memory = facts.kind in IN_MEMORY  # files there are never cold
    one = None if memory else _read_cold(store, alone, seconds * _SHARES[0], root, whole=whole)
    # Nothing of an object store is cached on this side.
    warm = None if root is None else _read_warm(store, alone, seconds * _SHARES[1], whole=whole)
    readers = REMOTE_READERS if store.is_remote else LOCAL_READERS
    many = None if memory else _read_together(store, together, seconds * _SHARES[2], root, readers, whole=whole)
    if one is None and warm is None:
        missing("storage: none of the samples we tried could be read")
    elif one is None:
        missing("cold storage: these files cannot be dropped from the page cache (they are in memory or being written)")
    known = one or warm
    if facts.bytes_per_sample is None and known is not None:
        mean = known.bytes / known.samples
        facts = replace(facts, bytes_per_sample=mean, dataset_bytes=int(mean * len(samples)))
    return replace(
        facts,
        cold_bytes_per_second=None if one is None else one.bytes_per_second,
        latency_s=None if one is None else one.latency_s,
        warm_bytes_per_second=None if warm is None else warm.bytes_per_second,
        parallel_bytes_per_second=None if many is None else many.bytes_per_second,
    )


def _two_draws(samples: StoredSamples) -> tuple[list[Location], list[Location]]:
    """Two sets of samples, disjoint where there are enough: a server caches files that it has just read."""
    count = min(len(samples), 2 * MOST_SAMPLES)
    members = np.random.default_rng(0).choice(len(samples), count, replace=False).astype(np.int64)
    places = list(samples.index.locations(samples.indices(members).tolist()))
    if count < 2 * LEAST_SAMPLES:
        return places, places
    return places[: count // 2], places[count // 2 :]


def _read_cold(
    store: Store, places: Sequence[Location], seconds: float, root: str | None, *, whole: bool
) -> Reading | None:
    """Reads samples one by one that are not in the page cache; None if all of them are."""
    began, took, read, latencies = time.perf_counter(), 0.0, 0, list[float]()
    for place in places:
        if time.perf_counter() - began > seconds:
            break
        if root is not None and not drop_from_cache(f"{root}/{place.path}", place.offset, place.size):
            continue
        try:
            start = time.perf_counter()
            _first_byte(store, place, root)
            first = time.perf_counter()
            read += len(store.read(*place, whole=whole))
        except ReadFailure:
            continue  # training reports it when it reads that sample
        # From an object store the first byte is a separate request, which real reads do without.
        took += time.perf_counter() - (start if root is not None else first)
        latencies.append(first - start)
    return Reading(read, len(latencies), took, statistics.median(latencies)) if latencies else None


def _read_warm(store: Store, places: Sequence[Location], seconds: float, *, whole: bool) -> Reading | None:
    """Reads a few samples repeatedly; the first pass is not counted."""
    places = places[:WARM_SAMPLES]
    began = counted_from = time.perf_counter()
    read = count = 0
    for number in itertools.count():
        try:
            size = len(store.read(*places[number % len(places)], whole=whole))
        except ReadFailure:
            size = 0
        now = time.perf_counter()
        if number < len(places):
            counted_from = now
        elif size:
            read, count = read + size, count + 1
        if now - began > seconds and number >= 2 * len(places):
            break
    return Reading(read, count, time.perf_counter() - counted_from) if count else None


def _read_together(
    store: Store, places: Sequence[Location], seconds: float, root: str | None, readers: int, *, whole: bool
) -> Reading | None:
    if root is not None:
        places = _dropped(places, seconds, root)
    if len(places) < LEAST_SAMPLES:
        return None
    began = time.perf_counter()

    def read_in_time(place: Location) -> tuple[int, float]:
        """Bytes read, and when the last one arrived."""
        if time.perf_counter() - began > seconds:
            return 0, 0.0
        try:
            return len(store.read(*place, whole=whole)), time.perf_counter()
        except ReadFailure:
            return 0, 0.0

    with ThreadPoolExecutor(min(readers, len(places))) as pool:
        found = [(size, end) for size, end in pool.map(read_in_time, places) if size]
    if not found:
        return None
    return Reading(sum(size for size, _ in found), len(found), max(end for _, end in found) - began)


def _dropped(places: Sequence[Location], seconds: float, root: str) -> list[Location]:
    """The samples that left the page cache, as far as time allows: if none does, each costs some pauses."""
    end = time.perf_counter() + seconds
    out: list[Location] = []
    for place in places:
        if drop_from_cache(f"{root}/{place.path}", place.offset, place.size):
            out.append(place)
        if time.perf_counter() > end:
            break
    return out


def _first_byte(store: Store, place: Location, root: str | None) -> None:
    if root is None:
        store.read(place.path, place.offset, 1)
        return
    with _opened(f"{root}/{place.path}") as descriptor:
        os.pread(descriptor, 1, place.offset)


# A page that the kernel is moving or writing back cannot be dropped at that moment, but can shortly after.
DROP_PAUSES_S = (0.0, 0.005, 0.02, 0.0)


def drop_from_cache(path: str, offset: int = 0, size: int | None = None) -> bool:
    """Drops a file, or a part and its neighbours, from the page cache; True if that worked. Needs only read access."""
    try:
        with _opened(path) as descriptor:
            begin = offset // LARGEST_FOLIO * LARGEST_FOLIO
            # 0 means up to the end of the file: its size is not known.
            length = 0 if size is None else -(-(offset + size) // LARGEST_FOLIO) * LARGEST_FOLIO - begin
            for pause in DROP_PAUSES_S:
                os.posix_fadvise(descriptor, begin, length, os.POSIX_FADV_DONTNEED)
                if not _in_cache(descriptor, offset):
                    return True
                os.fdatasync(descriptor)  # freshly written pages stay until they are on the disk
                time.sleep(pause)
            return False
    except (OSError, ReadFailure):
        return False


def _in_cache(descriptor: int, offset: int) -> bool:
    try:
        return os.preadv(descriptor, [bytearray(1)], offset, os.RWF_NOWAIT) == 1
    except OSError:
        # 'Would block' means not in the cache. A file system without this call was asked to drop it, and usually does.
        return False


@contextmanager
def _opened(path: str) -> Iterator[int]:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except (OSError, ValueError) as error:
        raise ReadFailure(path, "unreadable", str(error)) from None
    try:
        yield descriptor
    finally:
        os.close(descriptor)


# For the local disk: files are written, dropped from the page cache, and read back.
MOST_BYTES = 32 << 20
MOST_FILES = 200
LEAST_FREE = 10 * MOST_BYTES
"""Bytes that must be free: a measurement must not fill the disk."""


def measure_local_disk(folder: Path | None, sample_bytes: float, seconds: float = 1.0) -> float | None:
    """Bytes a second of reading files of a sample's size one by one, cold where the kernel allows it.

    Writes them for at most `seconds` to `folder` (else the temporary folder), reads them for at most `seconds`, and
    deletes them. None where nothing can be written there.
    """
    size = max(1024, min(int(sample_bytes), MOST_BYTES))
    place = folder if folder is not None and folder.is_dir() else None
    data = os.urandom(size)  # zeros would mislead on a disk that compresses or deduplicates
    try:
        with tempfile.TemporaryDirectory(prefix="stoker-disk-", dir=place) as name:
            disk = os.statvfs(name)
            if disk.f_bavail * disk.f_frsize < LEAST_FREE:
                return None
            files = _write(Path(name), data, seconds)
            for file in files:
                drop_from_cache(str(file))
            return _read_back(files, seconds)
    except OSError:
        return None


def _write(folder: Path, data: bytes, seconds: float) -> list[Path]:
    files, ends = list[Path](), time.perf_counter() + seconds
    while len(files) < min(MOST_FILES, max(1, MOST_BYTES // len(data))):
        file = folder / f"{len(files)}"
        file.write_bytes(data)
        files.append(file)
        if time.perf_counter() > ends:
            break
    return files


def _read_back(files: list[Path], seconds: float) -> float:
    began, read = time.perf_counter(), 0
    for file in files:
        read += len(file.read_bytes())
        if time.perf_counter() - began > seconds:
            break
    return read / (time.perf_counter() - began)
