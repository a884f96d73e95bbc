"""Reads the .jsonl files of a run, also while it writes them: whole lines only, damaged ones skipped."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, Generic, Protocol, TypeVar

Record = dict[str, Any]

LONGEST_LINE = 4 << 20
"""Bytes, a hundred times our longest line: a file without newlines must not fill the memory."""
AT_ONCE = 1 << 20


def parse_line(line: bytes) -> Record | None:
    """The JSON object of a line; None if it holds anything else."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) else None


def read_records(path: Path) -> Iterator[Record]:
    """The records of a file in order; nothing if the file does not exist."""
    if not path.exists():
        return
    with path.open("rb") as stream:
        for line in stream:
            # Without its newline a line may be half written.
            record = parse_line(line) if line.endswith(b"\n") else None
            if record is not None:
                yield record


class Collector(Protocol):
    """Takes records one by one; a list is one."""

    def append(self, record: Record, /) -> None: ...


Collected = TypeVar("Collected", bound=Collector)


class JsonLines(Generic[Collected]):
    """Follows one file: each `refresh` reads only what was appended, so watching a long run stays cheap."""

    def __init__(self, path: Path, collect: Callable[[], Collected]) -> None:
        self.path = path
        self._collect = collect
        self.records = collect()
        self.broken = 0
        """Lines that are not a JSON object."""
        self._identity: tuple[int, int] | None = None
        self._offset = 0
        self._rest = b""
        self._skipping = False

    @property
    def exists(self) -> bool:
        return self._identity is not None

    def refresh(self) -> bool:
        """Reads what was appended, or the whole file if it was replaced; True if anything has changed."""
        try:
            with self.path.open("rb") as stream:
                return self._read(stream)
        except OSError:
            changed = self.exists
            self._forget()
            return changed

    def _read(self, stream: BinaryIO) -> bool:
        status = os.fstat(stream.fileno())
        identity = (status.st_dev, status.st_ino)
        changed = identity != self._identity or status.st_size < self._offset
        if changed:
            # A resumed run drops lines by replacing the file.
            self._forget()
            self._identity = identity
        stream.seek(self._offset)
        while data := stream.read(AT_ONCE):
            self._offset += len(data)
            changed = True
            self._take(data)
        return changed

    def _take(self, data: bytes) -> None:
        *lines, rest = (self._rest + data).split(b"\n")
        for line in lines:
            if self._skipping:
                self._skipping = False
            elif line.strip():
                record = parse_line(line)
                if record is None:
                    self.broken += 1
                else:
                    self.records.append(record)
        if len(rest) > LONGEST_LINE:
            self.broken += not self._skipping
            self._skipping, rest = True, b""
        # The last line may still be in the middle of being written.
        self._rest = rest

    def _forget(self) -> None:
        self.records = self._collect()
        self.broken, self._identity, self._offset, self._rest = 0, None, 0, b""
        self._skipping = False


def finite(value: object) -> float | None:
    """The value as a float; None if it is not a finite number."""
    if type(value) is float:
        return value if math.isfinite(value) else None
    if type(value) is not int:  # not isinstance: a bool is an int
        return None
    try:
        return float(value)
    except OverflowError:
        return None


def number(record: Record, name: str) -> float | None:
    """The finite number under this name; None if it is absent or anything else."""
    return finite(record.get(name))
