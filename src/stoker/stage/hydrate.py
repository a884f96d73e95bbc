"""Makes a lazy file system fetch its files before training needs them.

On Lustre behind an object store (FSx), a released file has a name and a size, and its content stays in S3 until
somebody restores or reads it. Lustre's own tool, `lfs`, finds such files and restores them, some thousand at a time:
more would overwhelm the metadata server. Where that does not work, and on other mounts, every file is read once.
Nothing is recorded: the file system knows what is there, so running again continues.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import stat
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

from stoker.core.console import Advance, Say, Transfer
from stoker.core.errors import UsageError, UserError
from stoker.core.units import count, size_text
from stoker.io.stores import is_url
from stoker.profile.mounts import mount_of
from stoker.stage.concurrency import RateLimit
from stoker.stage.transfer import failure_lines

FIRST_LOOK_S, LONGEST_LOOK_S = 0.2, 5.0
"""Time between two queries about the files under way: each asks the metadata server about all of them."""
CHUNK = 1 << 20
TICK_S = 0.1


@dataclass(frozen=True)
class FileList:
    """Regular files, as absolute paths: a name that begins with a dash would be an option of `lfs`."""

    sizes: dict[bytes, int]
    unreadable: dict[bytes, str]


@dataclass(frozen=True)
class HydrateOptions:
    """How to fetch."""

    limit_rate: float | None = None
    """Bytes per second; None for no limit."""
    batch: int = 2000
    """Restores under way at once; between 1,000 and 5,000 the metadata server keeps up."""
    readers: int = 32
    stall_s: float = 300.0
    """Longest time without a restored file or byte."""
    call_s: float = 60.0
    """Time limit for one call of `lfs`, which only asks the metadata server."""


@dataclass
class Hydrated:
    """The result of hydrating a folder, or how far it is."""

    path: str
    kind: str | None
    """The kind of file system: lustre, nfs4, fuse.gcsfuse …"""
    way: Literal["restore", "read", "restore, then read", "nothing to do"] = "nothing to do"
    files: int = 0
    bytes: int = 0
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
        return asdict(self) | {"failed": [{"path": name, "reason": reason} for name, reason in self.failed]}


def hydrate(
    path: str | Path,
    files: FileList | None = None,
    how: HydrateOptions = HydrateOptions(),  # noqa: B008
    *,
    progress: Transfer = lambda _files, _of_files, _bytes, _of_bytes: None,
    say: Say = lambda _text: None,
) -> Hydrated:
    """Fetches the content of every file below a path; files that are there already stay as they are.

    `files` is what `list_files` found, if it was called before.
    """
    began = time.monotonic()
    files = files or list_files(path)
    mount = mount_of(path)
    done = Hydrated(
        str(path), None if mount is None else mount.kind, files=len(files.sizes), bytes=sum(files.sizes.values())
    )
    work = _Work(done, files.sizes, how, RateLimit(how.limit_rate), progress, say)
    try:
        work.restore_released(Lfs(done.kind, how.call_s))
    except LfsFailed as error:
        done.note = str(error)
        work.read_instead()
        done.way = "restore, then read" if done.restored else "read"
    failed = files.unreadable | work.failed
    done.failed = tuple((os.fsdecode(name), failed[name]) for name in sorted(failed))
    done.seconds = time.monotonic() - began
    return done


def list_files(path: str | Path, advance: Advance = lambda _done, _total: None) -> FileList:
    """Every regular file below a folder, or the one file, links followed once."""
    if is_url(str(path)):
        raise UsageError(
            "hydrate-needs-a-mount",
            f"{path} is a URL; --hydrate fetches the files of a mounted file system",
            hint=f"stoker stage {path} /local/disk/NAME",
        )
    top = os.fsencode(os.path.abspath(path))  # noqa: PTH100 - bytes, whatever the name
    found, seen = FileList({}, {}), set[tuple[int, int]]()
    waiting = [(top, False)]
    while waiting:
        place, is_link = waiting.pop()
        try:
            about = os.stat(place)  # noqa: PTH116
            if stat.S_ISREG(about.st_mode):
                # `lfs` refuses links; most of them lead to files that are found anyway.
                found.sizes[os.path.realpath(place) if is_link else place] = about.st_size
            # A link back up would never end.
            elif stat.S_ISDIR(about.st_mode) and (mark := (about.st_dev, about.st_ino)) not in seen:
                seen.add(mark)
                advance(len(found.sizes), None)
                waiting += [(entry.path, entry.is_symlink()) for entry in os.scandir(place)]
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            if place == top:
                hint = f"ls {Path(path).parent}"
                raise UserError("no-such-path", f"{path} cannot be opened: {reason}", hint=hint) from None
            found.unreadable[place] = reason
    if not found.sizes:
        raise UserError(
            "nothing-to-hydrate", f"{path} holds no files", why="there is nothing to fetch", hint=f"ls {path}"
        )
    return found


@dataclass
class _Work:
    """The work in progress, for both ways of doing it."""

    done: Hydrated
    sizes: dict[bytes, int]
    how: HydrateOptions
    rate: RateLimit
    progress: Transfer
    say: Say
    failed: dict[bytes, str] = field(default_factory=dict)
    waiting: deque[bytes] = field(default_factory=deque)
    under_way: dict[bytes, None] = field(default_factory=dict)
    ended: tuple[int, int] = (0, 0)
    """Files and bytes."""
    of: tuple[int, int] = (0, 0)

    def restore_released(self, lfs: Lfs) -> None:
        """Raises LfsFailed if `lfs` does not work, or nothing arrives even after asking again."""
        paths = list(self.sizes)
        lfs.ask("hsm_state", paths[:1])  # one file shows whether this is Lustre, before we ask about a million
        self.say(f"asking lfs about {count(len(paths), 'file')}")
        states = lfs.ask("hsm_state", paths)
        self.failed |= {path: state.problem for path, state in states.items() if state.problem is not None}
        self.done.released = sum(state.released for state in states.values())
        self.waiting.extend(path for path, state in states.items() if state.released and state.problem is None)
        if not self.waiting:
            return
        left = count(len(self.waiting), "file")
        self.say(f"{left} of {len(paths):,} not there yet; asking for {self.how.batch:,} at a time")
        self.done.way, self.of = "restore", (len(self.waiting), sum(self.sizes[path] for path in self.waiting))
        self._show()
        look_s = min(FIRST_LOOK_S, self.how.stall_s / 4)
        pause_s, since, asked_again = look_s, time.monotonic(), False
        while self.under_way or self.waiting:
            if len(self.under_way) <= self.how.batch // 2:
                more: list[bytes] = []
                while self.waiting and len(self.under_way) + len(more) < self.how.batch and not self.rate.wait_s():
                    self.rate.take(self.sizes[self.waiting[0]])
                    more.append(self.waiting.popleft())
                self._restore(lfs, more)
            time.sleep(pause_s)
            if self._note(lfs.ask("hsm_state", list(self.under_way))) or not self.under_way:
                pause_s, since, asked_again = look_s, time.monotonic(), False
                continue
            pause_s = min(LONGEST_LOOK_S, 2 * pause_s, self.how.stall_s / 4)
            if time.monotonic() - since >= self.how.stall_s:
                late = f"nothing was restored for {self.how.stall_s:.0f} s"
                if asked_again:
                    raise LfsFailed(late)
                self.say(f"{late}; asking for {count(len(self.under_way), 'file')} again")
                self._restore(lfs, list(self.under_way))
                since, asked_again = time.monotonic(), True

    def read_instead(self) -> None:
        """Reads what was not restored: the rest, or everything where `lfs` is of no use."""
        left = [*self.under_way, *self.waiting]
        if self.done.way == "restore":
            self.say(f"{self.done.note}; reading the remaining {count(len(left), 'file')} instead")
        else:
            self.say(_why_reading(self.done))
            left, self.of = list(self.sizes), (self.done.files, self.done.bytes)
        unread = read_through(left, self.rate, self._show, readers=self.how.readers, stall_s=self.how.stall_s)
        self.failed |= unread
        self.done.read = len(left) - len(unread)

    def _show(self, files: int = 0, size: int = 0) -> None:
        self.progress(self.ended[0] + files, self.of[0], self.ended[1] + size, self.of[1])

    def _restore(self, lfs: Lfs, paths: Sequence[bytes]) -> None:
        self.under_way |= dict.fromkeys(paths)
        self._note(lfs.ask("hsm_restore", paths))

    def _note(self, states: dict[bytes, FileState]) -> bool:
        """Whether some of these files have ended: they are there now, or cannot be restored."""
        ended = [path for path, state in states.items() if not state.released or state.problem is not None]
        for path in ended:
            del self.under_way[path]
            self.ended = self.ended[0] + 1, self.ended[1] + self.sizes[path]
            if (problem := states[path].problem) is not None:
                self.failed[path] = problem
            else:
                self.done.restored += 1
        self._show()
        return bool(ended)


def read_through(
    paths: Sequence[bytes], rate: RateLimit, progress: Callable[[int, int], None], *, readers: int, stall_s: float
) -> dict[bytes, str]:
    """Reads every file once and throws the bytes away; returns those that could not be read, with the reason.

    `progress` gets the files and bytes read so far. When not a byte arrives for `stall_s`, the rest counts as not read.
    """
    waiting, ended, read = deque(paths), dict[bytes, str | None](), 0
    lock, stop = threading.Lock(), threading.Event()
    # The slower the storage, the smaller the reads, so that no thread waits for longer than a second.
    chunk = CHUNK if not rate.bytes_per_second else min(CHUNK, max(4096, int(rate.bytes_per_second / readers)))

    def read_file(path: bytes, buffer: bytearray) -> None:
        nonlocal read
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
                    read += size

    def work() -> None:
        buffer = bytearray(chunk)
        with suppress(IndexError):  # no file is left
            while not stop.is_set():
                path = waiting.popleft()
                try:
                    read_file(path, buffer)
                    ended[path] = None
                except OSError as error:
                    ended[path] = error.strerror or str(error)

    for _ in range(min(readers, len(paths))):
        # Daemons: a read that a dead server never answers must not keep the program from ending.
        threading.Thread(target=work, daemon=True).start()
    before, since = (-1, -1), time.monotonic()
    try:
        while before[0] < len(paths) and time.monotonic() - since <= stall_s:
            if before[0] >= 0:
                time.sleep(TICK_S)
            now = len(ended), read
            progress(*now)
            if now != before:
                before, since = now, time.monotonic()
        found = {path: ended.get(path, f"not a byte for {stall_s:.0f} s") for path in paths}
    finally:
        stop.set()
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


def hydrated_text(done: Hydrated) -> str:
    """What `--hydrate` did, failures last."""
    lines = []
    if done.released is not None:
        lines.append(f"present   {count(done.files - done.released, 'file')} already there")
    if done.restored:
        lines.append(f"restored  {count(done.restored, 'file')} by lfs")
    if done.read:
        lines.append(f"read      {count(done.read, 'file')} from beginning to end")
    if done.failed:
        lines += [f"failed    {count(len(done.failed), 'file')}:", *failure_lines(done.failed, "  ")]
    state = "not all there; run the same command again" if done.failed else "all there"
    lines.append(
        f"{done.path} ({done.kind or 'unknown file system'}): {state}: {count(done.files, 'file')}, "
        f"{size_text(done.bytes)} in {done.seconds:.1f} s"
    )
    return "\n".join(lines)


# Lustre's `lfs`.

RELEASED, LOST = 0x04, 0x40
"""Flags of a file's state, as lustre_user.h numbers them."""
CALLS_AT_ONCE = 8
STATES_PER_CALL = 500
RESTORES_PER_CALL = 50
"""Older clients refuse a request above a third of 5 KB, and a file takes 32 bytes of it."""
MOST_FAILURES = 20
"""Consecutive single files that fail: then `lfs` is at fault, not the files."""
_STATE = re.compile(rb": \(0x([0-9a-fA-F]+)\)[^\n]*\n")
_USELESS = re.compile(r"ioctl|request.*(not permitted|Permission denied)", re.IGNORECASE)
"""What it says where it works for no file: this is not Lustre, or we may not restore."""


class LfsFailed(Exception):
    """`lfs` does not work here, or not any more; the text says why."""


class FileState(NamedTuple):
    """What `lfs hsm_state` says about one file."""

    released: bool
    problem: str | None = None
    """Why it cannot be restored, or its state is not known."""


@dataclass(frozen=True)
class Lfs:
    """The program, run for some files at a time."""

    kind: str | None
    """The kind of file system, for the error where there is no such program."""
    call_s: float

    def ask(self, action: Literal["hsm_state", "hsm_restore"], paths: Sequence[bytes]) -> dict[bytes, FileState]:
        """The state of each file, or whether it may be restored; what is restored arrives later. Raises LfsFailed if
        that works for no file."""
        most = STATES_PER_CALL if action == "hsm_state" else RESTORES_PER_CALL
        found: dict[bytes, FileState] = {}
        with ThreadPoolExecutor(CALLS_AT_ONCE, thread_name_prefix="lfs") as pool:
            calls = (paths[begin : begin + most] for begin in range(0, len(paths), most))
            for answers in pool.map(lambda some: self._answers(action, some), calls):
                found |= answers
        return found

    def _answers(self, action: str, paths: Sequence[bytes]) -> dict[bytes, FileState]:
        """One missing file makes the whole call fail: halving finds it, and the others are answered."""
        found: dict[bytes, FileState] = {}
        waiting, in_a_row = [paths], 0
        while waiting:
            some = waiting.pop()
            code, out, said = self._call(action, some)
            asked = [FileState(True)] * len(some) if code == 0 else []
            known = _parse_states(out, some) if action == "hsm_state" else asked
            if len(known) == len(some):
                found |= zip(some, known, strict=True)
                in_a_row = 0
            elif code == 0:
                raise LfsFailed(f"the output of lfs {action} was not understood: {out[:80]!r}")
            elif len(some) > 1 and not _USELESS.search(said):
                waiting += [some[len(some) // 2 :], some[: len(some) // 2]]
            else:
                found[some[0]] = FileState(False, said)
                in_a_row += 1
                if _USELESS.search(said) or in_a_row >= MOST_FAILURES:
                    raise LfsFailed(f"lfs {action}: {said}")
        return found

    def _call(self, action: str, paths: Sequence[bytes]) -> tuple[int, bytes, str]:
        """Exit code, output, and the last line of its errors."""
        program = shutil.which("lfs")
        if program is None:
            not_lustre = f"it is not Lustre, but {self.kind or 'unknown'}"
            raise LfsFailed("lfs is not installed" if self.kind == "lustre" else not_lustre)
        try:
            # A session of its own, because we handle Ctrl-C: a call that it ended would count as a failure of `lfs`.
            ended = subprocess.run(
                [program, action, *paths], stdin=subprocess.DEVNULL, capture_output=True, timeout=self.call_s,
                env=os.environ | {"LC_ALL": "C"}, start_new_session=True,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            raise LfsFailed(f"lfs {action} did not answer in {self.call_s:.0f} s") from None
        except OSError as error:
            if error.errno == errno.E2BIG and len(paths) > 1:  # the names fill more than the kernel's limit
                return error.errno, b"", str(error)
            raise LfsFailed(f"{program} cannot be run: {error.strerror or error}") from None
        lines = ended.stderr.decode(errors="backslashreplace").strip().splitlines()
        return ended.returncode, ended.stdout, lines[-1] if lines else f"exit code {ended.returncode}"


def _parse_states(output: bytes, asked: Sequence[bytes]) -> list[FileState]:
    """The states in the output of `lfs hsm_state` for these files, as far as it goes.

    Names are matched in the order in which they were asked for, so a name may contain anything, even a line break.
    """
    found: list[FileState] = []
    at = 0
    for path in asked:
        match = _STATE.match(output, at + len(path)) if output.startswith(path, at) else None
        if match is None:
            break
        flags = int(match[1], 16)
        found.append(FileState(bool(flags & RELEASED), "lost from the archive, too" if flags & LOST else None))
        at = match.end()
    return found
