"""A store with a local copy in front of it: what the copy has is read from there, the rest from the source, and kept.

`stage_to` and `cache_dir` are the same copy (local_copy.py):

- `stage_to` has the files of one source under their own names, and no limit but the disk. Parts of a shard or volume
  are read from the source until a filler (loader/filling.py) has fetched the whole file.
- `cache_dir` has whatever was read of any source, each in a folder of its own, up to `cache_size`: parts of a shard and
  rows of a parquet file are files of their own. A full one stays as it is. Each epoch visits every sample once, so a
  cache that holds a third of the data saves a third of the fetches, and one that evicts the oldest entries saves none.

A read never waits for the copy. Bytes are handed over first; a thread then writes them, and if it cannot keep up, they
are not kept this time. What is not whole and noted in the manifest is never read, and a file that is read whole is
compared with its checksum. Several processes may share a copy: a limit holds for what the manifest lists, and files of
the last seconds that exceed it are removed when they are committed.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import shutil
import threading
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing import util
from pathlib import Path
from typing import Any, cast
from urllib.parse import unquote, urlsplit

import xxhash

from stoker.core.errors import UserError
from stoker.core.priority import step_back
from stoker.io.copy_manifest import CopiedFile
from stoker.io.local_copy import MANIFEST, LocalCopy
from stoker.io.stores import (
    MAX_OBJECT_BYTES,
    Buffer,
    FileVersion,
    LocalStore,
    ReadFailure,
    SourceStore,
    Store,
    StoreDown,
    is_url,
)

# Bytes that wait to be written; beyond that nothing is kept until there is room. Half a second of a fast network.
MOST_WAITING_BYTES = 64_000_000
# A commit writes everything to the disk, and takes as long as that does: it follows when nothing is left to write, or
# after this time, and takes no more than this share of it.
COMMIT_EVERY_S = 5.0
COMMIT_WHEN_IDLE_S = 0.2
MOST_COMMITTING = 0.1
# Space left free for everybody else on the disk, as by `stoker stage`.
FREE_SHARE = 0.02
MOST_FREE_BYTES = 1_000_000_000
# Share of the space that a cache uses or could use, if it has no limit.
CACHE_SHARE = 0.9
# The copy of a cache is a folder in `cache_dir`, which may hold other things, such as our own index in ~/.cache/stoker.
CACHE_FOLDER = "stoker-copy"
_ANY_SOURCE = "cache://any"
_SIZE = re.compile(rb',"size":(\d+),')
_MD5 = re.compile(r'"?([0-9a-f]{32})"?')


@dataclass(frozen=True)
class CopyPlace:
    """The copy's folder, and what it is a copy of."""

    folder: str
    source: str | None
    """Root of the data: a folder or URL; None for a cache, which has files of any source."""
    expected: Mapping[str, FileVersion] = field(default_factory=dict, compare=False)
    """Versions of shards and volumes, by their path below the source: a copy of another version is not used."""
    limit_bytes: int | None = None
    """Limit of a cache; None for a share of the disk."""

    @property
    def is_cache(self) -> bool:
        """Whether it keeps whatever is read, up to a limit; otherwise it becomes a whole copy."""
        return self.source is None

    def below(self, location: str) -> str | None:
        """Where a folder, file or URL is in the copy ("" for the source itself); None if it is not below the source."""
        if self.source is None:
            return xxhash.xxh3_128_hexdigest(location.encode("utf-8", "surrogateescape"))
        here, there = _path_of(self.source), _path_of(location)
        if here == there:
            return ""
        return there[len(here) + 1 :] if there.startswith(f"{here}/") else None

    def open(self) -> OpenCopy:
        """The copy, as opened by this process; all its threads share it."""
        with _opening:
            key = (os.getpid(), self.folder, self.source)
            if (opened := _open.get(key)) is None:
                opened = _open[key] = OpenCopy(self)
            return opened

    def local(self, path: str, expected: FileVersion | None = None) -> str | None:
        """Where a file of the copy is; None if the copy does not have it, or another version of it."""
        copy, expected = self.open(), expected or self.expected.get(path)
        if copy.find(path, *(expected or ())) is None:
            return None
        place = f"{copy.folder}/{path}"
        try:
            is_whole = expected is None or os.stat(place).st_size == expected.size  # noqa: PTH116
        except OSError:
            is_whole = False
        if not is_whole:  # somebody deleted it, or wrote to it
            copy.doubt(path)
        return place if is_whole else None


def cache_place(folder: str | None, limit_bytes: int | None = None) -> CopyPlace | None:
    """The cache in a folder; None without one."""
    if folder is None:
        return None
    return CopyPlace(f"{Path(folder).expanduser()}/{CACHE_FOLDER}", None, limit_bytes=limit_bytes)


class OpenCopy:
    """A copy that threads of this process read and add to; other processes may do the same."""

    def __init__(self, place: CopyPlace) -> None:
        try:
            self.copy = LocalCopy(place.folder, _ANY_SOURCE if place.source is None else place.source)
            """Its records."""
        except UserError as error:
            if not place.is_cache:
                raise
            raise UserError(
                "cache-unusable",
                f"{error.seen}, so it cannot be used as a cache",
                hint="choose another cache_dir, or leave it out",
            ) from None
        self.folder = self.copy.folder
        self.limit_bytes: int | None = None
        self._listed_bytes = self._fresh_bytes = 0
        if place.is_cache:
            self._listed_bytes = self.copy.totals()[1]
            # Used and free together, so that the next process gets the same limit when the cache is half full.
            room = int(CACHE_SHARE * (shutil.disk_usage(self.folder).free + self._listed_bytes))
            self.limit_bytes = room if place.limit_bytes is None else place.limit_bytes
        self.stopped: str | None = None
        """Why nothing more is kept; None while it is. Reading continues either way."""
        self.is_complete = False
        """Whether every file was found here, so that the manifest need not be checked again."""
        self._writer = ThreadPoolExecutor(1, "stoker-staging", initializer=step_back)
        self._waiting_bytes = 0
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._fresh: dict[str, CopiedFile] = {}
        """Complete files written by this process that are not yet in the manifest."""
        self._coming: set[str] = set()
        """Files handed over, or being fetched to be kept."""
        self._doubted: set[str] = set()
        """Files that differ from the manifest: deleted, or written to."""
        self._kept = 0
        self._reserved_bytes = 0
        self._committer: threading.Thread | None = None
        self._closing = threading.Event()
        # Worker processes end without `atexit`.
        util.Finalize(None, self.close, exitpriority=10)

    def find(self, path: str, size: int | None = None, version: str | None = None) -> CopiedFile | None:
        """The record of a file that the copy has whole, and of this size and version if they are given."""
        if path in self._doubted:
            return None
        if self.is_complete:
            return CopiedFile(path, size or 0, version or "", "", "")
        found = self._fresh.get(path) or self.copy.finished(path)
        if found is None:
            self.copy.refresh()
            found = self.copy.finished(path)
        if found is None or size not in (None, found.size) or version not in (None, found.version):
            return None
        return found

    def is_coming(self, path: str) -> bool:
        """Whether a thread of this process is about to keep the file."""
        return path in self._coming

    def doubt(self, path: str) -> None:
        """Notes that a file differs from the manifest: it is fetched again."""
        self._doubted.add(path)

    def offer(self, path: str, data: Buffer, version: str) -> None:
        """Takes a whole file to be kept; returns at once. It is not kept if too many bytes wait already."""
        with self._lock:
            if self.stopped is not None or self._closing.is_set() or path in self._coming or path in self._fresh:
                return
            if self._waiting_bytes + len(data) > MOST_WAITING_BYTES or not self._is_within_limit(len(data)):
                return
            self._coming.add(path)
            self._waiting_bytes += len(data)
            self._start_committing()
            self._writer.submit(self._keep_offered, path, data, version)

    def keep(self, path: str, data: Buffer, version: str) -> bool:
        """Writes a whole file now; False if there is no room. Raises ReadFailure for an impossible name."""
        if not self.has_room(len(data)):
            return False
        try:
            record = self.copy.put(path, data, version, _agreeing(data, version))
        except OSError as error:
            self._stop(error)
            return False
        self._note(record)
        return True

    def keep_parts(self, path: str, expected: FileVersion, parts: Iterable[Buffer]) -> bool:
        """Writes a file that may be larger than memory, a part at a time; raises the errors of getting a part. False if
        there is no room for it, or the copy is being closed."""
        with self._lock:
            if not self._is_within_limit(expected.size):
                return False
            self._reserved_bytes += expected.size
        try:
            if not self.has_room():
                return False
            file = self.copy.create(path, expected.size)
            try:
                written = 0
                for part in parts:
                    if self._closing.is_set():
                        return False
                    file.write_at(written, part)
                    written += len(part)
                record = file.finish(expected.version)
            finally:
                file.abandon()  # does nothing to a finished file
        except OSError as error:
            self._stop(error)
            return False
        finally:
            with self._lock:
                self._reserved_bytes -= expected.size
        self._note(record)
        return True

    def has_room(self, size: int = 0) -> bool:
        """Whether the disk has room for this many bytes and its reserve; if not, nothing more is kept."""
        if self.stopped is not None:
            return False
        try:
            disk = os.statvfs(self.folder)
        except OSError as error:
            self._stop(error)
            return False
        free = disk.f_bavail * disk.f_frsize
        margin = min(MOST_FREE_BYTES, int(FREE_SHARE * disk.f_blocks * disk.f_frsize))
        if free - size - self._waiting_bytes - self._reserved_bytes < margin:
            self.stopped = f"only {free / 1e9:.1f} GB are free on its disk"
            return False
        return True

    def flush(self) -> None:
        """Waits until the offered files are written, and commits them."""
        with self._lock:
            while self._waiting_bytes and not self._closing.is_set():
                self._changed.wait(0.1)
        self.commit()

    def commit(self) -> None:
        """Makes the written files survive a power cut, and adds them to the manifest."""
        with self._lock:
            written = list(self._fresh)
        try:
            self.copy.commit(self.limit_bytes)
        except OSError as error:
            self._stop(error)
            return
        listed_bytes = 0 if self.limit_bytes is None else self.copy.totals()[1]
        with self._lock:
            for path in written:
                self._fresh.pop(path, None)
            self._listed_bytes, self._fresh_bytes = listed_bytes, sum(one.size for one in self._fresh.values())

    def totals(self) -> tuple[int, int]:
        return self.copy.totals()

    def close(self) -> None:
        """Writes and commits the waiting files, and ends the threads; nothing is kept afterwards."""
        with self._lock:
            if self._closing.is_set():
                return
            self._closing.set()
        self._writer.shutdown()
        if self._committer is not None:
            self._committer.join()
        self.commit()
        with suppress(OSError):
            self.copy.close()
        for key in [key for key, copy in _open.items() if copy is self]:
            del _open[key]

    def _is_within_limit(self, size: int) -> bool:
        taken = self._listed_bytes + self._fresh_bytes + self._waiting_bytes + self._reserved_bytes
        return self.limit_bytes is None or taken + size <= self.limit_bytes

    def _start_committing(self) -> None:
        if self._committer is None and not self._closing.is_set():
            self._committer = threading.Thread(target=self._commit_regularly, name="stoker-staging", daemon=True)
            self._committer.start()

    def _note(self, record: CopiedFile) -> None:
        with self._lock:
            self._fresh[record.path] = record
            self._fresh_bytes += record.size
            self._kept += 1
            self._start_committing()
        self._doubted.discard(record.path)

    def _keep_offered(self, path: str, data: Buffer, version: str) -> None:
        try:
            with suppress(ReadFailure):  # a name that no file can have
                self.keep(path, data, version)
        finally:
            with self._lock:
                self._waiting_bytes -= len(data)
                self._coming.discard(path)
                self._changed.notify_all()

    def _commit_regularly(self) -> None:
        step_back()
        last, kept = time.monotonic(), 0
        while not self._closing.wait(COMMIT_WHEN_IDLE_S):
            began, before, kept = time.monotonic(), kept, self._kept
            if not self.copy.uncommitted() or (kept != before and began - last < COMMIT_EVERY_S):
                continue
            self.commit()
            last = time.monotonic()
            self._closing.wait(min(COMMIT_EVERY_S, (last - began) / MOST_COMMITTING))

    def _stop(self, error: OSError) -> None:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        self.stopped = "its disk is full" if full else f"it cannot be written to: {error.strerror}"


class CachedStore:
    """A store with some files in a local copy; those fetched from the source are kept there."""

    def __init__(self, source: Store, place: CopyPlace, max_object_bytes: int = MAX_OBJECT_BYTES) -> None:
        self.source = source
        self.url = source.url
        self.is_remote = source.is_remote
        self._place = place
        below = place.below(source.url)
        assert below is not None, "the samples are below the root of the data"
        self._below = f"{below}/" if below else ""
        self._max_object_bytes = max_object_bytes
        self._copy = place.open()
        self._local = LocalStore(self._copy.folder, max_object_bytes=max_object_bytes)

    def __reduce__(self) -> Any:
        return CachedStore, (self.source, self._place, self._max_object_bytes)

    def read(self, path: str, offset: int = 0, size: int | None = None, *, whole: bool = False) -> Buffer:
        """The bytes, from the copy if it has them; else from the source, and then they are kept: in a cache as they
        were read, in a whole copy only whole files."""
        is_part = offset > 0 or (size is not None and not whole)
        if is_part and not self._place.is_cache:
            found = self._copied(self._below + path, offset, size, is_part=True)
            return self.source.read(path, offset, size) if found is None else found
        name = f"{self._below}{path}" + (f".parts/{offset}-{size}" if is_part else "")
        found = self._copied(name, 0, size)
        if found is not None:
            return found
        if self._place.is_cache:
            data, version = self.source.read(path, offset, size, whole=whole), ""
        else:
            data, version = cast(SourceStore, self.source).fetch(path, size)
        self._copy.offer(name, data, version)
        return data

    def _copied(self, name: str, offset: int, size: int | None, *, is_part: bool = False) -> Buffer | None:
        expected = self._place.expected.get(name) or (None if is_part else size, None)
        record = self._copy.find(name, *expected)
        if record is None:
            return None
        try:
            data = self._local.read(name, offset, size, whole=not is_part)
        except (ReadFailure, StoreDown):
            data = None
        is_other = data is not None and not is_part and record.xxh3 not in ("", xxhash.xxh3_128_hexdigest(data))
        if data is None or is_other:  # somebody deleted it, or wrote to it
            self._copy.doubt(name)
            return None
        return data

    @property
    def is_local_now(self) -> bool:
        """Whether the copy is complete, so that nothing is read from the source any more."""
        return self._copy.is_complete

    @property
    def fetches(self) -> int:
        """How many reads went over the network."""
        return getattr(self.source, "fetches", 0)


def copied_bytes(folder: Path) -> int:
    """Bytes that the manifest of a folder lists; 0 if it has none."""
    total = 0
    with suppress(OSError), (folder / MANIFEST).open("rb") as lines:
        for line in lines:
            found = _SIZE.search(line)
            total += int(found[1]) if found else 0
    return total


def _agreeing(data: Buffer, version: str) -> str:
    """`md5` if the version is that checksum of the data. Another value says nothing: encrypted objects, and those
    uploaded in parts, have something else."""
    found = _MD5.fullmatch(version)
    if found is None:
        return ""
    return "md5" if hashlib.md5(data, usedforsecurity=False).hexdigest() == found[1] else ""


def _path_of(location: str) -> str:
    if is_url(location) and not location.startswith("file://"):
        parts = urlsplit(location)
        return f"{parts.scheme}://{parts.netloc}{unquote(parts.path)}".rstrip("/")
    return os.path.abspath(unquote(urlsplit(location).path) if location.startswith("file://") else location)  # noqa: PTH100


# Keyed by process as well: a forked one has none of its parent's threads.
_open: dict[tuple[int, str, str | None], OpenCopy] = {}
_opening = threading.Lock()
