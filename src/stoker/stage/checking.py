"""`--verify`: reads a whole copy again and compares every file with its hash in the manifest."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import xxhash

from stoker.core.console import Advance, shown
from stoker.core.units import count, size_text
from stoker.io.copy_manifest import CopiedFile
from stoker.io.local_copy import SUBSET, LocalCopy
from stoker.stage.transfer import failure_lines

_THREADS = 8
_PIECE = 4 << 20
_BATCH = 4096


@dataclass
class Verification:
    """The state of a copy's files."""

    folder: str
    source: str
    files: int = 0
    bytes: int = 0
    wrong: list[tuple[str, str]] = field(default_factory=list)
    """Files that differ from the manifest, and how."""
    unknown: list[str] = field(default_factory=list)
    """Files that are not in the manifest."""

    @property
    def whole(self) -> bool:
        """Whether every file of the manifest is there and has its content."""
        return not self.wrong

    def as_dict(self) -> dict[str, Any]:
        """The result as `--json` prints it."""
        return {
            "target": self.folder,
            "source": self.source,
            "whole": self.whole,
            "files": self.files,
            "bytes": self.bytes,
            "wrong": [{"path": path, "reason": reason} for path, reason in self.wrong],
            "not_in_the_manifest": self.unknown,
        }


def verification_text(result: Verification) -> str:
    """What `--verify` found."""
    lines = failure_lines(result.wrong)
    if result.unknown:
        lines.append(f"note: {count(len(result.unknown), 'file')} not in the manifest: {shown(result.unknown[0])} …")
    verdict = "all as copied" if result.whole else f"{count(len(result.wrong), 'file')} wrong or missing"
    lines.append(f"verified {count(result.files, 'file')}, {size_text(result.bytes)} of {result.folder}: {verdict}")
    return "\n".join(lines)


def verify_copy(copy: LocalCopy, progress: Advance) -> Verification:
    """Reads every file that the manifest lists; `progress` counts files. Those that are wrong are taken out of the
    manifest, so that the next staging copies them again."""
    result = Verification(copy.folder, copy.source)
    known: set[int] = set()
    with ThreadPoolExecutor(_THREADS) as pool:
        records = copy.records()
        while batch := list(islice(records, _BATCH)):
            for record, reason in zip(batch, pool.map(lambda one: _difference(copy, one), batch), strict=True):
                known.add(xxhash.xxh3_64_intdigest(record.path.encode("utf-8", "surrogateescape")))
                result.files += 1
                result.bytes += record.size
                if reason is not None:
                    result.wrong.append((record.path, reason))
            progress(result.files, len(copy))
    if not copy.read_only:
        copy.forget(path for path, _ in result.wrong)
    for path in _files_of(copy.folder):
        if xxhash.xxh3_64_intdigest(path.encode("utf-8", "surrogateescape")) not in known:
            result.unknown.append(path)
    return result


def _difference(copy: LocalCopy, record: CopiedFile) -> str | None:
    """How a file differs from its line in the manifest; None if it does not."""
    try:
        descriptor = os.open(copy.place(record.path), os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return "missing"
    except OSError as error:
        return error.strerror
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            return "not a file"
        if found.st_size != record.size:
            return f"{found.st_size} bytes instead of {record.size}"
        # A page that is correct in memory may be damaged on the disk.
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        digest = xxhash.xxh3_128()
        while piece := os.read(descriptor, _PIECE):
            digest.update(piece)
    except OSError as error:
        return error.strerror
    finally:
        os.close(descriptor)
    return None if digest.hexdigest() == record.xxh3 else "its content has changed"


def _files_of(folder: str) -> Iterator[str]:
    waiting = [""]
    while waiting:
        below = waiting.pop()
        with os.scandir(f"{folder}/{below}") as entries:
            for entry in entries:
                path = f"{below}/{entry.name}" if below else entry.name
                if entry.is_dir(follow_symlinks=False):
                    waiting.append(path)
                elif below or not (
                    entry.name.startswith(".stage") or entry.name == SUBSET or entry.name.endswith(".yaml")
                ):
                    yield path
