"""Reads the .jsonl files of a run, also while it writes them: whole lines only. Damaged lines are skipped and counted.

Nothing in them is trusted: whatever a file holds, reading it neither hangs nor fills the memory.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, Generic, Protocol, TypeVar

from stoker.core.files import open_regular, parse_json

Record = dict[str, Any]

LONGEST_LINE = 1 << 20
"""Bytes, twenty times our longest line: a file without newlines must not fill the memory."""
MOST_BYTES = 1 << 30
"""The most that is read of one file; a run of months writes a tenth."""
MOST_LINES = 250_000
"""Kept of one file; a run of 600 epochs with a line a minute has fewer."""
MOST_KEPT_BYTES = 100 << 20
"""Roughly the memory for the lines of one file."""
LARGEST_NUMBER = 1e18
"""In seconds, bytes or steps: nothing that we measure is larger, and sums of such numbers stay finite."""
AT_ONCE = 1 << 20


def parse_line(line: bytes) -> Record | None:
    """The JSON object of a line; None if it holds anything else."""
    try:
        record = parse_json(line) if len(line) <= LONGEST_LINE else None
    except ValueError:
        return None
    return record if isinstance(record, dict) else None


def whole_lines(stream: BinaryIO) -> Iterator[bytes]:
    """The lines of a file, each with its end; one that is too long comes shortened to just over LONGEST_LINE. What
    comes after the last end may be half a line, and is left out."""
    rest, cut, left = b"", b"", MOST_BYTES
    while left > 0 and (data := stream.read(min(AT_ONCE, left))):
        left -= len(data)
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            yield (cut or line) + b"\n"
            cut = b""
        if len(rest) > LONGEST_LINE:
            cut, rest = cut or rest[: LONGEST_LINE + 1], b""


def read_records(path: Path) -> Iterator[Record]:
    """The records of a file in order; nothing if the file does not exist. Raises OSError if it cannot be read."""
    if not path.exists():
        return
    with open_regular(path) as stream:
        for line in whole_lines(stream):
            record = parse_line(line)
            if record is not None:
                yield record


class KeptRecords(list[Record]):
    """Records of a file, as many as there is memory for; `left_out` counts the others."""

    def __init__(self) -> None:
        super().__init__()
        self.left_out = 0
        self._bytes = 0

    def append(self, record: Record, /) -> None:
        size = _size_of(record)
        if size > LONGEST_LINE or self._bytes + size > MOST_KEPT_BYTES or len(self) >= MOST_LINES:
            self.left_out += 1
            return
        self._bytes += size
        super().append(record)


def _size_of(value: Any) -> int:
    """Roughly the bytes of memory; the value is not nested deeply."""
    if isinstance(value, str):
        return 50 + 2 * len(value)
    if isinstance(value, dict):
        return 100 + sum(100 + len(name) + _size_of(item) for name, item in value.items())
    return 60 + (sum(8 + _size_of(item) for item in value) if isinstance(value, list) else 0)


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
        self.problem: str | None = None
        """Why the file is not read although something has its name."""
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
            with open_regular(self.path) as stream:
                self.problem = None
                return self._read(stream)
        except OSError as error:
            problem = None if isinstance(error, FileNotFoundError) else error.strerror
            changed = self.exists or problem != self.problem
            self._forget()
            self.problem = problem
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
        while self._offset < MOST_BYTES and (data := stream.read(AT_ONCE)):
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
    """The value as a float; None if it is not a number that we could have written."""
    if type(value) is not float and type(value) is not int:  # not isinstance: a bool is an int
        return None
    # The comparison is false for NaN, and works for whole numbers that are too large for a float.
    return float(value) if -LARGEST_NUMBER <= value <= LARGEST_NUMBER else None


def number(record: Record, name: str) -> float | None:
    """The finite number under this name; None if it is absent or anything else."""
    return finite(record.get(name))
