"""The JSON-lines files of a run: metrics.jsonl, which is the truth about it, and how such files are read."""

from __future__ import annotations

import errno
import json
import math
import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Generic, Protocol, TypeVar

from stoker.console import say as say_on_stderr
from stoker.files import atomic_file

# metrics.jsonl, the truth about a run: one whole line for each interval, epoch and event.
#
# A metric that was not measured is absent; one that is no finite number is null, and an event says what it was.
# Accuracies (`train/acc1`) are percent, shares (`wait_share`) lie between 0 and 1.

Record = dict[str, Any]
ABOUT = ("kind", "time", "step", "epoch", "event")
"""The parts of a line that are no metrics."""
KEPT_LINES = 10_000
"""Lines that wait in memory for a disk that is full: 5 MB, days of training."""


class MetricsFile:
    """Appends lines; each call returns the record as it was written, for the trackers.

    Write a step's line before its checkpoint, and call `sync` between them: what comes after the checkpoint is
    taken back on resume (`truncate_after`), what came before must be there.
    """

    def __init__(self, path: Path, say: Callable[[str], None] = say_on_stderr) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        _repair_last_line(path)
        self._path = path
        self._say = say
        self._waiting: deque[bytes] = deque(maxlen=KEPT_LINES)
        self._complained = False
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)

    def step(self, step: int, epoch: int, metrics: Mapping[str, Any]) -> Record:
        """A line about the steps since the one before."""
        return self._measured("step", step, epoch, metrics)

    def epoch(self, step: int, epoch: int, metrics: Mapping[str, Any]) -> Record:
        """A line about a whole epoch, validation included; `step` is the last one of it."""
        return self._measured("epoch", step, epoch, metrics)

    def event(self, name: str, step: int | None = None, **details: Any) -> Record:
        """A line about something that happened: resumed, checkpoint, quarantine, oom."""
        record: Record = {"kind": "event", "time": round(time.time(), 3), "event": name}
        if step is not None:
            record["step"] = step
        record |= {key: _plain(value)[0] for key, value in details.items() if value is not None}
        self._append(record)
        return record

    def sync(self) -> None:
        """Returns when every line so far would survive a power cut, where the file system can promise that."""
        try:
            os.fsync(self._descriptor)
        except OSError as error:
            self._complain(error)

    def close(self) -> None:
        if self._descriptor >= 0:
            self._write_waiting()
            self.sync()
            os.close(self._descriptor)
            self._descriptor = -1

    def __enter__(self) -> MetricsFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _measured(self, kind: str, step: int, epoch: int, metrics: Mapping[str, Any]) -> Record:
        record: Record = {"kind": kind, "time": round(time.time(), 3), "step": step, "epoch": epoch}
        not_finite: dict[str, str] = {}
        for name, value in metrics.items():
            assert name not in ABOUT, name
            if value is None:
                continue
            record[name], odd = _plain(value)
            if odd is not None:
                not_finite[name] = odd
        if not_finite:
            self.event("not-finite", step, metrics=not_finite)
        self._append(record)
        return record

    def _append(self, record: Record) -> None:
        self._waiting.append(json.dumps(record, allow_nan=False).encode() + b"\n")
        self._write_waiting()

    def _write_waiting(self) -> None:
        try:
            while self._waiting:
                self._write(self._waiting[0])
                self._waiting.popleft()
            self._complained = False
        except OSError as error:
            self._complain(error)

    def _write(self, line: bytes) -> None:
        size = os.fstat(self._descriptor).st_size
        # One write: a kill leaves the whole line, or rarely a part of it, which the next start takes back. A disk that
        # fills up leaves a part too.
        if os.write(self._descriptor, line) < len(line):
            os.ftruncate(self._descriptor, size)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def _complain(self, error: OSError) -> None:
        if not self._complained:
            self._complained = True
            self._say(
                f"warning: {self._path} cannot be written ({error.strerror or error}); training goes on, "
                f"and up to {KEPT_LINES:,} lines wait in memory for a place"
            )


def read_metrics(path: Path, kind: str | None = None) -> Iterator[Record]:
    """The records of the file in order, of one kind or all; what is no whole line is passed over."""
    if not path.exists():
        return
    with path.open("rb") as stream:
        for line in stream:
            record = _parsed(line)
            if record is not None and kind in (None, record["kind"]):
                yield record


def truncate_after(path: Path, step: int, epochs_done: int | None = None) -> int:
    """Takes back every line after `step`, and says how many; the file is then what an uninterrupted run would have.

    Call it before the file is opened, with what the checkpoint says. `epochs_done` tells whether the epoch that
    ends at `step` had been validated when the checkpoint was written; without it, the epoch's line stays.
    """
    if not path.exists():
        return 0
    lines = path.read_bytes().splitlines(keepends=True)
    kept = [line for line in lines if _stays(line, step, epochs_done)]
    if len(kept) < len(lines):
        with atomic_file(path, "wb") as stream:
            stream.writelines(kept)
    return len(lines) - len(kept)


def metrics_of(record: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a record that were measured and are finite."""
    return {
        name: value
        for name, value in record.items()
        if name not in ABOUT and isinstance(value, (int, float)) and not isinstance(value, bool)
    }


def _stays(line: bytes, step: int, epochs_done: int | None) -> bool:
    record = _parsed(line)
    if record is None:
        return False
    if record["kind"] == "epoch" and epochs_done is not None and record.get("epoch", 0) >= epochs_done:
        return False
    of = record.get("step")
    return of is None or of <= step


def _parsed(line: bytes) -> Record | None:
    try:
        record = json.loads(line) if line.endswith(b"\n") else None
    except ValueError:
        return None
    return record if isinstance(record, dict) and "kind" in record else None


def _plain(value: Any) -> tuple[Any, str | None]:
    """The value as JSON can hold it, and what it was where it is no finite number."""
    if value is None or isinstance(value, (bool, int, str)):
        return value, None
    if isinstance(value, Mapping):
        return {str(key): _plain(item)[0] for key, item in value.items()}, None
    if isinstance(value, (list, tuple)):
        return [_plain(item)[0] for item in value], None
    number = float(value)
    return (number, None) if math.isfinite(number) else (None, str(number))


def _repair_last_line(path: Path) -> None:
    """A power cut may leave half a line; what is appended must not become part of it."""
    if not path.exists():
        return
    with path.open("rb+") as stream:
        end = stream.seek(0, os.SEEK_END)
        whole = end
        while whole > 0:
            start = max(0, whole - 65_536)
            stream.seek(start)
            newline = stream.read(whole - start).rfind(b"\n")
            if newline >= 0:
                whole = start + newline + 1
                break
            whole = start
        if whole < end:
            stream.truncate(whole)


# Reads a .jsonl file that somebody may still be writing: each whole line once, whatever is broken passed over.

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
