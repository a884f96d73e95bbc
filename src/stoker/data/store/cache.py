"""A read-through cache: what was fetched once is kept in a local folder, up to a budget.

Nothing is ever evicted. Each epoch visits every sample once, so a cache that holds a third of the data saves a third of
the fetches in every epoch, while one that evicts the oldest entries saves none.

Any number of processes can use it without a lock: files appear by renaming and carry a checksum, and the bytes in use
are the sum of a file of records to which every process appends.
"""

from __future__ import annotations

import errno
import itertools
import mmap
import os
import shutil
import struct
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from stoker.data.store.stores import Buffer, Store
from stoker.errors import UserError

FREE_SHARE = 0.9
"""Of the space that the cache uses or could use, if no budget is given."""
ABANDONED_AFTER_S = 3600
"""A temporary file this old was left by a killed process: writing one takes seconds."""
UNFINISHED = "unfinished"
# Of an object that is fetched in parts; a part is in memory, and is several requests at once.
PART_BYTES = 64 << 20
_HEADER = struct.Struct("<4sIQQ")  # magic, length of the header, length of the data, checksum
_MAGIC = b"STC1"
_numbers = itertools.count()


class CachedStore:
    """A store, with a local folder in front of it that keeps what was read."""

    def __init__(self, source: Store, folder: Path, *, cache_size: int | None = None) -> None:
        self.source = source
        self.url = source.url
        self.is_remote = source.is_remote
        self.folder = Path(folder)
        try:
            (self.folder / UNFINISHED).mkdir(parents=True, exist_ok=True)
            self._ledger = Ledger(self.folder)
        except OSError as error:
            raise UserError(
                "cache-unusable",
                f"{folder} cannot be used as a cache: {error.strerror}",
                hint="choose another cache_dir, or leave it out",
            ) from None
        self.budget = cache_size if cache_size is not None else self._share_of_disk()
        self.stopped: str | None = None
        """Why nothing more is kept; None while the cache still takes entries. Reading continues either way."""

    def __reduce__(self) -> Any:
        return _cached_store, (self.source, self.folder, self.budget)

    def read(self, path: str, offset: int = 0, size: int | None = None, *, whole: bool = False) -> Buffer:
        """The bytes, from the folder if it has them; else from the source, and then the folder keeps them."""
        # The size is part of the key, so that after a new listing of changed data old entries do not match.
        key = f"{self.url}\n{path}\n{offset}\n{size}\n{whole}".encode("utf-8", "surrogateescape")
        kept = self._place(key)
        found = self._kept(kept, key)
        if found is not None:
            return found
        data = self.source.read(path, offset, size, whole=whole)
        if self.stopped is None:
            self._keep(kept, len(data), lambda temporary: _write(temporary, [_header(key, data), data]))
        return data

    def mapped(self, path: str, size: int, version: str, fetch: Callable[[int, int], Buffer]) -> memoryview | None:
        """A whole object, mapped from its file in the folder; `fetch` gets its bytes, from one to another, if it is not
        there. None if the folder has no room for it."""
        key = f"{self.url}\n{path}\n{size}\n{version}\nmapped".encode("utf-8", "surrogateescape")
        kept = self._place(key)
        found = self._mapping(kept, key)
        if found is None and self.stopped is None:
            self._keep(kept, size, lambda temporary: _write_parts(temporary, key, size, fetch))
            found = self._mapping(kept, key)
        return found

    def size_of(self, path: str) -> int:
        """Bytes of an object of the source."""
        return self.source.size_of(path)

    @property
    def fetches(self) -> int:
        """How many reads went over the network."""
        return getattr(self.source, "fetches", 0)

    def used_bytes(self) -> int:
        """Bytes in the folder, according to its records."""
        return self._ledger.used()

    def _kept(self, kept: str, key: bytes) -> memoryview | None:
        try:
            descriptor = os.open(kept, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return None
        try:
            content = os.read(descriptor, os.fstat(descriptor).st_size)
        except OSError:  # a bad block
            content = b""
        finally:
            os.close(descriptor)
        return self._checked(kept, key, memoryview(content))

    def _mapping(self, kept: str, key: bytes) -> memoryview | None:
        try:
            descriptor = os.open(kept, os.O_RDONLY | os.O_CLOEXEC)
            try:
                content = memoryview(mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ))
            finally:
                os.close(descriptor)
        except (OSError, ValueError):  # mapping an empty file is a ValueError
            return None
        return self._checked(kept, key, content)

    def _checked(self, kept: str, key: bytes, content: memoryview) -> memoryview | None:
        data = content[_HEADER.size :]
        if content[: _HEADER.size] == _header(key, data):
            return data
        # Cut off by a power failure, or damaged: fetch it again.
        with suppress(OSError):
            size = Path(kept).stat().st_size
            Path(kept).unlink()
            self._ledger.add(-size)
        return None

    def _place(self, key: bytes) -> str:
        digest = xxhash.xxh3_128_hexdigest(key)
        return f"{self.folder}/{digest[:2]}/{digest[2:]}"

    def _keep(self, kept: str, data_bytes: int, write: Callable[[str], None]) -> None:
        size = _HEADER.size + data_bytes
        try:
            if not self._ledger.reserve(size, self.budget):
                return
        except OSError as error:
            self._stop(error)
            return
        # The size in the name is subtracted again if the file is found abandoned.
        temporary = f"{self.folder}/{UNFINISHED}/{os.getpid()}-{next(_numbers)}-{os.urandom(4).hex()}-{size}"
        try:
            # Not synced to disk, which would cost more than fetching: the checksum detects what a power failure left
            # behind.
            write(temporary)
            if os.path.exists(kept):  # noqa: PTH110 (five times as fast)
                raise FileExistsError(errno.EEXIST, "another process has kept it in the meantime", kept)
            _move(temporary, kept)
        except BaseException as error:
            with suppress(OSError):
                os.unlink(temporary)  # noqa: PTH108
            with suppress(OSError):
                self._ledger.add(-size)
            if not isinstance(error, OSError):
                raise  # from the source, while its parts were fetched
            if not isinstance(error, FileExistsError):
                self._stop(error)

    def _stop(self, error: OSError) -> None:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        reason = "the disk is full" if full else f"it cannot be written to: {error.strerror}"
        self.stopped = f"cache {self.folder}: {reason}; nothing more is cached, and reading continues"

    def _share_of_disk(self) -> int:
        # Used and free together, so that the next process gets the same budget when the cache is half full.
        return int(FREE_SHARE * (shutil.disk_usage(self.folder).free + self._ledger.used()))


class Ledger:
    """The bytes in a folder: signed 8-byte records in one file, to which every process appends.

    An append is atomic and survives the death of its process. Bytes are recorded before they are written, so the folder
    never holds more than the records say.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / "used"
        if not self.path.exists():
            self._begin(folder)
        self._descriptor = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CLOEXEC)
        self._seen = (0, 0)  # one tuple, replaced at once: threads need no lock
        self._refused: int | None = None
        self._clean(folder / UNFINISHED)

    def __del__(self) -> None:
        if hasattr(self, "_descriptor"):
            os.close(self._descriptor)

    def add(self, size: int) -> None:
        """Records bytes that were added, or removed if negative."""
        os.write(self._descriptor, struct.pack("<q", size))

    def used(self) -> int:
        """The sum of all records; only the new ones are read."""
        position, total = self._seen
        while part := os.pread(self._descriptor, 1 << 20, position):
            records = np.frombuffer(part[: len(part) // 8 * 8], "<i8")
            if not len(records):
                break
            position, total = position + records.nbytes, total + int(records.sum())
        self._seen = (position, total)
        return total

    def reserve(self, size: int, budget: int) -> bool:
        """Reserves room for this many bytes; False if that would exceed the budget."""
        # A size that was refused stays refused: else a full cache would get two records for each miss.
        if self._refused is not None and size >= self._refused:
            return False
        if self.used() + size <= budget:
            self.add(size)
            if self.used() <= budget:
                return True
            self.add(-size)  # others reserved at the same moment
        self._refused = size if self._refused is None else min(size, self._refused)
        return False

    def _begin(self, folder: Path) -> None:
        """Starts the records; counts existing files, in case the records were deleted."""
        total = sum(
            entry.stat().st_size
            for part in os.scandir(folder)
            if part.is_dir() and part.name != UNFINISHED
            for entry in os.scandir(part.path)
        )
        fresh = folder / UNFINISHED / f"ledger-{os.getpid()}-{os.urandom(4).hex()}"
        fresh.write_bytes(struct.pack("<q", total))
        # The link fails if another process was faster; then its records are used.
        with suppress(FileExistsError):
            os.link(fresh, self.path)
        fresh.unlink()

    def _clean(self, folder: Path) -> None:
        """Removes the unfinished files of killed processes, and subtracts their bytes."""
        for entry in os.scandir(folder):
            with suppress(OSError, ValueError):
                if time.time() - entry.stat().st_mtime > ABANDONED_AFTER_S:
                    size = 0 if entry.name.startswith("ledger-") else int(entry.name.rpartition("-")[2])
                    os.unlink(entry.path)  # noqa: PTH108
                    self.add(-size)


def _cached_store(source: Store, folder: Path, budget: int) -> CachedStore:
    return CachedStore(source, folder, cache_size=budget)


def _header(key: bytes, data: Buffer) -> bytes:
    # Includes the key: a file under another's name is as wrong as a damaged one.
    checksum = xxhash.xxh3_64(key)
    checksum.update(data)
    return _HEADER.pack(_MAGIC, _HEADER.size, len(data), checksum.intdigest())


def _write(path: str, parts: list[Buffer]) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        for part in parts:
            _write_fully(descriptor, part)
    finally:
        os.close(descriptor)


def _write_parts(path: str, key: bytes, size: int, fetch: Callable[[int, int], Buffer]) -> None:
    """Writes an object that may be larger than memory, and its header when all of it is there."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        checksum = xxhash.xxh3_64(key)
        os.lseek(descriptor, _HEADER.size, os.SEEK_SET)
        for start in range(0, size, PART_BYTES):
            part = fetch(start, min(start + PART_BYTES, size))
            checksum.update(part)
            _write_fully(descriptor, part)
        os.pwrite(descriptor, _HEADER.pack(_MAGIC, _HEADER.size, size, checksum.intdigest()), 0)
    finally:
        os.close(descriptor)


def _write_fully(descriptor: int, part: Buffer) -> None:
    rest = memoryview(part)
    while len(rest):
        rest = rest[os.write(descriptor, rest) :]


def _move(temporary: str, kept: str) -> None:
    try:
        os.rename(temporary, kept)  # noqa: PTH104
    except FileNotFoundError:
        os.makedirs(os.path.dirname(kept), exist_ok=True)  # noqa: PTH103, PTH120
        os.rename(temporary, kept)  # noqa: PTH104
