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
import json
import mmap
import os
import stat
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import xxhash

from stoker.core.errors import UserError
from stoker.core.files import write_text
from stoker.io.copy_manifest import FORGOTTEN, READ_BYTES, CopiedFile, ManifestTable
from stoker.io.copy_names import check_name, remove_abandoned, source_name, temporary_name
from stoker.io.stores import Buffer, ReadFailure

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
        """Commits what was written, and closes the manifest."""
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
        """Every file of the manifest once, in the order of its lines."""
        return self._table.records(self._manifest)

    def put(self, path: str, data: Buffer, version: str = "", verified: str = "") -> CopiedFile:
        """Writes a whole file under a temporary name, and renames it; it counts after the next `commit`.

        Raises ReadFailure for an impossible name, OSError if it cannot be written."""
        folder = self._folder_of(path)
        temporary = temporary_name(self.folder)
        try:
            descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
            try:
                written = os.write(descriptor, data)
                while written < len(data):
                    written += os.write(descriptor, memoryview(data)[written:])
            finally:
                os.close(descriptor)
            self._rename(temporary, path, folder)
        except BaseException:
            with suppress(OSError):
                os.unlink(temporary)  # noqa: PTH108
            raise
        record = CopiedFile(path, len(data), version, xxhash.xxh3_128_hexdigest(data), verified)
        self.add(record)
        return record

    def check(self, path: str) -> None:
        """Raises ReadFailure for a name that cannot be a file of the copy, before anything is fetched."""
        self._folder_of(path)

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
        lines = [CopiedFile(path, FORGOTTEN, "", "", "").line() for path in paths]
        if lines:
            write_fully(self._manifest, b"\n" + b"".join(lines))
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
        """How many files the manifest lists, and their bytes."""
        return self._table.totals()

    def _append(self, batch: list[CopiedFile]) -> None:
        # It begins with a line break, which ends a line that a killed process may have left unfinished.
        write_fully(self._manifest, b"\n" + b"".join(record.line() for record in batch))

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

    def _rename(self, temporary: str, path: str, folder: str) -> None:
        try:
            os.rename(temporary, f"{self.folder}/{path}")  # noqa: PTH104
        except FileNotFoundError:
            # The folder was removed in the meantime.
            self._folders = {""}
            self._make_folder(folder, path)
            os.rename(temporary, f"{self.folder}/{path}")  # noqa: PTH104
        except (IsADirectoryError, NotADirectoryError):
            raise ReadFailure(path, "bad name", "the copy has a folder of this name") from None

    def _folder_of(self, path: str) -> str:
        check_name(path)
        folder = path.rpartition("/")[0]
        if folder not in self._folders:
            self._make_folder(folder, path)
        return folder

    def _make_folder(self, folder: str, path: str) -> None:
        below = ""
        for part in folder.split("/") if folder else []:
            below = f"{below}/{part}" if below else part
            if below in self._folders:
                continue
            with suppress(FileExistsError):
                os.mkdir(f"{self.folder}/{below}", 0o777)  # noqa: PTH102
            # A link could lead out of the copy.
            if not stat.S_ISDIR(os.lstat(f"{self.folder}/{below}").st_mode):
                raise ReadFailure(path, "bad name", f"{below} in the copy is not a folder")
            self._folders.add(below)

    def _is_empty(self) -> bool:
        manifest = Path(self.folder) / MANIFEST
        return not _strangers(self.folder) and (not manifest.exists() or manifest.stat().st_size == 0)

    def _check_or_begin(self) -> None:
        about = f"{self.folder}/{ABOUT}"
        known = _read_about(about)
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
            known = _read_about(about)
        wanted = {"format": FORMAT, "source": self.source}
        if known != wanted and not self.read_only and self._is_empty():
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
    known = _read_about(f"{os.path.realpath(folder)}/{ABOUT}")
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

    def finish(self, version: str = "", verified: str = "") -> CopiedFile:
        """Gives the file its name; raises ReadFailure if its length is wrong."""
        try:
            found = os.fstat(self._descriptor).st_size
            if found != self.size:
                raise ReadFailure(self.path, "short", f"{found} of {self.size} bytes")
            record = CopiedFile(self.path, found, version, xxhash.xxh3_128_hexdigest(self.mapped()), verified)
            self._copy._rename(self._temporary, self.path, self.path.rpartition("/")[0])
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


def write_fully(descriptor: int, data: bytes) -> None:
    """Writes all of it; in one call unless the file system takes only a part."""
    rest = memoryview(data)
    while len(rest):
        rest = rest[os.write(descriptor, rest) :]


def _find_syncfs() -> Any:
    with suppress(OSError, AttributeError):
        function = ctypes.CDLL(None, use_errno=True).syncfs
        function.argtypes = [ctypes.c_int]
        return function
    return None


_syncfs = _find_syncfs()


def _read_about(path: str) -> dict[str, Any] | None:
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
