"""Makes a lazy file system fetch its files before training needs them.

On Lustre behind an object store (FSx), files that are not there yet are found and restored by `lfs`, some thousand at a
time: more would overwhelm the metadata server. Where that does not work, and on other mounts, every file is read once.
Nothing is recorded: the file system knows what is there, so running again continues.
"""

from __future__ import annotations

import os
import stat
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from stoker.console import Advance, Say
from stoker.data.store.stores import is_url
from stoker.errors import UsageError, UserError
from stoker.machine.storage import mount_of
from stoker.stage.lustre import FileState, Lfs, LfsFailed, find_lfs
from stoker.stage.read_through import READERS, Allowance, read_through
from stoker.units import count

BATCH = 2000
"""Restores under way at once; between 1,000 and 5,000 the metadata server keeps up."""
STALL_S = 300.0
"""Without one restored file or byte."""
FIRST_LOOK_S, LONGEST_LOOK_S = 0.2, 5.0
"""Between two questions about the files under way: each asks the metadata server about all of them."""

Progress = Callable[[int, int, int, int], None]
"""progress(files, of_files, bytes, of_bytes)"""


@dataclass(frozen=True)
class FileList:
    """Regular files, as absolute paths: a name that begins with a dash would be an option of `lfs`."""

    paths: list[bytes]
    sizes: list[int]
    unreadable: dict[bytes, str]

    @property
    def bytes(self) -> int:
        return sum(self.sizes)


@dataclass(frozen=True)
class Hydrated:
    """The result of hydrating a folder."""

    path: str
    kind: str | None
    """The kind of file system: lustre, nfs4, fuse.gcsfuse …"""
    way: Literal["restore", "read", "restore, then read", "nothing to do"]
    files: int
    bytes: int
    released: int | None
    """Files that were not there before; None where the file system does not say."""
    restored: int
    read: int
    seconds: float
    failed: tuple[tuple[str, str], ...]
    """Names, and why each is still not there."""
    note: str | None = None
    """Why files were read instead of restored."""

    def as_dict(self) -> dict[str, Any]:
        """The document that `--json` prints."""
        return {
            "path": self.path,
            "kind": self.kind,
            "way": self.way,
            "files": self.files,
            "bytes": self.bytes,
            "released": self.released,
            "restored": self.restored,
            "read": self.read,
            "seconds": self.seconds,
            "failed": [{"path": name, "reason": reason} for name, reason in self.failed],
            "note": self.note,
        }


def hydrate(
    path: str | Path,
    files: FileList | None = None,
    *,
    limit_bytes_per_second: float | None = None,
    batch: int = BATCH,
    readers: int = READERS,
    stall_s: float = STALL_S,
    call_s: float | None = None,
    progress: Progress = lambda _files, _of_files, _bytes, _of_bytes: None,
    say: Say = lambda _text: None,
) -> Hydrated:
    """Fetches the content of every file below a path; files that are there already stay as they are.

    `files` is what `list_files` found, if it was called before.
    """
    began = time.monotonic()
    files = files or list_files(path)
    mount = mount_of(path)
    work = _Work(files, Allowance(limit_bytes_per_second), batch, readers, stall_s, progress, say)
    kind = None if mount is None else mount.kind
    done = Hydrated(str(path), kind, "read", len(files.paths), files.bytes, None, 0, 0, 0.0, ())
    program = find_lfs()
    try:
        if program is None:
            raise LfsFailed(
                "lfs is not installed" if kind == "lustre" else f"it is not Lustre, but {kind or 'unknown'}"
            )
        with Lfs(program) if call_s is None else Lfs(program, call_s=call_s) as lfs:
            done = _restore_all(work, lfs, done)
    except LfsFailed as error:
        done = replace(done, note=str(error))
        say(_why_reading(done))
        _read(work, range(len(files.paths)))
        done = replace(done, way="read", read=len(files.paths) - len(work.failed))
    failed = files.unreadable | work.failed
    named = tuple((os.fsdecode(name), failed[name]) for name in sorted(failed))
    return replace(done, failed=named, seconds=time.monotonic() - began)


def list_files(path: str | Path, advance: Advance = lambda _done, _total: None) -> FileList:
    """Every regular file below a folder, or the one file, links followed once."""
    if is_url(str(path)):
        raise UsageError(
            "hydrate-needs-a-mount",
            f"{path} is a URL; --hydrate fetches the files of a mounted file system",
            hint=f"stoker stage {path} /local/disk/NAME",
        )
    top = os.fsencode(os.path.abspath(path))  # noqa: PTH100 - bytes, whatever the name
    try:
        first = os.stat(top)  # noqa: PTH116
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise UserError("no-such-path", f"{path} cannot be opened: {reason}", hint=f"ls {Path(path).parent}") from None
    if stat.S_ISREG(first.st_mode):
        return FileList([top], [first.st_size], {})
    found = FileList([], [], {})
    folders, seen = [top], {(first.st_dev, first.st_ino)}
    linked: dict[bytes, int] = {}
    while folders:
        folder = folders.pop()
        advance(len(found.paths), None)
        try:
            with os.scandir(folder) as entries:
                for entry in entries:
                    _sort_in(entry, folders, seen, found, linked)
        except OSError as error:
            found.unreadable[folder] = error.strerror or str(error)
    if linked:  # most of them usually lead to files that were found anyway
        for target in linked.keys() - set(found.paths):
            found.paths.append(target)
            found.sizes.append(linked[target])
    if not found.paths:
        raise UserError(
            "nothing-to-hydrate", f"{path} holds no files", why="there is nothing to fetch", hint=f"ls {path}"
        )
    return found


def _sort_in(
    entry: os.DirEntry[bytes],
    folders: list[bytes],
    seen: set[tuple[int, int]],
    found: FileList,
    linked: dict[bytes, int],
) -> None:
    try:
        about = entry.stat()
    except OSError as error:
        found.unreadable[entry.path] = error.strerror or str(error)
        return
    if stat.S_ISDIR(about.st_mode):
        # A link back up would never end.
        if (mark := (about.st_dev, about.st_ino)) not in seen:
            seen.add(mark)
            folders.append(entry.path)
    elif stat.S_ISREG(about.st_mode) and entry.is_symlink():
        linked[os.path.realpath(entry.path)] = about.st_size  # `lfs` refuses links
    elif stat.S_ISREG(about.st_mode):
        found.paths.append(entry.path)
        found.sizes.append(about.st_size)


@dataclass
class _Work:
    """What is being done, for all ways of doing it."""

    files: FileList
    allowance: Allowance
    batch: int
    readers: int
    stall_s: float
    progress: Progress
    say: Say
    done_files: int = 0
    done_bytes: int = 0
    of_files: int = 0
    of_bytes: int = 0
    failed: dict[bytes, str] = field(default_factory=dict)

    def begin(self, numbers: Sequence[int]) -> None:
        self.of_files, self.of_bytes = len(numbers), sum(self.files.sizes[number] for number in numbers)
        self.show()

    def finish(self, number: int, reason: str | None = None) -> None:
        self.done_files += 1
        self.done_bytes += self.files.sizes[number]
        if reason is not None:
            self.failed[self.files.paths[number]] = reason

    def show(self, files: int = 0, size: int = 0) -> None:
        self.progress(self.done_files + files, self.of_files, self.done_bytes + size, self.of_bytes)


class _Stalled(Exception):
    """Restores that were asked for do not arrive."""


def _restore_all(work: _Work, lfs: Lfs, done: Hydrated) -> Hydrated:
    """Restores what is released; reads it where that stalls. Raises LfsFailed if `lfs` is of no use from the start."""
    paths = work.files.paths
    lfs.states(paths[:1])  # one file tells whether this is Lustre, before we ask about a million
    work.say(f"asking lfs about {count(len(paths), 'file')}")
    states = lfs.states(paths)
    released = [number for number, state in enumerate(states) if state.released and not state.lost]
    for path, state in zip(paths, states, strict=True):
        if state.lost:
            work.failed[path] = "lost from the archive, too"
        elif state.problem is not None:
            work.failed[path] = state.problem
    done = replace(done, released=sum(state.released for state in states))
    if not released:
        return replace(done, way="nothing to do")
    work.say(f"{count(len(released), 'file')} of {len(paths):,} not there yet; asking for {work.batch:,} at a time")
    work.begin(released)
    restore = _Restoring(work, lfs, deque(released))
    try:
        restore.run()
        return replace(done, way="restore", restored=restore.restored)
    except (LfsFailed, _Stalled) as error:
        left = restore.left
        note = str(error)
        work.say(f"{note}; reading the remaining {count(len(left), 'file')} instead")
        refused = set(work.failed)
        _read(work, left)
        still = _still_released(work, lfs, left)
        unread = len([name for name in work.failed if name not in refused])
        way: Literal["read", "restore, then read"] = "restore, then read" if restore.restored else "read"
        return replace(done, way=way, restored=restore.restored, read=len(left) - unread - still, note=note)


class _Restoring:
    """Keeps some thousand restores under way until none is left."""

    def __init__(self, work: _Work, lfs: Lfs, waiting: deque[int]) -> None:
        self._work, self._lfs, self._waiting = work, lfs, waiting
        self._under_way: dict[int, None] = {}
        self.restored = 0

    @property
    def left(self) -> list[int]:
        return [*self._under_way, *self._waiting]

    def run(self) -> None:
        """Raises _Stalled if nothing arrives, even after asking again."""
        work, look_s = self._work, min(FIRST_LOOK_S, self._work.stall_s / 4)
        pause_s, since, asked_again = look_s, time.monotonic(), False
        while self._under_way or self._waiting:
            if len(self._under_way) <= work.batch // 2:
                self._ask_for_more()
            time.sleep(pause_s)
            if self._look() or not self._under_way:
                pause_s, since, asked_again = look_s, time.monotonic(), False
                continue
            pause_s = min(LONGEST_LOOK_S, 2 * pause_s, work.stall_s / 4)
            if time.monotonic() - since < work.stall_s:
                continue
            late = f"nothing was restored for {work.stall_s:.0f} s"
            if asked_again:
                raise _Stalled(late)
            work.say(f"{late}; asking for {count(len(self._under_way), 'file')} again")
            self._ask(list(self._under_way))
            since, asked_again = time.monotonic(), True

    def _ask_for_more(self) -> None:
        work, more = self._work, list[int]()
        while self._waiting and len(self._under_way) + len(more) < work.batch:
            size = work.files.sizes[self._waiting[0]]
            more.append(self._waiting.popleft())
            if (wait_s := work.allowance.reserve(size)) > 0:
                # With a limit on the rate, what was allowed so far is asked for before the next wait.
                self._under_way |= dict.fromkeys(more)
                self._ask(more)
                time.sleep(min(wait_s, LONGEST_LOOK_S))
                return
        self._under_way |= dict.fromkeys(more)
        self._ask(more)

    def _ask(self, numbers: list[int]) -> None:
        by_path = {self._work.files.paths[number]: number for number in numbers}
        for path, reason in self._lfs.restore(list(by_path)).items():
            self._under_way.pop(by_path[path], None)
            self._work.finish(by_path[path], reason)

    def _look(self) -> bool:
        """Whether anything has arrived since the last look."""
        numbers = list(self._under_way)
        arrived = False
        for number, state in zip(numbers, self._states(numbers), strict=True):
            if state.released and not state.lost:
                continue
            del self._under_way[number]
            arrived = True
            reason = "lost from the archive, too" if state.lost else state.problem
            self.restored += reason is None
            self._work.finish(number, reason)
        self._work.show()
        return arrived

    def _states(self, numbers: list[int]) -> list[FileState]:
        return self._lfs.states([self._work.files.paths[number] for number in numbers])


def _read(work: _Work, numbers: Sequence[int]) -> None:
    if not work.of_files:
        work.begin(numbers)
    work.failed |= read_through(
        [work.files.paths[number] for number in numbers], work.allowance, readers=work.readers, stall_s=work.stall_s,
        progress=work.show,
    )  # fmt: skip


def _still_released(work: _Work, lfs: Lfs, numbers: Sequence[int]) -> int:
    """Adds files that were read and are still not there, as far as `lfs` can say; returns how many."""
    paths = [work.files.paths[number] for number in numbers if work.files.paths[number] not in work.failed]
    try:
        states = lfs.states(paths)
    except LfsFailed:
        return 0
    still = [path for path, state in zip(paths, states, strict=True) if state.released]
    work.failed |= dict.fromkeys(still, "still released after it was read")
    return len(still)


def _why_reading(done: Hydrated) -> str:
    text = f"{done.path} cannot be restored by lfs ({done.note}), so every file is read once"
    if done.kind == "lustre":
        return f"{text}; reading fetches what is not there. With more rights: sudo stoker stage --hydrate {done.path}"
    if done.kind is not None and done.kind.startswith("fuse"):
        return (
            f"{text}. That fills the mount's own cache, if it has one (mountpoint-s3 --cache, gcsfuse's file cache); "
            f"without one, `stoker stage {done.path} /local/disk/NAME` is the way"
        )
    return text
