"""How fast storage is, cold and warm, by one reader and by many, and how fast this host's own disk is.

Measuring reads files that exist, and needs neither root nor a change to the data. A cold read is one whose file was
dropped from this host's page cache before; what a server has cached cannot be dropped from here.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol
from urllib.parse import urlsplit

import numpy as np
from numpy.typing import NDArray

from stoker.core.console import Say
from stoker.io.prefetch import Located
from stoker.io.stores import Location, ReadFailure, Store, StoreDown, is_url
from stoker.profile.mounts import mount_of
from stoker.profile.observed import StorageFacts

# The same numbers as the loader's readers (stoker.io.prefetch).
LOCAL_READERS = 16
REMOTE_READERS = 64
# A fast disk reads these in a second, and more would not change the result.
MOST_SAMPLES = 2000
WARM_SAMPLES = 64
LEAST_READS = 4
"""Fewer reads say nothing about a percentile, let alone a rate."""
DROPPING_SHARE = 0.5
"""Share of a round's time, before it: if the page cache drops nothing, each attempt takes some pauses."""
# The kernel groups neighbouring pages, and drops a group as a whole or not at all.
LARGEST_FOLIO = 2 << 20
IN_MEMORY = frozenset({"tmpfs", "ramfs", "hugetlbfs"})
# Shares of the time for: one reader cold, the same warm, many readers cold.
_SHARES = (0.4, 0.2, 0.4)

Read = Callable[[Location], int]
"""Reads the bytes at a place; returns how many there were."""


@dataclass(frozen=True)
class Round:
    """Reads by a number of threads for some time."""

    at_once: int
    reads: int
    bytes: int
    seconds: float
    p50_s: float
    p99_s: float

    @property
    def reads_per_second(self) -> float:
        return self.reads / self.seconds

    @property
    def bytes_per_second(self) -> float:
        return self.bytes / self.seconds


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

    def read(place: Location) -> int:
        return len(store.read(*place, whole=samples.index.are_files))

    one, many, latency_s = None, None, None
    if facts.kind not in IN_MEMORY:  # files there are never cold
        one, latency_s = _read_cold(store, read, alone, seconds * _SHARES[0], root)
    # Nothing of an object store is cached on this side.
    warm = None if root is None else read_warm(read, alone, seconds * _SHARES[1])
    if facts.kind not in IN_MEMORY:
        if root is not None:
            together = dropped(together, seconds * _SHARES[2], f"{root}/")
        if len(together) >= LEAST_READS:
            readers = REMOTE_READERS if store.is_remote else LOCAL_READERS
            many = read_round(read, together, readers, seconds * _SHARES[2], 1)
    known = one or warm
    if known is None:
        missing("storage: none of the samples we tried could be read")
    elif one is None:
        missing("cold storage: these files cannot be dropped from the page cache (they are in memory or being written)")
    if facts.bytes_per_sample is None and known is not None:
        mean = known.bytes / known.reads
        facts = replace(facts, bytes_per_sample=mean, dataset_bytes=int(mean * len(samples)))
    return replace(
        facts,
        cold_bytes_per_second=None if one is None else one.bytes_per_second,
        latency_s=latency_s,
        warm_bytes_per_second=None if warm is None else warm.bytes_per_second,
        parallel_bytes_per_second=None if many is None else many.bytes_per_second,
    )


def _two_draws(samples: StoredSamples) -> tuple[list[Location], list[Location]]:
    """Two sets of samples, disjoint where there are enough: a server caches files that it has just read."""
    count = min(len(samples), 2 * MOST_SAMPLES)
    members = np.random.default_rng(0).choice(len(samples), count, replace=False).astype(np.int64)
    places = list(samples.index.locations(samples.indices(members).tolist()))
    if count < 2 * LEAST_READS:
        return places, places
    return places[: count // 2], places[count // 2 :]


def _read_cold(
    store: Store, read: Read, places: Sequence[Location], seconds: float, root: str | None
) -> tuple[Round | None, float | None]:
    """Reads samples one by one that are not in the page cache, and the median time until the first byte; None if all of
    them are."""
    began, size, firsts, whole = time.perf_counter(), 0, list[float](), list[float]()
    for place in places:
        if time.perf_counter() - began > seconds:
            break
        if root is not None and not drop_from_cache(f"{root}/{place.path}", place.offset, place.size):
            continue
        try:
            start = time.perf_counter()
            if root is None:
                store.read(place.path, place.offset, 1)
            else:
                with _opened(f"{root}/{place.path}") as descriptor:
                    os.pread(descriptor, 1, place.offset)
            first = time.perf_counter()
            size += read(place)
        except ReadFailure:
            continue  # training reports it when it reads that sample
        firsts.append(first - start)
        # From an object store the first byte is a separate request, which real reads do without.
        whole.append(time.perf_counter() - (start if root is not None else first))
    if not size:
        return None, None
    return _round(1, size, whole, sum(whole)), statistics.median(firsts)


def read_warm(read: Read, places: Sequence[Location], seconds: float) -> Round | None:
    """The same few places again and again by one reader, after a first time that is not counted."""
    first = read_round(read, places[:WARM_SAMPLES], 4, seconds / 2, 1)
    warm = [] if first is None else [*places[: first.reads]]
    return read_round(read, 200 * warm, 1, seconds / 2, LEAST_READS)


def read_round(read: Read, places: Sequence[Location], at_once: int, seconds: float, least: int) -> Round | None:
    """Reads the places with this many threads until the time is over; None if fewer than `least` can be read."""
    if len(places) < least:
        return None
    queue = iter(places)
    lock = threading.Lock()
    took: list[float] = []
    faults: list[StoreDown] = []
    began = ended = time.perf_counter()
    total = 0

    def work() -> None:
        nonlocal total, ended
        while time.perf_counter() - began < seconds and not faults:
            with lock:
                place = next(queue, None)
            if place is None:
                return
            start = time.perf_counter()
            try:
                size = read(place)
            except StoreDown as error:
                faults.append(error)
                return
            except (OSError, ReadFailure):
                continue  # one file that cannot be read says nothing about the storage
            end = time.perf_counter()
            with lock:
                ended, total = max(ended, end), total + size
                took.append(end - start)

    threads = [threading.Thread(target=work, daemon=True) for _ in range(min(at_once, len(places)))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if faults:
        raise faults[0]
    return None if len(took) < max(1, least) else _round(len(threads), total, took, ended - began)


def _round(at_once: int, size: int, took: list[float], seconds: float) -> Round:
    took.sort()
    return Round(at_once, len(took), size, seconds, took[len(took) // 2], took[int(0.99 * len(took))])


def dropped(places: Iterable[Location], seconds: float, root: str = "", enough: int | None = None) -> list[Location]:
    """Those that left the page cache, as far as time allows; once there are `enough`, in half of it."""
    began, found = time.perf_counter(), list[Location]()
    for place in places:
        if drop_from_cache(f"{root}{place.path}", place.offset, place.size):
            found.append(place)
        took = time.perf_counter() - began
        if took > seconds or (enough is not None and took > DROPPING_SHARE * seconds and len(found) >= enough):
            break
    return found


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
            files, ends = list[Path](), time.perf_counter() + seconds
            while len(files) < min(MOST_FILES, max(1, MOST_BYTES // size)):
                files.append(Path(name) / f"{len(files)}")
                files[-1].write_bytes(data)
                if time.perf_counter() > ends:
                    break
            for file in files:
                drop_from_cache(str(file))
            began, read = time.perf_counter(), 0
            for file in files:
                read += len(file.read_bytes())
                if time.perf_counter() - began > seconds:
                    break
            return read / (time.perf_counter() - began)
    except OSError:
        return None
