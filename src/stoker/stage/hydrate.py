"""Makes a lazy file system fetch its files before training needs them.

On Lustre behind an object store (FSx), files that are not there yet are found and restored by `lfs`, some thousand at a
time: more would overwhelm the metadata server. Where that does not work, and on other mounts, every file is read once.
Nothing is recorded: the file system knows what is there, so running again continues.
"""

from __future__ import annotations

import os
import shutil
import stat
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from stoker.core.console import Advance, Say
from stoker.core.errors import UsageError, UserError
from stoker.core.units import count
from stoker.io.storage_speed import mount_of
from stoker.io.stores import is_url
from stoker.stage.concurrency import RateLimit
from stoker.stage.lustre import CALL_S, Lfs, LfsFailed

BATCH = 2000
"""Restores under way at once; between 1,000 and 5,000 the metadata server keeps up."""
STALL_S = 300.0
"""Longest time without a restored file or byte."""
FIRST_LOOK_S, LONGEST_LOOK_S = 0.2, 5.0
"""Time between two queries about the files under way: each asks the metadata server about all of them."""
READERS = 32
CHUNK = 1 << 20
TICK_S = 0.1

Progress = Callable[[int, int, int, int], None]
"""progress(files, of_files, bytes, of_bytes)"""


@dataclass(frozen=True)
class FileList:
    """Regular files, as absolute paths: a name that begins with a dash would be an option of `lfs`."""

    sizes: dict[bytes, int]
    unreadable: dict[bytes, str]


@dataclass(frozen=True)
class Hydrated:
    """The result of hydrating a folder."""

    path: str
    kind: str | None
    """The kind of file system: lustre, nfs4, fuse.gcsfuse …"""
    way: Literal["restore", "read", "restore, then read", "nothing to do"]
    files: int
    bytes: int
    released: int | None = None
    """Files that were not there before; None where the file system does not say."""
    restored: int = 0
    read: int = 0
    seconds: float = 0.0
    failed: tuple[tuple[str, str], ...] = ()
    """Names, and why each is still not there."""
    note: str | None = None
    """Why files were read instead of restored."""

    def as_dict(self) -> dict[str, Any]:
        """The document that `--json` prints."""
        return asdict(self) | {"failed": [{"path": name, "reason": reason} for name, reason in self.failed]}


def hydrate(
    path: str | Path,
    files: FileList | None = None,
    *,
    limit_bytes_per_second: float | None = None,
    batch: int = BATCH,
    readers: int = READERS,
    stall_s: float = STALL_S,
    call_s: float = CALL_S,
    progress: Progress = lambda _files, _of_files, _bytes, _of_bytes: None,
    say: Say = lambda _text: None,
) -> Hydrated:
    """Fetches the content of every file below a path; files that are there already stay as they are.

    `files` is what `list_files` found, if it was called before.
    """
    began = time.monotonic()
    files = files or list_files(path)
    mount = mount_of(path)
    kind = None if mount is None else mount.kind
    work = _Work(files.sizes, RateLimit(limit_bytes_per_second), batch, readers, stall_s, progress, say)
    done = Hydrated(str(path), kind, "read", len(files.sizes), sum(files.sizes.values()))
    program = shutil.which("lfs")
    try:
        if program is None:
            raise LfsFailed(
                "lfs is not installed" if kind == "lustre" else f"it is not Lustre, but {kind or 'unknown'}"
            )
        with Lfs(program, call_s) as lfs:
            done = _restore_all(work, lfs, done)
    except LfsFailed as error:
        done = replace(done, note=str(error))
        say(_why_reading(done))
        work.read(list(files.sizes))
        done = replace(done, read=len(files.sizes) - len(work.failed))
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
        return FileList({top: first.st_size}, {})
    found = FileList({}, {})
    folders, seen = [top], {(first.st_dev, first.st_ino)}
    while folders:
        folder = folders.pop()
        advance(len(found.sizes), None)
        try:
            entries = list(os.scandir(folder))
        except OSError as error:
            found.unreadable[folder] = error.strerror or str(error)
            continue
        for entry in entries:
            try:
                about = entry.stat()
            except OSError as error:
                found.unreadable[entry.path] = error.strerror or str(error)
                continue
            if stat.S_ISREG(about.st_mode):
                # `lfs` refuses links; most of them lead to files that are found anyway.
                place = os.path.realpath(entry.path) if entry.is_symlink() else entry.path
                found.sizes[place] = about.st_size
            # A link back up would never end.
            elif stat.S_ISDIR(about.st_mode) and (mark := (about.st_dev, about.st_ino)) not in seen:
                seen.add(mark)
                folders.append(entry.path)
    if not found.sizes:
        raise UserError(
            "nothing-to-hydrate", f"{path} holds no files", why="there is nothing to fetch", hint=f"ls {path}"
        )
    return found


class _Stalled(Exception):
    """Requested restores do not arrive."""


def _restore_all(work: _Work, lfs: Lfs, done: Hydrated) -> Hydrated:
    """Restores released files; reads them if that stalls. Raises LfsFailed if `lfs` does not work from the start."""
    paths = list(work.sizes)
    lfs.states(paths[:1])  # one file shows whether this is Lustre, before we ask about a million
    work.say(f"asking lfs about {count(len(paths), 'file')}")
    states = dict(zip(paths, lfs.states(paths), strict=True))
    work.failed |= {path: state.problem for path, state in states.items() if state.problem is not None}
    done = replace(done, released=sum(state.released for state in states.values()))
    released = [path for path, state in states.items() if state.released and state.problem is None]
    if not released:
        return replace(done, way="nothing to do")
    work.say(f"{count(len(released), 'file')} of {len(paths):,} not there yet; asking for {work.batch:,} at a time")
    try:
        work.restore(lfs, released)
        return replace(done, way="restore", restored=work.restored)
    except (LfsFailed, _Stalled) as error:
        left = [*work.under_way, *work.waiting]
        work.say(f"{error}; reading the remaining {count(len(left), 'file')} instead")
        work.read(left)
        read = [path for path in left if path not in work.failed]
        still = _still_released(lfs, read)
        work.failed |= dict.fromkeys(still, "still released after it was read")
        way: Literal["read", "restore, then read"] = "restore, then read" if work.restored else "read"
        return replace(done, way=way, restored=work.restored, read=len(read) - len(still), note=str(error))


@dataclass
class _Work:
    """The work in progress, for both ways of doing it."""

    sizes: dict[bytes, int]
    rate: RateLimit
    batch: int
    readers: int
    stall_s: float
    progress: Progress
    say: Say
    failed: dict[bytes, str] = field(default_factory=dict)
    waiting: deque[bytes] = field(default_factory=deque)
    under_way: dict[bytes, None] = field(default_factory=dict)
    restored: int = 0
    done: tuple[int, int] = (0, 0)
    """Files and bytes."""
    of: tuple[int, int] | None = None

    def begin(self, paths: Sequence[bytes]) -> None:
        self.of = self.of or (len(paths), sum(self.sizes[path] for path in paths))
        self.show()

    def show(self, files: int = 0, size: int = 0) -> None:
        assert self.of is not None
        self.progress(self.done[0] + files, self.of[0], self.done[1] + size, self.of[1])

    def read(self, paths: Sequence[bytes]) -> None:
        self.begin(paths)
        self.failed |= read_through(paths, self.rate, readers=self.readers, stall_s=self.stall_s, progress=self.show)

    def restore(self, lfs: Lfs, released: Sequence[bytes]) -> None:
        """Keeps some thousand restores under way; raises _Stalled if nothing arrives, even after asking again."""
        self.begin(released)
        self.waiting.extend(released)
        look_s = min(FIRST_LOOK_S, self.stall_s / 4)
        pause_s, since, asked_again = look_s, time.monotonic(), False
        while self.under_way or self.waiting:
            if len(self.under_way) <= self.batch // 2:
                more: list[bytes] = []
                while self.waiting and len(self.under_way) + len(more) < self.batch and not self.rate.wait_s():
                    self.rate.take(self.sizes[self.waiting[0]])
                    more.append(self.waiting.popleft())
                self._ask(lfs, more)
            time.sleep(pause_s)
            if self._look(lfs) or not self.under_way:
                pause_s, since, asked_again = look_s, time.monotonic(), False
                continue
            pause_s = min(LONGEST_LOOK_S, 2 * pause_s, self.stall_s / 4)
            if time.monotonic() - since < self.stall_s:
                continue
            late = f"nothing was restored for {self.stall_s:.0f} s"
            if asked_again:
                raise _Stalled(late)
            self.say(f"{late}; asking for {count(len(self.under_way), 'file')} again")
            self._ask(lfs, list(self.under_way))
            since, asked_again = time.monotonic(), True

    def _ask(self, lfs: Lfs, paths: Sequence[bytes]) -> None:
        self.under_way |= dict.fromkeys(paths)
        for path, reason in lfs.restore(paths).items():
            self._ended(path, reason)

    def _look(self, lfs: Lfs) -> bool:
        """Whether anything has arrived since the last look."""
        paths = list(self.under_way)
        arrived = False
        for path, state in zip(paths, lfs.states(paths), strict=True):
            if not state.released or state.problem is not None:
                self._ended(path, state.problem)
                self.restored += state.problem is None
                arrived = True
        self.show()
        return arrived

    def _ended(self, path: bytes, reason: str | None) -> None:
        del self.under_way[path]
        self.done = self.done[0] + 1, self.done[1] + self.sizes[path]
        if reason is not None:
            self.failed[path] = reason


def _still_released(lfs: Lfs, paths: Sequence[bytes]) -> list[bytes]:
    """Those that are still not there, as far as `lfs` can say."""
    try:
        return [path for path, state in zip(paths, lfs.states(paths), strict=True) if state.released]
    except LfsFailed:
        return []


def read_through(
    paths: Sequence[bytes],
    rate: RateLimit,
    *,
    readers: int = READERS,
    stall_s: float,
    progress: Callable[[int, int], None],
) -> dict[bytes, str]:
    """Reads every file once and throws the bytes away; returns those that could not be read, with the reason.

    `progress` gets the files and bytes read so far. When not a byte arrives for `stall_s`, the rest counts as not read.
    """
    waiting, ended, read = deque(paths), dict[bytes, str | None](), [0]
    lock, stop = threading.Lock(), threading.Event()
    # The slower the storage, the smaller the reads, so that no thread waits for longer than a second.
    chunk = CHUNK if not rate.bytes_per_second else min(CHUNK, max(4096, int(rate.bytes_per_second / READERS)))

    def read_file(path: bytes, buffer: bytearray) -> None:
        with open(path, "rb", buffering=0) as file:  # noqa: PTH123 - bytes
            left = os.fstat(file.fileno()).st_size
            while left > 0:
                with lock:
                    wait_s = rate.wait_s()
                    rate.take(min(left, chunk))
                if stop.wait(wait_s) or not (size := file.readinto(buffer)):
                    return  # 0 bytes: it has become shorter
                left -= size
                with lock:
                    read[0] += size

    def work() -> None:
        buffer = bytearray(chunk)
        while not stop.is_set():
            with lock:
                if not waiting:
                    return
                path = waiting.popleft()
            reason = None
            try:
                read_file(path, buffer)
            except OSError as error:
                reason = error.strerror or str(error)
            with lock:
                ended[path] = reason

    for _ in range(min(readers, len(paths))):
        # Daemons: a read that a dead server never answers must not keep the program from ending.
        threading.Thread(target=work, daemon=True).start()
    before, since = (-1, -1), time.monotonic()
    try:
        while True:
            with lock:
                now = len(ended), read[0]
            progress(*now)
            if now != before:
                before, since = now, time.monotonic()
            if now[0] == len(paths) or time.monotonic() - since > stall_s:
                break
            time.sleep(TICK_S)
    finally:
        stop.set()
    with lock:
        found = {path: ended.get(path, f"not a byte for {stall_s:.0f} s") for path in paths}
    return {path: reason for path, reason in found.items() if reason is not None}


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
