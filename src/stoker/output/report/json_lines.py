"""Reads a .jsonl file that somebody may still be writing: each whole line once, whatever is broken passed over."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO, Generic, Protocol, TypeVar

from stoker.output.metrics_file import Record

LONGEST_LINE = 4 << 20
"""Bytes: a hundred times our longest; a file without line ends must not fill the memory."""
AT_ONCE = 1 << 20


class Collector(Protocol):
    """Takes records one by one; a list is one."""

    def append(self, record: Record, /) -> None: ...


Collected = TypeVar("Collected", bound=Collector)


class JsonLines(Generic[Collected]):
    """The records of one file so far; `refresh` reads only what is new, so that watching a long run stays cheap."""

    def __init__(self, path: Path, collect: Callable[[], Collected]) -> None:
        self.path = path
        self._collect = collect
        self.records = collect()
        self.broken = 0
        """Lines that are no JSON object."""
        self._place: tuple[int, int] | None = None
        self._offset = 0
        self._rest = b""
        self._skipping = False

    @property
    def exists(self) -> bool:
        return self._place is not None

    def refresh(self) -> bool:
        """Reads what was appended, or everything anew where the file was replaced; whether anything is different."""
        try:
            with self.path.open("rb") as stream:
                return self._read(stream)
        except OSError:
            changed = self._place is not None
            self._forget()
            return changed

    def _read(self, stream: BinaryIO) -> bool:
        status = os.fstat(stream.fileno())
        place = (status.st_dev, status.st_ino)
        changed = place != self._place or status.st_size < self._offset
        if changed:
            # A resumed run takes lines back by putting a new file in the old one's place.
            self._forget()
            self._place = place
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
                self._parse(line)
        if len(rest) > LONGEST_LINE:
            self.broken += not self._skipping
            self._skipping, rest = True, b""
        # Half a line may be the half of one that is being written: it waits for its end.
        self._rest = rest

    def _parse(self, line: bytes) -> None:
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            record = None
        if isinstance(record, dict):
            self.records.append(record)
        else:
            self.broken += 1

    def _forget(self) -> None:
        self.records = self._collect()
        self.broken, self._place, self._offset, self._rest = 0, None, 0, b""
        self._skipping = False


def number(record: Record, name: str) -> float | None:
    """A finite number of a record; None where there is none, or something else stands in its place."""
    value = record.get(name)
    if type(value) is float:
        return value if math.isfinite(value) else None
    if type(value) is not int:  # a bool is no number here
        return None
    try:
        return float(value)
    except OverflowError:
        return None
