"""Copies what was selected of a source into a local copy: compare, check the room, fetch, commit; and the summary."""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from stoker.console import Advance, some
from stoker.data.store.copy_manifest import CopiedFile
from stoker.data.store.copy_names import remove_abandoned, temporary_name
from stoker.data.store.local_copy import LocalCopy
from stoker.data.store.object_store import Patience
from stoker.errors import UserError
from stoker.stage.concurrency import Concurrency, RateLimit
from stoker.stage.records import SourceFile, target_failed
from stoker.stage.s3_download import S3Download
from stoker.stage.selection import MARKERS, Selection
from stoker.stage.sources import ObjectSource, Source
from stoker.stage.thread_copy import ThreadCopy
from stoker.units import count, size_text

COMMIT_EVERY_S = 2.0
# Left free on the target's disk: other programs write there, too.
MARGIN_SHARE = 0.02
MOST_MARGIN_BYTES = 1_000_000_000
CHECK_ROOM_EVERY_S = 1.0
FAILURES_NAMED = 20


@dataclass(frozen=True)
class StageOptions:
    """How to copy."""

    limit_rate: int | None = None
    """Bytes per second; None for no limit."""
    concurrency: int | None = None
    """Requests in flight; None to find it while running."""
    patience: Patience = field(default_factory=Patience)
    """Of the requests to S3."""


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
    """Of the copied files, by the kind of checksum that agreed; "" for those of which only the length did."""
    failures: list[tuple[str, str]] = field(default_factory=list)
    retries: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0
    concurrency: int = 0
    """Requests in flight at the end."""
    subset: dict[str, Any] | None = None

    @property
    def complete(self) -> bool:
        """Whether the copy has everything it should have."""
        return not self.failures

    def as_dict(self) -> dict[str, Any]:
        """The summary as `--json` prints it."""
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


@dataclass(frozen=True)
class Work:
    """What is left to copy, known before the first byte."""

    files: list[SourceFile]
    bytes: int
    total_files: int
    total_bytes: int

    @property
    def present_files(self) -> int:
        return self.total_files - len(self.files)


def find_work(source: Source, copy: LocalCopy, selection: Selection, progress: Advance | None = None) -> Work:
    """What is missing in the copy or differs from the source; raises UserError if some names cannot be in one copy."""
    left: list[SourceFile] = []
    total_files = total_bytes = 0
    names = _Names(ignore_case=ignores_case(copy.folder))
    for file in selection.files(source, progress):
        total_files, total_bytes = total_files + 1, total_bytes + file.size
        names.add(file.path)
        known = copy.present(file.path) if "\0" not in file.path else None
        if known is None or (known.size, known.version) != (file.size, file.version):
            left.append(file)
    names.check()
    if not total_files:
        raise UserError(
            "nothing-to-stage",
            f"there are no files at {source.url}",
            why="an empty copy is hardly what was meant",
            hint="check the path; a prefix of a bucket is spelled exactly, with upper and lower case",
        )
    return Work(left, sum(file.size for file in left), total_files, total_bytes)


class _Names:
    """Notices names that cannot be files beside each other."""

    def __init__(self, ignore_case: bool) -> None:
        self._fold: Callable[[str], str] = str.casefold if ignore_case else lambda name: name
        self._ignore_case = ignore_case
        self._files: set[str] = set()
        self._folders: set[str] = set()
        self._twins: list[str] = []

    def add(self, path: str) -> None:
        folded = self._fold(path)
        if self._ignore_case and folded in self._files:
            self._twins.append(path)
        self._files.add(folded)
        folder = folded.rpartition("/")[0]
        while folder and folder not in self._folders:
            self._folders.add(folder)
            folder = folder.rpartition("/")[0]

    def check(self) -> None:
        if self._twins:
            raise UserError(
                "names-differ-in-case",
                f"{count(len(self._twins), 'name')} like another except for upper and lower case: {some(self._twins)}",
                why="the target's file system does not distinguish them, so one would overwrite the other",
                hint="choose a target on a file system that does, such as ext4 or XFS",
            )
        if both := sorted(self._files & self._folders):
            raise UserError(
                "file-and-folder",
                f"{count(len(both), 'name')} both of a file and of a folder: {some(both)}",
                why="an object store allows that, a file system does not",
                hint="stage the folders one by one",
            )


def ignores_case(folder: str) -> bool:
    """Whether the file system of a folder takes `A` and `a` for the same name."""
    name = temporary_name(folder)
    try:
        os.close(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666))
        try:
            return os.path.exists(f"{folder}/{os.path.basename(name).upper()}")  # noqa: PTH110, PTH119
        finally:
            os.unlink(name)  # noqa: PTH108
    except OSError as error:
        raise target_failed(folder, error) from None


def check_room(work: Work, folder: str) -> None:
    """Raises UserError if the disk has no room for what is left to copy."""
    disk = shutil.disk_usage(folder)
    usable = disk.free - _margin(disk.total)
    if work.bytes > usable:
        raise UserError(
            "disk-too-small",
            f"{size_text(work.bytes)} are to be copied; {folder} has room for {size_text(max(0, usable))}",
            why=f"{size_text(disk.free)} are free, of which {size_text(_margin(disk.total))} stay free",
            hint="choose another disk, or a part of the data: --classes 100 --train-per-class 500",
        )


def _margin(total: int) -> int:
    return min(MOST_MARGIN_BYTES, int(total * MARGIN_SHARE))


Show = Callable[[Summary, int], None]
"""Shows progress: the summary so far, and the bytes that have to be copied."""


def copy_all(
    source: Source, copy: LocalCopy, selection: Selection, work: Work, options: StageOptions, show: Show
) -> Summary:
    """Copies what is left; returns what was done. Whatever ends it, what was copied stays and is in the manifest."""
    summary = Summary(source.url, copy.folder, work.total_files, work.total_bytes, present_files=work.present_files)
    summary.subset = selection.record
    run = _Run(source, copy, work, options, summary, show)
    try:
        with suppress(FileExistsError):
            for folder in selection.empty_folders:
                os.makedirs(copy.place(folder), exist_ok=True)  # noqa: PTH103
        run.copy(file for file in work.files if not _is_marker(file))
        markers = [file for file in work.files if _is_marker(file)]
        if summary.failures:
            summary.failures += [(file.path, "not copied: it comes last, and others failed") for file in markers]
        else:
            run.copy(markers)
    finally:
        run.end()
    remove_abandoned(copy.folder)
    return summary


def _is_marker(file: SourceFile) -> bool:
    return file.path.rpartition("/")[2] in MARKERS


class _Run:
    """A run's events, its clock, and the thread that commits."""

    def __init__(
        self, source: Source, copy: LocalCopy, work: Work, options: StageOptions, summary: Summary, show: Show
    ) -> None:
        self._source, self._copy, self._work, self._summary, self._show = source, copy, work, summary, show
        self._patience = options.patience
        self._concurrency = Concurrency(options.concurrency)
        self._rate = RateLimit(options.limit_rate)
        self._began = time.monotonic()
        self._margin = _margin(shutil.disk_usage(copy.folder).total)
        self._next_room_check = 0.0
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._trouble: OSError | None = None
        self._committer = threading.Thread(target=self._commit, name="stoker-commit", daemon=True)
        self._committer.start()

    def copy(self, files: Iterable[SourceFile]) -> None:
        """Copies these files, the fastest way there is for the source."""
        todo: Iterator[SourceFile] = iter(files)
        place = self._source.place if isinstance(self._source, ObjectSource) else None
        if place is not None:
            download = S3Download(place, self._copy, self, self._concurrency, self._rate, self._patience)
            download.run(todo, self._tick)
        else:
            ThreadCopy(self._source, self._copy, self, self._concurrency, self._rate).run(todo, self._tick)
        self._tick()

    def end(self) -> None:
        """Commits what is left; whatever happened, that is whole."""
        self._stop.set()
        self._committer.join()
        self._summary.seconds = time.monotonic() - self._began
        self._summary.concurrency = self._concurrency.limit
        try:
            self._copy.commit()
        except OSError as error:
            raise target_failed(self._copy.folder, error) from None

    def done(self, file: SourceFile, record: CopiedFile) -> None:
        with self._lock:
            self._summary.copied_files += 1
            self._summary.copied_bytes += file.size
            self._summary.verified[record.verified] += 1

    def failed(self, file: SourceFile, reason: str) -> None:
        with self._lock:
            self._summary.failures.append((file.path, reason.removeprefix(f"{file.path}: ")))

    def retried(self, reason: str) -> None:
        with self._lock:
            self._summary.retries[reason] += 1

    def _tick(self) -> None:
        now = time.monotonic()
        self._summary.seconds = now - self._began
        self._show(self._summary, self._work.bytes)
        if self._trouble is not None:
            raise target_failed(self._copy.folder, self._trouble)
        if now >= self._next_room_check:
            self._next_room_check = now + CHECK_ROOM_EVERY_S
            free = shutil.disk_usage(self._copy.folder).free
            if free < self._margin // 2:
                raise UserError(
                    "disk-full",
                    f"only {size_text(free)} are left on the disk of {self._copy.folder}",
                    why="what was copied so far is whole and stays; nothing is half-written",
                    hint="free some space, then run the same command again: it continues",
                )

    def _commit(self) -> None:
        while not self._stop.wait(COMMIT_EVERY_S):
            try:
                self._copy.commit()
            except OSError as error:
                self._trouble = error
                return


def check_apart(source: str, target: str) -> None:
    """Raises UserError if the target is inside the source or the other way round."""
    target = os.path.realpath(target)
    for inner, outer, what in ((target, source, "the target is inside"), (source, target, "the source is inside")):
        if inner == outer or inner.startswith(f"{outer.rstrip('/')}/"):
            raise UserError(
                "target-inside-source" if outer == source else "source-inside-target",
                f"{inner} is {'the same folder as' if inner == outer else 'inside'} {outer}",
                why="the copy would contain itself"
                if outer == source
                else f"{what} the copy, which it could overwrite",
                hint="choose a folder elsewhere",
            )
