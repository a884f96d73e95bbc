"""Where staged files come from: a folder or mount, or an object store. Lists them with size and version, and reads."""

from __future__ import annotations

import errno
import itertools
import os
import socket
import stat
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPException, HTTPResponse
from typing import Any, Protocol
from urllib.parse import unquote_plus, urlsplit
from xml.etree import ElementTree

from stoker.console import Advance, shown
from stoker.data.store.copy_names import source_name
from stoker.data.store.object_store import ObjectStore
from stoker.data.store.stores import REMOTE_SCHEMES, Buffer, ReadFailure, StoreDown, is_url
from stoker.errors import UserError, did_you_mean
from stoker.redact import redact_text
from stoker.stage.records import SourceFile, jitter
from stoker.stage.s3_requests import S3Place, Signer, s3_place

LISTING_THREADS = 16
_PAGE_TRIES = 6
_TEMPORARY_FAULTS = (errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EAGAIN, errno.EINTR, errno.EREMOTEIO)


class Source(Protocol):
    """Files with a path, a size and a version."""

    url: str

    def files(self, below: Sequence[str] = ("",), progress: Advance | None = None) -> Iterator[SourceFile]:
        """Every file below these folders; what cannot be a file is told when it is copied."""
        ...

    def directly_in(self, folder: str) -> list[SourceFile]:
        """The files of one folder, without those of folders in it; empty if there is no such folder."""
        ...

    def read(self, file: SourceFile, start: int, end: int) -> Buffer:
        """Bytes of a file that must still be as it was listed; raises ReadFailure or StoreDown."""
        ...


def open_source(url: str) -> Source:
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
        return ObjectSource(url)
    return FolderSource(source_name(url))


class FolderSource:
    """A folder of this machine, or mounted on it; links are followed."""

    def __init__(self, root: str) -> None:
        self.url = self.root = root
        try:
            found = os.stat(root)  # noqa: PTH116
        except OSError as error:
            if error.errno == errno.ELOOP:
                raise _link_loop(root, "itself") from None
            if error.errno not in (errno.ENOENT, errno.ENOTDIR):
                raise UserError("data-not-readable", f"{shown(root)}: {error.strerror}", hint="ls -ld it") from None
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
        """The files of one folder."""
        return _list_folder(self.root, folder, ())[0] if os.path.isdir(f"{self.root}/{folder}") else []  # noqa: PTH112

    def read(self, file: SourceFile, start: int, end: int) -> Buffer:
        """The bytes; raises ReadFailure if the file has changed since it was listed."""
        for attempt in range(3):
            try:
                return self._read(file, start, end)
            except OSError as error:
                if error.errno not in _TEMPORARY_FAULTS or attempt == 2:
                    reasons = {errno.ENOENT: "missing", errno.EACCES: "permission", errno.ENXIO: "not a file"}
                    raise ReadFailure(file.path, reasons.get(error.errno or 0, "unreadable"), error.strerror) from None
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
                    found = entry.stat(follow_symlinks=False)  # a dangling link: told when it is read
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


class ObjectSource:
    """A bucket or a part of one."""

    def __init__(self, url: str) -> None:
        self.store = ObjectStore(url)
        self.url = self.store.url
        self.place = s3_place(self.url)
        """How S3 is reached without a library; None for other stores, and if that is not possible."""
        if self.place is None or not _answers(self.place):
            self.store.check()  # says what is wrong

    def files(self, below: Sequence[str] = ("",), progress: Advance | None = None) -> Iterator[SourceFile]:
        """Every object, in the server's order; several folders at once."""
        found = 0
        with ThreadPoolExecutor(min(LISTING_THREADS, len(below) or 1)) as pool:
            for pages in _ahead(pool, below, self._pages):
                for page in pages:
                    found += len(page)
                    if progress is not None:
                        progress(found, None)
                    yield from page

    def directly_in(self, folder: str) -> list[SourceFile]:
        """The objects of one folder."""
        below = f"{folder}/" if folder else ""
        if self.place is not None:
            try:
                return [file for page in list_s3(self.place, below, directly=True) for file in page]
            except StoreDown:
                self.store.check()
                raise
        return [SourceFile(*one) for one in self.store.versions(folder, directly=True)]

    def read(self, file: SourceFile, start: int, end: int) -> Buffer:
        """The bytes of this version of an object."""
        whole = start == 0 and end == file.size
        return self.store.read(file.path, start, end - start, whole=whole, version=file.version or None)

    def _pages(self, folder: str) -> Iterator[list[SourceFile]]:
        if self.place is not None:
            try:
                yield from list_s3(self.place, f"{folder}/" if folder else "")
            except StoreDown:
                self.store.check()  # it knows more about what can be wrong
                raise
            return
        found = (SourceFile(*one) for one in self.store.versions(folder))
        while page := list(itertools.islice(found, 1000)):
            yield page


def _answers(place: S3Place) -> bool:
    """Whether anybody listens there: a wrong endpoint should be told at once, not after all tries."""
    try:
        socket.create_connection((place.host, place.port), timeout=5).close()
    except OSError:
        return False
    return True


def _ahead(pool: ThreadPoolExecutor, below: Sequence[str], pages: Any) -> Iterator[Iterator[list[SourceFile]]]:
    """The pages of each folder; of a single one as they come, of several listed at once."""
    if len(below) == 1:
        yield pages(below[0])
    else:
        yield from pool.map(lambda folder: iter(list(pages(folder))), below)


def list_s3(place: S3Place, below: str, *, directly: bool = False) -> Iterator[list[SourceFile]]:
    """The objects whose names begin so, a page of up to a thousand at a time; names are those below the place's prefix.

    Not through obstore, whose listing ends with an error at the first name that has an empty or a '..' part."""
    prefix = f"{place.prefix}/" if place.prefix else ""
    query = {"list-type": "2", "prefix": prefix + below, "encoding-type": "url"}
    if directly:
        query["delimiter"] = "/"
    while True:
        page = ElementTree.fromstring(_page(place, query))  # noqa: S314 - entities are not expanded by expat's defaults
        name = page.tag.rpartition("}")[0] + "}" if page.tag.startswith("{") else ""
        encoded = page.findtext(f"{name}EncodingType") == "url"
        files = []
        for entry in page.iter(f"{name}Contents"):
            key = entry.findtext(f"{name}Key") or ""
            key = unquote_plus(key, errors="surrogateescape") if encoded else key
            size = int(entry.findtext(f"{name}Size") or 0)
            if key.endswith("/") and size == 0:
                continue  # how consoles make an empty folder
            files.append(SourceFile(key[len(prefix) :], size, entry.findtext(f"{name}ETag") or ""))
        yield files
        token = page.findtext(f"{name}NextContinuationToken")
        if page.findtext(f"{name}IsTruncated") != "true" or not token:
            return
        query["continuation-token"] = token


def _page(place: S3Place, query: dict[str, str]) -> bytes:
    reason = ""
    for attempt in range(_PAGE_TRIES):
        if attempt:
            time.sleep(jitter(0.5, 1.0) * min(10.0, 0.2 * 2**attempt))
        try:
            with socket.create_connection((place.host, place.port), timeout=30) as plain:
                wrapped = place.tls.wrap_socket(plain, server_hostname=place.host) if place.tls is not None else plain
                with wrapped:
                    wrapped.sendall(Signer(place).request("GET", place.base or "/", {}, query))
                    response = HTTPResponse(wrapped, method="GET")
                    response.begin()
                    body = response.read()
        except (OSError, HTTPException) as error:
            reason = str(error) or type(error).__name__
            continue
        if response.status == 200:
            return body
        reason = f"status {response.status}"
        if response.status in (400, 401, 403, 404):
            break
    raise StoreDown(
        "listing-failed",
        f"{place.host_header} does not list the bucket ({reason})",
        why="what to copy is not known",
        hint="check that the credentials may list the bucket (s3:ListBucket)",
    )
