"""A local copy that fills while it is used: what it has is read from there, the rest from the source, and kept.

A read never waits for the copy. Bytes are handed over first; a thread then writes them, and if it cannot keep up, they
are not kept this time. What is not whole and noted in the copy's manifest is never read.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import threading
import time
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing import util
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote, urlsplit

from stoker.data.priority import step_back
from stoker.data.store.local_copy import MANIFEST, LocalCopy
from stoker.data.store.stores import MAX_OBJECT_BYTES, Buffer, LocalStore, ReadFailure, SourceStore, is_url

# What waits to be written; beyond that nothing is kept until there is room. Half a second of a fast network.
MOST_WAITING_BYTES = 64_000_000
# A commit writes everything to the disk, and takes as long as that does: it follows when there is nothing to write, or
# after this time, and takes no more than this share of it.
COMMIT_EVERY_S = 5.0
COMMIT_WHEN_IDLE_S = 0.2
MOST_COMMITTING = 0.1
# Left free for everybody else on the disk, as by `stoker stage`.
FREE_SHARE = 0.02
MOST_FREE_BYTES = 1_000_000_000
_SIZE = re.compile(rb',"size":(\d+),')
_MD5 = re.compile(r'"?([0-9a-f]{32})"?')


class Expected(NamedTuple):
    """What the source said about one of its files."""

    size: int
    version: str


@dataclass(frozen=True)
class StagePlace:
    """The copy's folder, and what it is a copy of."""

    folder: str
    source: str
    """Root of the data: a folder or URL."""
    expected: Mapping[str, Expected] = field(default_factory=dict, compare=False)
    """Of shards and volumes, by their path below the source: a copy of another version is not used."""

    def below(self, location: str) -> str | None:
        """The path below the source of a folder, file or URL ("" for the source itself); None if it is elsewhere."""
        here, there = _path_of(self.source), _path_of(location)
        if here == there:
            return ""
        return there[len(here) + 1 :] if there.startswith(f"{here}/") else None

    def open(self) -> StagedCopy:
        """The copy, as this process has it open; all its threads share it."""
        with _opening:
            key = (os.getpid(), self.folder, self.source)
            if (opened := _open.get(key)) is None:
                opened = _open[key] = StagedCopy(LocalCopy(self.folder, self.source))
            return opened

    def local(self, path: str) -> str | None:
        """Where a file of the source is in the copy; None if the copy does not have it, or another version of it."""
        copy, expected = self.open(), self.expected.get(path)
        if not (copy.has(path) if expected is None else copy.has(path, expected.size, expected.version)):
            return None
        place = f"{copy.folder}/{path}"
        try:
            is_whole = expected is None or os.stat(place).st_size == expected.size  # noqa: PTH116
        except OSError:
            is_whole = False
        if not is_whole:  # somebody deleted it, or wrote to it
            copy.doubt(path)
        return place if is_whole else None


class StagedCopy:
    """A copy that threads of this process read and add to; other processes may do the same."""

    def __init__(self, copy: LocalCopy) -> None:
        self.copy = copy
        """Its records."""
        self.folder = copy.folder
        self.stopped: str | None = None
        """Why nothing more is kept; None while it is. Reading continues either way."""
        self.is_complete = False
        """Whether every file was found here, so that the manifest need not be asked again."""
        self._waiting: deque[tuple[str, Buffer, str]] = deque()
        self._waiting_bytes = 0
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._fresh: dict[str, Expected] = {}
        """Written by this process, and whole, but not yet in the manifest."""
        self._coming: set[str] = set()
        """Handed over, or being fetched to be kept."""
        self._doubted: set[str] = set()
        """In the manifest, but not as it says: deleted, or written to."""
        self._kept = 0
        self._reserved_bytes = 0
        self._threads: list[threading.Thread] = []
        self._closing = threading.Event()
        # Worker processes end without `atexit`.
        util.Finalize(None, self.close, exitpriority=10)

    def has(self, path: str, size: int | None = None, version: str | None = None) -> bool:
        """Whether the copy has a file: whole, and of this size and version if they are given."""
        if path in self._doubted or self.is_complete:
            return self.is_complete and path not in self._doubted
        found: Any = self._fresh.get(path) or self.copy.finished(path)
        if found is None:
            self.copy.refresh()
            found = self.copy.finished(path)
        return (
            found is not None and (size is None or found.size == size) and (version is None or found.version == version)
        )

    def is_coming(self, path: str) -> bool:
        """Whether somebody in this process is about to keep the file."""
        return path in self._coming

    def doubt(self, path: str) -> None:
        """Notes that a file is not as the manifest says: it is fetched again."""
        self._doubted.add(path)

    def offer(self, path: str, data: Buffer, version: str) -> None:
        """Takes a whole file to be kept; returns at once. It is not kept if too much waits already."""
        with self._lock:
            if self.stopped is not None or self._closing.is_set() or path in self._coming or path in self._fresh:
                return
            if self._waiting_bytes + len(data) > MOST_WAITING_BYTES:
                return
            self._coming.add(path)
            self._waiting.append((path, data, version))
            self._waiting_bytes += len(data)
            self._start_threads()
            self._changed.notify_all()

    def keep(self, path: str, data: Buffer, version: str) -> bool:
        """Writes a whole file now; False if there is no room. Raises ReadFailure for a name that cannot be."""
        if not self.has_room(len(data)):
            return False
        try:
            self.copy.put(path, data, version, _agreeing(data, version))
        except OSError as error:
            self._stop(error)
            return False
        self._note(path, Expected(len(data), version))
        return True

    def keep_large(self, path: str, source: SourceStore, part_bytes: int) -> bool:
        """Copies a file that may be larger than memory, a part at a time; raises as reading does."""
        size, version = source.about(path)
        with self._lock:
            self._reserved_bytes += size
        try:
            if not self.has_room():
                return False
            file = self.copy.create(path, size)
            try:
                for start in range(0, size, part_bytes):
                    if self._closing.is_set():
                        file.abandon()
                        return False
                    file.write_at(start, source.read(path, start, min(part_bytes, size - start)))
                if source.about(path) != (size, version):
                    raise ReadFailure(path, "changed", "it was replaced while it was being read")
            except BaseException:
                file.abandon()
                raise
            file.finish(version)
        except OSError as error:
            self._stop(error)
            return False
        finally:
            with self._lock:
                self._reserved_bytes -= size
        self._note(path, Expected(size, version))
        return True

    def has_room(self, size: int = 0) -> bool:
        """Whether the disk has room for that much and what it should keep free; if not, nothing more is kept."""
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
        """Waits until what was offered is written, and commits it."""
        with self._lock:
            while self._waiting_bytes and not self._closing.is_set():
                self._changed.wait(0.1)
        self.commit()

    def commit(self) -> None:
        """Makes what was written survive a power cut, and adds it to the manifest."""
        with self._lock:
            written = list(self._fresh)
        try:
            self.copy.commit()
        except OSError as error:
            self._stop(error)
            return
        with self._lock:
            for path in written:
                self._fresh.pop(path, None)

    def totals(self) -> tuple[int, int]:
        """Files and bytes in the manifest."""
        files = total = 0
        for record in self.copy.records():
            files, total = files + 1, total + record.size
        return files, total

    def __len__(self) -> int:
        """Lines in the manifest, a quick estimate of the files."""
        return len(self.copy)

    def close(self) -> None:
        """Writes and commits what waits, and ends the threads; nothing is kept afterwards."""
        with self._lock:
            if self._closing.is_set():
                return
            self._closing.set()
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()
        with suppress(OSError):
            self.copy.close()
        for key in [key for key, copy in _open.items() if copy is self]:
            del _open[key]

    def _start_threads(self) -> None:
        if self._threads or self._closing.is_set():
            return
        for work in (self._write_waiting, self._commit_regularly):
            thread = threading.Thread(target=work, name="stoker-staging", daemon=True)
            self._threads.append(thread)
            thread.start()

    def _note(self, path: str, expected: Expected) -> None:
        with self._lock:
            self._fresh[path] = expected
            self._kept += 1
            self._start_threads()
        self._doubted.discard(path)

    def _write_waiting(self) -> None:
        step_back()
        while True:
            with self._lock:
                while not self._waiting and not self._closing.is_set():
                    self._changed.wait()
                if not self._waiting:
                    return
                path, data, version = self._waiting.popleft()
            with suppress(ReadFailure):  # a name that no file can have
                self.keep(path, data, version)
            with self._lock:
                self._waiting_bytes -= len(data)
                self._coming.discard(path)
                self._changed.notify_all()
            del data

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


class StagedStore:
    """A store of which some files are in a local copy; what is fetched whole from the others is kept there."""

    def __init__(
        self, source: SourceStore, place: StagePlace, below: str, max_object_bytes: int = MAX_OBJECT_BYTES
    ) -> None:
        self.source = source
        self.url = source.url
        self.is_remote = source.is_remote
        self._place = place
        self._below = f"{below}/" if below else ""
        self._max_object_bytes = max_object_bytes
        self._copy = place.open()
        self._local = LocalStore(f"{self._copy.folder}/{below}", max_object_bytes=max_object_bytes)

    def __reduce__(self) -> Any:
        return StagedStore, (self.source, self._place, self._below.rstrip("/"), self._max_object_bytes)

    def read(self, path: str, offset: int = 0, size: int | None = None, *, whole: bool = False) -> Buffer:
        """The bytes, from the copy if it has the file; else from the source, and then a whole file is kept."""
        name = self._below + path
        expected = self._place.expected.get(name)
        if expected is not None:
            is_there = self._copy.has(name, expected.size, expected.version)
        else:
            is_there = self._copy.has(name, size if whole else None)
        if is_there:
            try:
                return self._local.read(path, offset, size, whole=whole)
            except ReadFailure:  # somebody deleted it, or wrote to it
                self._copy.doubt(name)
        if offset or not (whole or size is None):
            return self.source.read(path, offset, size)
        data, version = self.source.fetch(path, size)
        self._copy.offer(name, data, version)
        return data

    def size_of(self, path: str) -> int:
        """Bytes of an object of the source."""
        return self.source.size_of(path)

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
    """`md5` if the version is that checksum of the data. Another value says nothing: of encrypted objects and of those
    uploaded in parts it is something else."""
    found = _MD5.fullmatch(version)
    if found is None:
        return ""
    return "md5" if hashlib.md5(data, usedforsecurity=False).hexdigest() == found[1] else ""


def _path_of(location: str) -> str:
    if is_url(location) and not location.startswith("file://"):
        parts = urlsplit(location)
        return f"{parts.scheme}://{parts.netloc}{unquote(parts.path)}".rstrip("/")
    return os.path.abspath(unquote(urlsplit(location).path) if location.startswith("file://") else location)  # noqa: PTH100


# By process as well: a forked one has none of its parent's threads.
_open: dict[tuple[int, str, str], StagedCopy] = {}
_opening = threading.Lock()
