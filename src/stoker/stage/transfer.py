"""Copies files of a source into a local copy: each is read whole or in parts, checked, and written.

Threads do that and report to the main one, which decides how many are at work, counts, and ends the run if the disk
becomes full. For S3 the main thread also reads and writes (`s3_loop`); then other threads only check large files.
"""

from __future__ import annotations

import errno
import shutil
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any

from stoker.core.console import shown
from stoker.core.errors import UserError
from stoker.core.units import count, size_text
from stoker.io.copy_manifest import CopiedFile
from stoker.io.local_copy import LocalCopy, PartialFile
from stoker.io.stores import ReadFailure
from stoker.stage.concurrency import Concurrency, RateLimit
from stoker.stage.sources import Content, ReadLoop, Source, SourceFile

PART_BYTES = 8 << 20
MOST_BYTES = 1 << 30
"""Size of all reads in flight, which are in memory."""
CHECKSUM_TRIES = 4
"""How often a file in parts is copied again if its bytes do not agree with the source's checksum."""
BAD_CHECKSUM = "the bytes do not agree with the store's checksum"
COMMIT_EVERY_S = 2.0
TICK_S = 0.25
FINISHING_THREADS = 2
# Space left free on the target's disk: other programs write there, too.
MARGIN_SHARE = 0.02
MOST_MARGIN_BYTES = 1_000_000_000
FAILURES_NAMED = 20
CHECKSUMS = {"md5": "MD5", "sha1": "SHA-1", "sha256": "SHA-256"}


@dataclass(frozen=True)
class StageOptions:
    """How to copy."""

    limit_rate: int | None = None
    """Bytes per second; None for no limit."""
    concurrency: int | None = None
    """Requests in flight; None to find it while running."""


@dataclass
class Summary:
    """What a run has done."""

    source: str
    target: str
    files: int = 0
    """Files that the copy should have."""
    bytes: int = 0
    copied_files: int = 0
    copied_bytes: int = 0
    present_files: int = 0
    """Files that were there already, unchanged at the source."""
    verified: Counter[str] = field(default_factory=Counter)
    """Copied files by the kind of checksum that agreed; "" for those whose length alone was checked."""
    failures: list[tuple[str, str]] = field(default_factory=list)
    retries: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0
    concurrency: int = 0
    """Requests in flight at the end."""
    subset: dict[str, Any] | None = None

    @property
    def complete(self) -> bool:
        return not self.failures

    def as_dict(self) -> dict[str, Any]:
        by_checksum = {kind: number for kind, number in self.verified.items() if kind}
        return {
            "source": self.source,
            "target": self.target,
            "complete": self.complete,
            "files": self.files,
            "bytes": self.bytes,
            "copied": {
                "files": self.copied_files,
                "bytes": self.copied_bytes,
                "seconds": round(self.seconds, 3),
                "verified_against_store": sum(by_checksum.values()),
                "by_checksum": by_checksum,
                "length_only": self.verified[""],
            },
            "already_present": self.present_files,
            "failed": len(self.failures),
            "failures": [{"path": path, "reason": reason} for path, reason in self.failures],
            "retries": dict(self.retries.most_common()),
            "concurrency": self.concurrency,
        }


def summary_text(summary: Summary) -> str:
    rate = size_text(summary.copied_bytes / summary.seconds) if summary.seconds else "0 MB"
    lines = [
        f"copied   {count(summary.copied_files, 'file')}, {size_text(summary.copied_bytes)} in {summary.seconds:.1f} s "
        f"({rate}/s)",
        f"present  {count(summary.present_files, 'file')} already there and unchanged",
    ]
    if summary.copied_files:
        by_checksum = [
            f"{number:,} {CHECKSUMS.get(kind, kind.upper())}" for kind, number in summary.verified.most_common() if kind
        ]
        agreed = sum(number for kind, number in summary.verified.items() if kind)
        how = f" ({', '.join(by_checksum)})" if by_checksum else ""
        lines.append(f"checked  {agreed:,} against the store's checksum{how}, {summary.verified['']:,} by length only")
    if summary.subset is not None:
        lines.append(f"subset   {count(len(summary.subset['classes']), 'class', 'classes')}, see subset.json")
    if summary.retries:
        lines.append(f"retried  {count(summary.retries.total(), 'request')}: {', '.join(summary.retries)}")
    if summary.failures:
        lines += [f"failed   {count(len(summary.failures), 'file')}:", *failure_lines(summary.failures, "  ")]
    state = "complete" if summary.complete else "incomplete"
    lines.append(f"{summary.target} is {state}: {count(summary.files, 'file')}, {size_text(summary.bytes)}")
    return "\n".join(lines)


def failure_lines(failures: Sequence[tuple[str, str]], indent: str = "") -> list[str]:
    lines = [f"{indent}{shown(path)}: {reason}" for path, reason in failures[:FAILURES_NAMED]]
    if len(failures) > FAILURES_NAMED:
        lines.append(f"{indent}and {len(failures) - FAILURES_NAMED:,} more; --json lists them all")
    return lines


@dataclass(eq=False)
class _Large:
    """A file that is written in parts."""

    partial: PartialFile
    left: int
    lock: threading.Lock = field(default_factory=threading.Lock)
    failure: ReadFailure | None = None

    def is_last(self) -> bool:
        """Whether the part that has just ended was the last one."""
        with self.lock:
            self.left -= 1
            return self.left == 0


@dataclass(frozen=True, eq=False)
class _Piece:
    """Bytes that one thread copies."""

    file: SourceFile
    start: int
    end: int
    large: _Large | None = None

    @property
    def size(self) -> int:
        return self.end - self.start


class Transfer:
    """A run of copying. Always close it: copied files are complete and get into the manifest."""

    def __init__(
        self, source: Source, copy: LocalCopy, options: StageOptions, summary: Summary, show: Callable[[], None]
    ) -> None:
        self._source, self._copy, self._summary, self._show = source, copy, summary, show
        self._concurrency, self._rate = Concurrency(options.concurrency), RateLimit(options.limit_rate)
        self._began, self._next_tick = time.monotonic(), 0.0
        self._margin = room_margin(copy.folder)
        self._under_way = self._bytes = 0
        self._large: set[_Large] = set()
        self._events: SimpleQueue[Callable[[], None]] = SimpleQueue()
        """What the threads report, as functions that the main one calls."""
        self._loop: ReadLoop | None = None
        self._wanted: SimpleQueue[tuple[_Piece, Callable[[], CopiedFile | None]] | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._stop = threading.Event()
        self._trouble: OSError | None = None
        self._committer = threading.Thread(target=self._commit, name="stoker-commit", daemon=True)
        self._committer.start()

    def copy(self, files: Iterable[SourceFile]) -> None:
        """Copies all files; failed ones are in the summary. Raises UserError if the store or the disk fails."""
        reads = self._reads(files)
        read = next(reads, None)
        self._loop = self._source.loop(self._retried)
        try:
            while read is not None or self._under_way:
                while read is not None and self._may_begin(read.size):
                    self._rate.take(read.size)
                    self._under_way, self._bytes = self._under_way + 1, self._bytes + read.size
                    self._begin(read)
                    read = next(reads, None)
                self._tick()
                wait_s = TICK_S if read is None else min(TICK_S, self._rate.wait_s() or TICK_S)
                self._go_on(wait_s)
        except BaseException:
            self._source.stop()
            raise
        finally:
            self._end_threads()
            if self._loop is not None:
                self._loop.close()
            for large in self._large:
                large.partial.abandon()
        self._next_tick = 0.0
        self._tick()

    def _begin(self, read: _Piece) -> None:
        if self._loop is None:
            self._give(read, partial(self._copied, read), self._under_way)
        else:
            self._loop.begin(read.file, read.start, read.end, partial(self._arrived, read))

    def _go_on(self, wait_s: float) -> None:
        """Waits until something has ended, and counts what has."""
        if self._loop is not None:
            # Threads only finish large files then.
            self._loop.run(min(wait_s, 0.02) if self._threads else wait_s)
            wait_s = 0.0
        with suppress(Empty):
            self._events.get(wait_s > 0, wait_s)()
            while True:
                self._events.get_nowait()()

    def _arrived(self, read: _Piece, outcome: Content | ReadFailure) -> None:
        """Writes what the loop has read, before it is overwritten."""
        large = read.large
        try:
            if isinstance(outcome, ReadFailure):
                raise outcome
            if large is None:
                self._ended(read, self._put(read.file, outcome))
                return
            if large.failure is None:
                self._write_part(large, read.start, outcome)
        except ReadFailure as failure:
            if large is None:
                self._ended(read, failure)
                return
            large.failure = failure
        if large.is_last():
            # Checking a large file takes long: the others go on meanwhile.
            self._give(read, partial(self._finished, read.file, large), FINISHING_THREADS)
        else:
            self._ended(read, None)

    def _give(self, read: _Piece, work: Callable[[], CopiedFile | None], most: int) -> None:
        """Has one of up to so many threads do this. Not a ThreadPoolExecutor: its futures cost a tenth of the time."""
        if len(self._threads) < most:
            self._threads.append(threading.Thread(target=self._work, name="stoker-stage", daemon=True))
            self._threads[-1].start()
        self._wanted.put((read, work))

    def _end_threads(self) -> None:
        with suppress(Empty):
            while True:
                self._wanted.get_nowait()  # what no thread has begun
        for _ in self._threads:
            self._wanted.put(None)
        while self._threads:
            self._threads.pop().join()

    def close(self) -> None:
        self._stop.set()
        self._committer.join()
        self._summary.seconds = time.monotonic() - self._began
        self._summary.concurrency = self._concurrency.limit
        with writing(self._copy.folder):
            self._copy.commit()

    def _may_begin(self, size: int) -> bool:
        if self._under_way >= min(self._concurrency.limit, self._source.most_at_once) or self._rate.wait_s():
            return False
        return not self._under_way or self._bytes + size <= MOST_BYTES

    def _reads(self, files: Iterable[SourceFile]) -> Iterator[_Piece]:
        for file in files:
            try:
                if file.size <= 2 * PART_BYTES:
                    self._copy.check(file.path)
                    yield _Piece(file, 0, file.size)
                    continue
                with writing(self._copy.folder):
                    partial = self._copy.create(file.path, file.size)
            except ReadFailure as failure:
                self._failed(file, failure)
                continue
            starts = range(0, file.size, PART_BYTES)
            large = _Large(partial, len(starts))
            self._large.add(large)
            for start in starts:
                yield _Piece(file, start, min(start + PART_BYTES, file.size), large)

    # In the threads.

    def _work(self) -> None:
        while (given := self._wanted.get()) is not None:
            read, work = given
            outcome: CopiedFile | BaseException | None
            try:
                outcome = work()
            except BaseException as error:
                outcome = error
            self._events.put(partial(self._ended, read, outcome))

    def _copied(self, read: _Piece) -> CopiedFile | None:
        """Copies one file or part; the record of the file if that made it complete."""
        file, large = read.file, read.large
        if large is None:
            return self._put(file, self._source.read(file, 0, file.size, self._retried))
        try:
            if large.failure is None:
                self._write_part(large, read.start, self._source.read(file, read.start, read.end, self._retried))
        except ReadFailure as failure:
            large.failure = failure
        return self._finished(file, large) if large.is_last() else None

    def _put(self, file: SourceFile, content: Content) -> CopiedFile:
        with writing(self._copy.folder):
            return self._copy.put(file.path, content.data, file.version, content.verified)

    def _write_part(self, large: _Large, start: int, content: Content) -> None:
        with writing(self._copy.folder):
            large.partial.write_at(start, content.data)

    def _finished(self, file: SourceFile, large: _Large) -> CopiedFile:
        """Checks a file that was written in parts, and gives it its name."""
        if large.failure is not None:
            raise large.failure
        for _ in range(CHECKSUM_TRIES):
            agreed = self._source.agreed(file, large.partial.mapped())
            if agreed is not None:
                with writing(self._copy.folder):
                    return large.partial.finish(file.version, agreed)
            self._retried(BAD_CHECKSUM, False)
            for start in range(0, file.size, PART_BYTES):
                end = min(start + PART_BYTES, file.size)
                self._write_part(large, start, self._source.read(file, start, end, self._retried))
        raise ReadFailure(file.path, "unreadable", BAD_CHECKSUM)

    def _retried(self, reason: str, too_fast: bool) -> None:
        def note() -> None:
            self._summary.retries[reason] += 1
            if too_fast:
                self._concurrency.slow_down()

        self._events.put(note)

    def _commit(self) -> None:
        while not self._stop.wait(COMMIT_EVERY_S):
            try:
                self._copy.commit()
            except OSError as error:
                self._trouble = error
                return

    # In the main thread.

    def _ended(self, read: _Piece, outcome: CopiedFile | BaseException | None) -> None:
        self._under_way, self._bytes = self._under_way - 1, self._bytes - read.size
        if outcome is not None and read.large is not None:
            read.large.partial.abandon()  # unless it is finished
            self._large.discard(read.large)
        if isinstance(outcome, ReadFailure):
            self._failed(read.file, outcome)
            return
        if isinstance(outcome, BaseException):
            raise outcome
        self._concurrency.done(read.size)
        if outcome is not None:
            self._summary.copied_files += 1
            self._summary.copied_bytes += read.file.size
            self._summary.verified[outcome.verified] += 1

    def _failed(self, file: SourceFile, failure: ReadFailure) -> None:
        self._summary.failures.append((file.path, str(failure).removeprefix(f"{file.path}: ")))

    def _tick(self) -> None:
        now = time.monotonic()
        if now < self._next_tick:
            return
        self._next_tick = now + TICK_S
        self._summary.seconds = now - self._began
        self._show()
        if self._trouble is not None:
            raise target_failed(self._copy.folder, self._trouble)
        free = shutil.disk_usage(self._copy.folder).free
        if free < self._margin // 2:
            raise UserError(
                "disk-full",
                f"only {size_text(free)} is left on the disk of {self._copy.folder}",
                why="what was copied so far is whole and stays; nothing is half-written",
                hint="free some space, then run the same command again: it continues",
            )


def room_margin(folder: str) -> int:
    return min(MOST_MARGIN_BYTES, int(shutil.disk_usage(folder).total * MARGIN_SHARE))


@contextmanager
def writing(folder: str) -> Iterator[None]:
    """An OSError in the block comes from the target, not the source: it ends the run with an error that says so."""
    try:
        yield
    except OSError as error:
        raise target_failed(folder, error) from None


def target_failed(folder: str, error: OSError) -> UserError:
    """The error if the copy cannot be written to."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return UserError(
            "disk-full",
            f"the disk of {folder} is full: {error.strerror}",
            why="what was copied so far is whole and stays; nothing is half-written",
            hint="free some space or choose a part (--classes), then run the same command again: it continues",
        )
    return UserError(
        "copy-not-writable",
        f"{folder} cannot be written to: {error.strerror or error}",
        why="what was copied so far is whole and stays",
        hint=f"ls -ld {folder}",
    )
