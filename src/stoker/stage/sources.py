"""Where staged files come from: a folder or mount, or an object store. Lists them with size and version, and reads."""

from __future__ import annotations

import errno
import os
import random
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple, Protocol
from urllib.parse import urlsplit

from stoker.core.console import Advance, shown
from stoker.core.errors import UserError, did_you_mean
from stoker.core.redact import redact_text
from stoker.io.connection import Patience
from stoker.io.local_copy import source_name
from stoker.io.object_store import ObjectStore
from stoker.io.stores import REMOTE_SCHEMES, Buffer, ReadFailure, is_url

LISTING_THREADS = 16
_TEMPORARY_FAULTS = (errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EAGAIN, errno.EINTR, errno.EREMOTEIO)


class SourceFile(NamedTuple):
    """A file of the source as it was listed."""

    path: str
    size: int
    version: str
    """Its ETag, or a file's time of last change; "" if the store has none."""


class Content(NamedTuple):
    """The bytes read from a file."""

    data: Buffer
    verified: str
    """The kind of checksum of the source that agreed; "" if none did, and for a part of a file."""


Retried = Callable[[str, bool], None]
"""Called with the reason why a request is retried, and whether fewer at once would help."""


def say_nothing(_reason: str, _too_fast: bool) -> None:
    """For callers that do not count retries."""


class ReadLoop(Protocol):
    """Reads that are in flight; its methods are called by one thread."""

    def begin(self, file: SourceFile, start: int, end: int, done: Callable[[Content | ReadFailure], None]) -> None:
        """Begins to read; `done` is called by `run` with what was read, which is overwritten afterwards."""
        ...

    def run(self, wait_s: float) -> None:
        """Goes on with what has data, waiting for it at most so long. Raises StoreDown if the whole store fails."""
        ...

    def close(self) -> None: ...


class Source(Protocol):
    """Files with a path, a size and a version."""

    url: str
    most_at_once: int = 64
    """Reads, each by a thread."""

    def files(self, below: Sequence[str] = ("",), progress: Advance | None = None) -> Iterator[SourceFile]:
        """Every file below these folders; those with an impossible name fail when they are copied."""
        ...

    def directly_in(self, folder: str) -> list[SourceFile]:
        """The files of one folder, without those of folders in it; empty if there is no such folder."""
        ...

    def read(self, file: SourceFile, start: int, end: int, retried: Retried = say_nothing) -> Content:
        """Bytes of a file that must still be as it was listed; raises ReadFailure or StoreDown."""
        ...

    def agreed(self, file: SourceFile, content: Buffer) -> str | None:
        """The kind of checksum that a file which was read in parts agrees with; "" if there is none, None if it does
        not agree."""
        del file, content
        return ""

    def loop(self, retried: Retried) -> ReadLoop | None:
        """Reads without threads, if that is how this source is read fastest."""
        del retried
        return None

    def stop(self) -> None:
        """Makes reads that other threads are waiting for fail soon."""
        return


def open_source(url: str, patience: Patience = Patience()) -> Source:  # noqa: B008
    """The source behind a folder's path or a URL; raises UserError if it does not exist or cannot be read."""
    if is_url(url) and not url.startswith("file://"):
        scheme = urlsplit(url).scheme
        if scheme not in REMOTE_SCHEMES or scheme in ("http", "https"):
            listable = ", ".join(f"{one}://" for one in REMOTE_SCHEMES if not one.startswith("http"))
            raise UserError(
                "unknown-store",
                f"'{redact_text(url)}': {scheme}:// cannot be listed",
                why=f"stage copies folders and {listable}",
                hint="give the folder or the bucket's own URL",
            )
        from stoker.stage.s3 import open_s3  # awscrt takes some time to import, and folders do not need it

        store = ObjectStore(url, patience=patience)
        return open_s3(store) or ObjectSource(store)
    return FolderSource(source_name(url))


class FolderSource(Source):
    """A folder of this machine, or mounted on it; links are followed."""

    def __init__(self, root: str) -> None:
        self.url = self.root = root
        try:
            found = os.stat(root)  # noqa: PTH116
        except OSError as error:
            if error.errno == errno.ELOOP:
                raise _link_loop(root, "itself") from None
            if error.errno not in (errno.ENOENT, errno.ENOTDIR):
                raise UserError(
                    "data-not-readable", f"{shown(root)}: {error.strerror}", hint=f"ls -ld {shown(root)}"
                ) from None
            there = sorted(os.listdir(parent)) if os.path.isdir(parent := os.path.dirname(root)) else []  # noqa: PTH208, PTH112, PTH120
            raise UserError(
                "data-not-found",
                f"{shown(root)} does not exist",
                hint=did_you_mean(os.path.basename(root), there, most_edits=1) or "stoker stage FOLDER TARGET",  # noqa: PTH119
            ) from None
        if not stat.S_ISDIR(found.st_mode):
            raise UserError("data-not-found", f"{shown(root)} is a file, not a folder", hint="stage its folder")

    def files(self, below: Sequence[str] = ("",), progress: Advance | None = None) -> Iterator[SourceFile]:
        """Every file, folder by folder; several folders at once, because over a network each is a round trip."""
        waiting = [(folder, _ancestors(self.root, folder)) for folder in below]
        found = 0
        with ThreadPoolExecutor(LISTING_THREADS) as pool:
            while waiting:
                listed = pool.map(lambda one: _list_folder(self.root, *one), waiting)
                waiting = []
                for files, folders in listed:
                    waiting += folders
                    found += len(files)
                    if progress is not None:
                        progress(found, None)
                    yield from files

    def directly_in(self, folder: str) -> list[SourceFile]:
        return _list_folder(self.root, folder, ())[0] if os.path.isdir(f"{self.root}/{folder}") else []  # noqa: PTH112

    def read(self, file: SourceFile, start: int, end: int, retried: Retried = say_nothing) -> Content:
        for attempt in range(3):
            try:
                return Content(self._read(file, start, end), "")
            except OSError as error:
                if error.errno not in _TEMPORARY_FAULTS or attempt == 2:
                    reasons = {errno.ENOENT: "missing", errno.EACCES: "permission", errno.ENXIO: "not a file"}
                    raise ReadFailure(file.path, reasons.get(error.errno or 0, "unreadable"), error.strerror) from None
                retried(error.strerror or str(error), False)
            time.sleep(jitter(0.1, 0.5) * (attempt + 1))
        raise AssertionError("unreachable")

    def _read(self, file: SourceFile, start: int, end: int) -> bytes:
        # Without O_NONBLOCK, opening a named pipe would block forever; regular files ignore it.
        descriptor = os.open(f"{self.root}/{file.path}", os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            now = os.fstat(descriptor)
            if not stat.S_ISREG(now.st_mode):
                raise ReadFailure(file.path, "not a file")
            parts, at = [], start
            while at < end and (part := os.pread(descriptor, end - at, at)):
                parts.append(part)
                at += len(part)
            after = os.fstat(descriptor)
        finally:
            os.close(descriptor)
        if at != end or after.st_size != file.size or f"{after.st_mtime_ns}" != file.version:
            raise ReadFailure(file.path, "changed", "since it was listed")
        return parts[0] if len(parts) == 1 else b"".join(parts)


def _ancestors(root: str, folder: str) -> tuple[tuple[int, int], ...]:
    above = []
    path = folder
    while path:
        path = path.rpartition("/")[0]
        found = os.stat(f"{root}/{path}")  # noqa: PTH116
        above.append((found.st_dev, found.st_ino))
    return tuple(above)


Folder = tuple[str, tuple[tuple[int, int], ...]]


def _list_folder(root: str, folder: str, above: tuple[tuple[int, int], ...]) -> tuple[list[SourceFile], list[Folder]]:
    files: list[SourceFile] = []
    folders: list[Folder] = []
    try:
        here = os.stat(f"{root}/{folder}")  # noqa: PTH116
        identity = (here.st_dev, here.st_ino)
        if identity in above:
            raise _link_loop(f"{root}/{folder}", "a folder above it")
        with os.scandir(f"{root}/{folder}") as entries:
            for entry in entries:
                path = f"{folder}/{entry.name}" if folder else entry.name
                if entry.is_dir():
                    folders.append((path, (*above, identity)))
                    continue
                try:
                    found = entry.stat()
                except FileNotFoundError:
                    found = entry.stat(follow_symlinks=False)  # a dangling link: reported when it is read
                files.append(SourceFile(path, found.st_size, f"{found.st_mtime_ns}"))
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise _link_loop(f"{root}/{folder}/{error.filename or ''}", "itself") from None
        raise UserError(
            "data-not-readable",
            f"{shown(f'{root}/{folder}')} cannot be listed: {error.strerror}",
            why="the copy would not be complete",
            hint="check the permissions, or stage a part",
        ) from None
    files.sort()
    folders.sort()
    return files, folders


def _link_loop(path: str, target: str) -> UserError:
    return UserError(
        "symlink-loop",
        f"{shown(path)} is a link that leads to {target}",
        why="following it would never end",
        hint="stage the folders that you need, one by one",
    )


class ObjectSource(Source):
    """A bucket or a part of one, through obstore."""

    def __init__(self, store: ObjectStore) -> None:
        self.url, self._store = store.url, store
        store.connection.check()

    def files(self, below: Sequence[str] = ("",), progress: Advance | None = None) -> Iterator[SourceFile]:
        """Every object, folder by folder, in the server's order."""
        listed = (SourceFile(*one) for folder in below for one in self._store.versions(folder))
        for found, file in enumerate(listed, 1):
            if progress is not None and found % 1000 == 0:
                progress(found, None)
            yield file

    def directly_in(self, folder: str) -> list[SourceFile]:
        return [SourceFile(*one) for one in self._store.versions(folder, directly=True)]

    def read(self, file: SourceFile, start: int, end: int, retried: Retried = say_nothing) -> Content:
        """The bytes of this version of an object; obstore retries failed requests itself."""
        del retried
        whole = start == 0 and end == file.size
        data = self._store.read(file.path, start, end - start, whole=whole, version=file.version or None)
        return Content(data, "")


def jitter(least: float, most: float) -> float:
    """A number between these two, so that clients that failed together do not return together."""
    return random.uniform(least, most)  # noqa: S311
