"""Where samples' bytes come from: a folder or an object store, behind one method."""

from __future__ import annotations

import errno
import os
import resource
import stat
from collections import OrderedDict
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeAlias
from urllib.parse import unquote, urlsplit

from stoker.core.errors import UserError
from stoker.core.redact import redact_text

Buffer: TypeAlias = bytes | bytearray | memoryview

# The default of the config key `max_image_bytes`.
MAX_OBJECT_BYTES = 256_000_000
# Shards of a large data set (ImageNet at 256 MB each: 600) fit, and half of the usual limit of 1024 stays free.
MOST_OPEN_SHARDS = 512
REMOTE_SCHEMES = ("s3", "s3a", "gs", "az", "abfs", "abfss", "http", "https")


class Location(NamedTuple):
    """Where bytes are in a store: an object, and a range in it."""

    path: str
    offset: int
    size: int | None
    """None for a whole object whose size was not listed."""


class FileVersion(NamedTuple):
    """A file's facts as its store reports them."""

    size: int
    version: str
    """Its ETag, or the time of its last change; empty if the store has none."""


class ReadFailure(Exception):
    """One object cannot be read; the others may be fine."""

    def __init__(self, path: str, reason: str, detail: str | None = None) -> None:
        super().__init__(path, reason, detail)
        self.path = path
        self.reason = reason
        """One of: missing, permission, is a directory, not a file, too large, changed, short, unreadable, bad name; and
        of a volume: unknown format, not a volume, wrong axes, no such level, missing chunk, not finite."""
        self.detail = detail

    def __str__(self) -> str:
        return f"{self.path}: {self.reason}" + (f" ({self.detail})" if self.detail else "")


class StoreDown(UserError):
    """The whole store cannot be read: no sample is at fault, and the run has to stop."""


class Store(Protocol):
    """Named objects that can be read, whole or in part, by several threads at once."""

    url: str
    is_remote: bool

    def read(self, path: str, offset: int = 0, size: int | None = None, *, whole: bool = False) -> Buffer:
        """Exactly `size` bytes from `offset`, or everything. With `whole`, `size` is the expected size of the object.

        Raises ReadFailure if this object cannot be read, StoreDown if the store cannot."""
        ...


class SourceStore(Store, Protocol):
    """A store whose objects can be copied: each has a version, which changes with its content."""

    def fetch(self, path: str, size: int | None = None) -> tuple[Buffer, str]:
        """A whole object, of this size if one is given, and its version; raises like `read`."""
        ...

    def about(self, path: str) -> FileVersion:
        """The facts about an object; raises like `read`."""
        ...


class LocalStore:
    """A folder. Files read in part (shards) stay open; files read whole are opened for each read."""

    is_remote = False

    def __init__(self, root: str | Path, *, max_object_bytes: int = MAX_OBJECT_BYTES) -> None:
        self.root = str(root).rstrip("/") or "/"
        self.url = self.root
        self.max_object_bytes = max_object_bytes
        self._open: OrderedDict[str, _OpenFile] = OrderedDict()
        soft_limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        self._most_open = max(1, min(MOST_OPEN_SHARDS, soft_limit // 4 if soft_limit > 0 else MOST_OPEN_SHARDS))

    def __reduce__(self) -> Any:
        return partial(LocalStore, max_object_bytes=self.max_object_bytes), (self.root,)

    def read(self, path: str, offset: int = 0, size: int | None = None, *, whole: bool = False) -> Buffer:
        if size is not None and size > self.max_object_bytes:
            raise ReadFailure(path, "too large", f"{size} bytes; the limit is {self.max_object_bytes}")
        if ".." in path and ".." in path.split("/"):
            raise ReadFailure(path, "bad name", "it points outside the folder")
        try:
            if whole or size is None:
                file = _OpenFile(f"{self.root}/{path}")
                return self._read_whole(file, path, offset, size)
            file = self._shard(path)
            data = _read_fully(file.descriptor, size, offset)
        except OSError as error:
            raise self._failure(path, error) from None
        except ValueError as error:  # a zero byte in the name
            raise ReadFailure(path, "bad name", str(error)) from None
        if len(data) != size:
            raise ReadFailure(path, "short", f"it ends before byte {offset + size}")
        return data

    def fetch(self, path: str, size: int | None = None) -> tuple[Buffer, str]:
        """A whole file, and the time of its last change."""
        version = self.about(path).version
        data = self.read(path, 0, size, whole=True)
        if self.about(path).version != version:
            raise ReadFailure(path, "changed", "it was written to while it was being read")
        return data, version

    def about(self, path: str) -> FileVersion:
        try:
            now = os.stat(f"{self.root}/{path}")  # noqa: PTH116
        except OSError as error:
            raise self._failure(path, error) from None
        return FileVersion(now.st_size, str(now.st_mtime_ns))

    def _read_whole(self, file: _OpenFile, path: str, offset: int, size: int | None) -> bytes:
        now = os.fstat(file.descriptor)
        if not stat.S_ISREG(now.st_mode):
            raise ReadFailure(path, "is a directory" if stat.S_ISDIR(now.st_mode) else "not a file")
        if size is not None and now.st_size != size:
            raise ReadFailure(path, "changed", f"{now.st_size} bytes; the index says {size}")
        wanted = max(0, now.st_size - offset)
        if wanted > self.max_object_bytes:
            raise ReadFailure(path, "too large", f"{wanted} bytes; the limit is {self.max_object_bytes}")
        data = _read_fully(file.descriptor, wanted, offset)
        if len(data) != wanted:
            raise ReadFailure(path, "short", f"{len(data)} of {wanted} bytes")
        return data

    def _shard(self, path: str) -> _OpenFile:
        # No lock: each step is atomic, and the worst outcome of a race is that a file is opened twice.
        file = self._open.get(path)
        if file is None:
            file = _OpenFile(f"{self.root}/{path}")
            if not stat.S_ISREG(os.fstat(file.descriptor).st_mode):
                raise ReadFailure(path, "not a file")
            self._open[path] = file
            while len(self._open) > self._most_open:
                try:
                    self._open.popitem(last=False)
                except KeyError:  # another thread emptied it
                    break
        return file

    def _failure(self, path: str, error: OSError) -> Exception:
        if error.errno in (errno.EMFILE, errno.ENFILE):
            return StoreDown(
                "too-many-open-files",
                f"cannot open {self.root}/{path}: {error.strerror}",
                why="this process has reached its limit of open files",
                hint="ulimit -n 65536, then start again",
            )
        # An unmounted disk or a dead network mount makes every file 'missing'; no sample is at fault.
        try:
            Path(self.root).stat()
        except OSError as root_error:
            return StoreDown(
                "data-folder-gone",
                f"{self.root} can no longer be read: {root_error.strerror}",
                why="no sample can be read; the disk or network mount may be gone",
                hint=f"ls {self.root}",
            )
        reasons = {
            errno.ENOENT: "missing",
            errno.ENOTDIR: "missing",
            errno.EACCES: "permission",
            errno.EPERM: "permission",
            errno.EISDIR: "is a directory",
            errno.ENAMETOOLONG: "bad name",
            # Opening a socket raises it.
            errno.ENXIO: "not a file",
        }
        return ReadFailure(path, reasons.get(error.errno or 0, "unreadable"), error.strerror)


class _OpenFile:
    """A descriptor that is closed with its last user: one thread may still read while another drops the file."""

    __slots__ = ("descriptor",)

    def __init__(self, path: str) -> None:
        # Without O_NONBLOCK, a named pipe called x.jpg would block forever; regular files ignore it.
        self.descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)

    def __del__(self) -> None:
        if hasattr(self, "descriptor"):
            os.close(self.descriptor)


def _read_fully(descriptor: int, size: int, offset: int) -> bytes:
    data = os.pread(descriptor, size, offset)
    if len(data) == size or not data:
        return data
    # Signals, network file systems and reads above 2 GB return less than requested.
    parts, have = [data], len(data)
    while have < size and (part := os.pread(descriptor, size - have, offset + have)):
        parts.append(part)
        have += len(part)
    return b"".join(parts)


def is_url(root: str) -> bool:
    """Whether a root is a URL (`s3://…`) and not a folder."""
    scheme, separator, _ = root.partition("://")
    return bool(separator) and "/" not in scheme


def open_store(root: str, max_object_bytes: int = MAX_OBJECT_BYTES) -> SourceStore:
    if not is_url(root):
        return LocalStore(root, max_object_bytes=max_object_bytes)
    parts = urlsplit(root)
    if parts.scheme == "file":
        return LocalStore(unquote(parts.path), max_object_bytes=max_object_bytes)
    if parts.scheme not in REMOTE_SCHEMES:
        raise UserError(
            "unknown-store",
            f"'{redact_text(root)}': {parts.scheme}:// is not supported",
            why=f"supported are folders and {', '.join(f'{scheme}://' for scheme in REMOTE_SCHEMES)}",
            hint="check data_root",
        )
    # Imported here: the client library is slow to load, and folders do not need it.
    from stoker.io.object_store import ObjectStore

    return ObjectStore(root, max_object_bytes=max_object_bytes)
