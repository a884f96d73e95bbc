"""A local copy of a source: plain files under the source's own paths, and a record of which of them are whole.

Any program can read the copy. Our records are files at its root, never folders: to torchvision's ImageFolder every
folder is a class.

- `.stage.json`: what this is a copy of.
- `.stage.jsonl`: a line for each file that is whole and on disk: path, size, version at the source, xxh3-128 of the
  content, and how that was verified. Lines are only appended; the last line of a path counts. What a kill leaves of a
  line is ignored.
- `.stage-HOST-PID-N.tmp`: a file that is being written. It gets its name when it is complete.

Any number of processes may fill one copy at once: files appear by renaming, and lines by one append each.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import itertools
import json
import mmap
import os
import re
import socket
import stat
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import xxhash

from stoker.core.errors import UserError
from stoker.core.files import write_text
from stoker.core.redact import redact_text
from stoker.io.copy_manifest import FORGOTTEN, READ_BYTES, CopiedFile, ManifestTable
from stoker.io.stores import Buffer, ReadFailure, is_url

LONGEST_PART_BYTES = 255
"""Longest name between two slashes of a path, on the usual Linux file systems."""
LONGEST_PATH_BYTES = 4000
_numbers = itertools.count()
# Process ids mean nothing on another host that shares the disk.
_HOST = xxhash.xxh3_64_hexdigest(socket.gethostname().encode())[:6]
_TEMPORARY = re.compile(rf"\.stage-{_HOST}-(\d+)-\d+\.tmp")


def check_name(path: str) -> None:
    """Raises ReadFailure for a name that cannot be a file inside the copy, or could be taken for one of our own."""
    parts = path.split("/")
    if path.startswith("/"):
        raise ReadFailure(path, "bad name", "it begins with a slash")
    if ".." in parts or "." in parts:
        raise ReadFailure(path, "bad name", "it contains a part '.' or '..', which would lead elsewhere")
    if "" in parts:
        raise ReadFailure(path, "bad name", "it has an empty part: a file system cannot keep two slashes in a row")
    if "\0" in path:
        raise ReadFailure(path, "bad name", "it contains a zero byte")
    if len(path) > LONGEST_PART_BYTES // 4:  # a character has up to four bytes
        encoded = [len(part.encode("utf-8", "surrogateescape")) for part in parts]
        if max(encoded) > LONGEST_PART_BYTES:
            raise ReadFailure(path, "bad name", f"a part of it has {max(encoded)} bytes; file systems allow 255")
        if sum(encoded) + len(parts) > LONGEST_PATH_BYTES:
            raise ReadFailure(path, "bad name", f"it has {sum(encoded) + len(parts)} bytes; the limit is 4,000")
    if parts[0].startswith(".stage"):
        raise ReadFailure(path, "bad name", "names that begin with .stage are the copy's own records")


def source_name(source: str) -> str:
    """How a copy identifies its source: a URL without secrets, or the absolute path of a folder."""
    if is_url(source) and not source.startswith("file://"):
        return redact_text(source).rstrip("/")
    return os.path.realpath(os.path.expanduser(source.removeprefix("file://")))  # noqa: PTH111


def temporary_name(folder: str) -> str:
    """A new name for a file that is being written; it names this process, so that the next one knows who left it."""
    return f"{folder}/.stage-{_HOST}-{os.getpid()}-{next(_numbers)}.tmp"


def remove_abandoned(folder: str) -> int:
    """Removes the temporary files of processes of this host that are gone; returns how many."""
    removed = 0
    with os.scandir(folder) as entries:
        for entry in entries:
            found = _TEMPORARY.fullmatch(entry.name)
            if found is not None and not _is_running(int(found[1])):
                with suppress(OSError):
                    os.unlink(entry.path)  # noqa: PTH108
                    removed += 1
    return removed


def _is_running(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True  # another user's
    return True


FORMAT = 1
ABOUT = ".stage.json"
MANIFEST = ".stage.jsonl"
SUBSET = "subset.json"
"""Which classes were chosen, if the copy is a part of its source."""


class LocalCopy:
    """The local copy of a source in a folder; threads may share it."""

    def __init__(self, folder: str | Path, source_url: str, *, read_only: bool = False) -> None:
        """Opens the copy or begins one; raises UserError if the folder holds anything else or cannot be written to."""
        self.read_only = read_only
        self.folder = os.path.realpath(folder)
        self.source = source_name(source_url)
        try:
            if not self.read_only:
                os.makedirs(self.folder, exist_ok=True)  # noqa: PTH103
            self._check_or_begin()
            flags = os.O_RDONLY if read_only else os.O_RDWR | os.O_CREAT | os.O_APPEND
            self._manifest = os.open(f"{self.folder}/{MANIFEST}", flags | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise _unusable(self.folder, error) from None
        self._lock = threading.Lock()
        self._committing = threading.Lock()
        self._written: list[CopiedFile] = []
        self._folders: set[str] = {""}
        self._table = ManifestTable()
        self._read_to = 0
        self.refresh()
        if not read_only:
            remove_abandoned(self.folder)

    def close(self) -> None:
        if self._manifest >= 0:
            self.commit()
            os.close(self._manifest)
            self._manifest = -1

    def __len__(self) -> int:
        """Lines in the manifest; a path that was copied again counts again."""
        return len(self._table)

    def place(self, path: str) -> str:
        """Where a file of the source is in the copy; the name must have been checked."""
        return f"{self.folder}/{path}"

    def finished(self, path: str) -> CopiedFile | None:
        """What the manifest says about a file; None if it is not whole. The file itself is not looked at."""
        return self._table.find(path, self._manifest)

    def present(self, path: str) -> CopiedFile | None:
        """The same, if a file of this size is there: somebody may have deleted it since."""
        record = self.finished(path)
        if record is None:
            return None
        try:
            found = os.lstat(self.place(path))
        except (OSError, ValueError):
            return None
        return record if stat.S_ISREG(found.st_mode) and found.st_size == record.size else None

    def records(self) -> Iterator[CopiedFile]:
        return self._table.records(self._manifest)

    def put(self, path: str, data: Buffer, version: str = "", verified: str = "") -> CopiedFile:
        """Writes a whole file under a temporary name, and renames it; it counts after the next `commit`.

        Raises ReadFailure for an impossible name, OSError if it cannot be written."""
        file = self.create(path, len(data))
        try:
            file.write_at(0, data)
            return file.finish(version, verified, content=data)
        finally:
            file.abandon()  # does nothing to a finished file

    def check(self, path: str) -> None:
        """Makes the file's folder, before anything is fetched; raises ReadFailure for an impossible name."""
        check_name(path)
        folder, below = path.rpartition("/")[0], ""
        for part in folder.split("/") if folder not in self._folders else ():
            below = f"{below}/{part}" if below else part
            if below in self._folders:
                continue
            with suppress(FileExistsError):
                os.mkdir(f"{self.folder}/{below}", 0o777)  # noqa: PTH102
            # A link could lead out of the copy.
            if not stat.S_ISDIR(os.lstat(f"{self.folder}/{below}").st_mode):
                raise ReadFailure(path, "bad name", f"{below} in the copy is not a folder")
            self._folders.add(below)

    def create(self, path: str, size: int) -> PartialFile:
        """A file that is written in parts, in any order."""
        self.check(path)
        return PartialFile(self, path, size)

    def add(self, record: CopiedFile) -> None:
        """Notes a file that is complete under its own name; it counts after the next `commit`."""
        with self._lock:
            self._written.append(record)

    def forget(self, paths: Iterable[str]) -> None:
        """Removes files from the manifest: they turned out to be wrong, and are copied again."""
        if batch := [CopiedFile(path, FORGOTTEN, "", "", "") for path in paths]:
            self._append(batch)
            self.refresh()

    def uncommitted(self) -> int:
        """Files that were written and are not yet in the manifest."""
        return len(self._written)

    def commit(self, limit_bytes: int | None = None) -> int:
        """Makes the files written so far survive a power cut, then adds them to the manifest; returns how many files.
        Files that would exceed the limit are removed instead.

        Other threads can continue to write meanwhile."""
        with self._committing:
            with self._lock:
                batch, self._written = self._written, []
            if not batch:
                return 0
            try:
                sync_file_system(self._manifest)
                if limit_bytes is None:
                    self._append(batch)
                else:
                    with self._alone():
                        self.refresh()
                        batch = self._within(batch, limit_bytes)
                        self._append(batch)
            except BaseException:
                with self._lock:
                    self._written = batch + self._written
                raise
            self.refresh()
            return len(batch)

    def totals(self) -> tuple[int, int]:
        return self._table.totals()

    def _append(self, batch: list[CopiedFile]) -> None:
        # It begins with a line break, which ends a line that a killed process may have left unfinished.
        rest = memoryview(b"\n" + b"".join(record.line() for record in batch))
        while len(rest):  # in one call, unless the file system takes only a part
            rest = rest[os.write(self._manifest, rest) :]

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Holds the lock, so that no other process commits; without a lock if the file system has none."""
        with suppress(OSError):
            fcntl.lockf(self._manifest, fcntl.LOCK_EX)
        try:
            yield
        finally:
            with suppress(OSError):
                fcntl.lockf(self._manifest, fcntl.LOCK_UN)

    def _within(self, batch: list[CopiedFile], limit_bytes: int) -> list[CopiedFile]:
        room = limit_bytes - self.totals()[1]
        fitting = []
        for record in batch:
            if record.size <= room or self.finished(record.path) is not None:
                fitting.append(record)
                room -= record.size
            else:
                with suppress(OSError):
                    os.unlink(self.place(record.path))  # noqa: PTH108
        return fitting

    def refresh(self) -> None:
        """Reads the lines that were added since, by any process."""
        with self._lock:
            while part := os.pread(self._manifest, READ_BYTES, self._read_to):
                end = part.rfind(b"\n") + 1
                if not end:
                    break  # a line that is just being written, or was cut off
                self._table.add(part[:end], self._read_to)
                self._read_to += end

    def _rename(self, temporary: str, path: str) -> None:
        try:
            os.rename(temporary, f"{self.folder}/{path}")  # noqa: PTH104
        except FileNotFoundError:
            # The folder was removed in the meantime.
            self._folders = {""}
            self.check(path)
            os.rename(temporary, f"{self.folder}/{path}")  # noqa: PTH104
        except (IsADirectoryError, NotADirectoryError):
            raise ReadFailure(path, "bad name", "the copy has a folder of this name") from None

    def _check_or_begin(self) -> None:
        about = f"{self.folder}/{ABOUT}"
        known = _read_object(about)
        if known is None:
            if strangers := _strangers(self.folder):
                raise UserError(
                    "not-a-copy",
                    f"{self.folder} is not empty, and is not a copy that was made by stoker",
                    why=f"it contains {', '.join(strangers)}, which could be overwritten",
                    hint="choose an empty or a new folder",
                )
            fresh = temporary_name(self.folder)
            Path(fresh).write_text(json.dumps({"format": FORMAT, "source": self.source}) + "\n")
            try:
                # The link fails if another process was faster; then its record counts.
                with suppress(FileExistsError):
                    os.link(fresh, about)
            except OSError:  # no hard links on this file system
                os.rename(fresh, about)  # noqa: PTH104
            with suppress(OSError):
                os.unlink(fresh)  # noqa: PTH108
            known = _read_object(about)
        wanted = {"format": FORMAT, "source": self.source}
        if known != wanted and not self.read_only and not _strangers(self.folder):
            manifest = Path(self.folder) / MANIFEST
            if not manifest.exists() or manifest.stat().st_size == 0:
                # Begun with a misspelt source, which had nothing to copy.
                write_text(Path(about), json.dumps(wanted) + "\n")
                known = wanted
        if known != wanted:
            of = (known or {}).get("source")
            raise UserError(
                "copy-of-another-source",
                f"{self.folder} is a copy of {of}, not of {self.source}"
                if of != self.source
                else f"{self.folder} was made by another version of stoker",
                why="files of two sources in one folder could not be distinguished",
                hint="choose another folder",
            )


def open_copy(folder: str | Path) -> LocalCopy:
    """The copy in a folder, whatever its source; raises UserError if there is none."""
    known = _read_object(f"{os.path.realpath(folder)}/{ABOUT}")
    if known is None or not isinstance(known.get("source"), str):
        raise UserError(
            "not-a-copy",
            f"{folder} is not a copy that was made by stoker",
            why=f"it has no readable {ABOUT}",
            hint="stoker stage SRC DST",
        )
    return LocalCopy(folder, known["source"], read_only=not os.access(folder, os.W_OK))


class PartialFile:
    """A file of a copy that is written in parts under a temporary name."""

    def __init__(self, copy: LocalCopy, path: str, size: int) -> None:
        self._copy, self.path, self.size = copy, path, size
        self._temporary = temporary_name(copy.folder)
        self._descriptor = os.open(self._temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)

    def write_at(self, offset: int, data: Buffer) -> None:
        """Writes one part; any thread."""
        rest = memoryview(data)
        while len(rest):
            written = os.pwrite(self._descriptor, rest, offset)
            rest, offset = rest[written:], offset + written

    def mapped(self) -> memoryview:
        """The whole content as it is now, for checksums."""
        if os.fstat(self._descriptor).st_size == 0:
            return memoryview(b"")
        return memoryview(mmap.mmap(self._descriptor, 0, access=mmap.ACCESS_READ))

    def finish(self, version: str = "", verified: str = "", content: Buffer | None = None) -> CopiedFile:
        """Gives the file its name; raises ReadFailure if its length is wrong. `content` saves reading it again."""
        try:
            found = os.fstat(self._descriptor).st_size
            if found != self.size:
                raise ReadFailure(self.path, "short", f"{found} of {self.size} bytes")
            digest = xxhash.xxh3_128_hexdigest(self.mapped() if content is None else content)
            record = CopiedFile(self.path, found, version, digest, verified)
            self._copy._rename(self._temporary, self.path)
        except BaseException:
            self.abandon()
            raise
        self._close()
        self._copy.add(record)
        return record

    def abandon(self) -> None:
        """Removes what was written; does nothing to a finished file."""
        if self._descriptor >= 0:
            self._close()
            with suppress(OSError):
                os.unlink(self._temporary)  # noqa: PTH108

    def _close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def sync_file_system(descriptor: int) -> None:
    """Writes all data of a file system to its disk: one call for thousands of files."""
    if _syncfs is None or _syncfs(descriptor) != 0:
        code = ctypes.get_errno() if _syncfs is not None else errno.ENOSYS
        if code in (errno.EIO, errno.ENOSPC, errno.EDQUOT):
            raise OSError(code, os.strerror(code))
        os.sync()


def _find_syncfs() -> Any:
    with suppress(OSError, AttributeError):
        function = ctypes.CDLL(None, use_errno=True).syncfs
        function.argtypes = [ctypes.c_int]
        return function
    return None


_syncfs = _find_syncfs()


def _read_object(path: str | Path) -> dict[str, Any] | None:
    """The object in a JSON file; None if there is no such file, empty if it is damaged."""
    try:
        found: Any = json.loads(Path(path).read_text())
    except FileNotFoundError:
        return None
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _strangers(folder: str) -> list[str]:
    """Other files in a folder that should be empty; a fresh disk has a lost+found."""
    names = sorted(name for name in os.listdir(folder) if not name.startswith(".stage") and name != "lost+found")  # noqa: PTH208
    return names[:3]


def _unusable(folder: str, error: OSError) -> UserError:
    return UserError(
        "copy-not-writable",
        f"{folder} cannot be written to: {error.strerror or error}",
        why="the local copy and its records belong there",
        hint=f"ls -ld {folder}    # or choose another folder",
    )


def keep_subset(copy: LocalCopy, record: dict[str, Any] | None) -> None:
    """Writes which subset a copy holds; refuses a copy that holds another one or everything."""
    path = Path(copy.folder) / SUBSET
    try:
        known = _read_object(path)
    except OSError:
        known = {}
    if known == record:
        return
    if not len(copy):
        if record is None:
            path.unlink()
        else:
            write_text(path, json.dumps(record, indent=1) + "\n")
        return
    raise UserError(
        "copy-of-another-subset",
        f"{copy.folder} holds {_subset_text(known)}; now {_subset_text(record)} should go there",
        why="programs that read the folder would see both together",
        hint="choose another folder for each part",
    )


def _subset_text(record: dict[str, Any] | None) -> str:
    if record is None:
        return "all classes"
    samples = record.get("samples") or {}
    return f"{len(record.get('classes') or [])} classes with {samples.get('train')} training images"
