"""metrics.jsonl, the record of a run that everything else is derived from: one line for each interval, epoch and event.

A metric that was not measured is absent. One that is NaN or infinite is null, and an event says which it was.
Accuracies (`train/acc1`) are percentages, shares (`wait_share`) lie between 0 and 1.

`Metric` is the one by which the best checkpoints are chosen, and which early stopping watches (`best_by`).
"""

from __future__ import annotations

import errno
import json
import math
import os
import re
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from stoker.core.console import Say
from stoker.core.console import say as say_on_stderr
from stoker.core.files import atomic_file, open_regular, open_to_append
from stoker.run.json_lines import Record, finite, parse_line, read_records, whole_lines

SMALLER_IS_BETTER = frozenset({"loss"})
_NAME = re.compile(r"epoch=(\d+)-val_([a-z]\w*)=(-?\d+\.\d{4})\.ckpt")


@dataclass(frozen=True)
class Metric:
    """One of the figures of a validation; all but the loss are percentages, of which more is better."""

    name: str = "acc1"

    @property
    def key(self) -> str:
        return f"val/{self.name}"

    @property
    def more_is_better(self) -> bool:
        return self.name not in SMALLER_IS_BETTER

    def rank(self, value: float) -> float:
        """A number that is larger for a better value."""
        return value if self.more_is_better else -value

    def improves(self, value: float, on: float | None, by: float = 0.0) -> bool:
        """Whether a value is better than another by more than that; NaN is never better."""
        if on is None:
            return not math.isnan(value)
        return self.rank(value) > self.rank(on) + by

    def text(self, value: float) -> str:
        return f"{value:.2f}%" if self.more_is_better else f"{value:.4f}"


ACC1 = Metric("acc1")


class BestCheckpoint(NamedTuple):
    """What the name of one of the best checkpoints says."""

    epoch: int
    metric: Metric
    value: float


def checkpoint_name(epoch: int, metric: Metric, value: float) -> str:
    assert math.isfinite(value), f"{metric.key} of epoch {epoch} is {value}"
    return f"epoch={epoch}-val_{metric.name}={value:.4f}.ckpt"


def read_checkpoint_name(name: str) -> BestCheckpoint | None:
    """What such a name says; None for any other name."""
    match = _NAME.fullmatch(name)
    return None if match is None else BestCheckpoint(int(match[1]), Metric(match[2]), float(match[3]))


ABOUT = ("kind", "time", "step", "epoch", "event")
"""The keys of a line that are not metrics."""
KEPT_LINES = 10_000
"""Lines kept in memory while the disk is full: 5 MB, days of training."""


class MetricsFile:
    """Appends lines; each call returns the record as it was written, for the trackers.

    Write a step's line before its checkpoint, and call `sync` between them: on resume, lines after the checkpoint are
    dropped (`truncate_after`), and those before it must be there.
    """

    def __init__(self, path: Path, say: Say = say_on_stderr, when_restored: Callable[[], None] = lambda: None) -> None:
        """`when_restored` is called after the file, or its folder, was deleted or moved and has been written again."""
        path.parent.mkdir(parents=True, exist_ok=True)
        _repair_last_line(path)
        self._path = path
        self._say = say
        self._when_restored = when_restored
        self._waiting: deque[bytes] = deque(maxlen=KEPT_LINES)
        self._complained = False
        self._descriptor = open_to_append(path)

    def step(self, step: int, epoch: int, metrics: Mapping[str, Any]) -> Record:
        """A line about the steps since the previous one."""
        return self._measured("step", step, epoch, metrics)

    def epoch(self, step: int, epoch: int, metrics: Mapping[str, Any]) -> Record:
        """A line about a whole epoch, including validation; `step` is its last one."""
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
        """Returns once every line so far would survive a power cut, if the file system can guarantee that."""
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
            if not self._path.exists():
                self._restore()
            while self._waiting:
                self._write(self._waiting[0])
                self._waiting.popleft()
            self._complained = False
        except OSError as error:
            self._complain(error)

    def _write(self, line: bytes) -> None:
        size = os.fstat(self._descriptor).st_size
        # One write: after a kill the line is whole, or rarely cut short, which the next start repairs. A disk that
        # fills up also cuts it short.
        if os.write(self._descriptor, line) < len(line):
            os.ftruncate(self._descriptor, size)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def _restore(self) -> None:
        """Writes the file again under its name: what is open can be read, whatever happened to its name."""
        with atomic_file(self._path, "wb") as new:
            at = 0
            while part := os.pread(self._descriptor, 1 << 20, at):
                new.write(part)
                at += len(part)
        os.close(self._descriptor)
        self._descriptor = open_to_append(self._path)
        self._say(f"warning: {self._path} was deleted or moved while the run was writing it; it is written again")
        self._when_restored()

    def _complain(self, error: OSError) -> None:
        if not self._complained:
            self._complained = True
            self._say(
                f"warning: {self._path} cannot be written ({error.strerror or error}); training continues, "
                f"and up to {KEPT_LINES:,} lines are kept in memory until it can"
            )


def read_metrics(path: Path, kind: str | None = None) -> Iterator[Record]:
    for record in read_records(path):
        if "kind" in record and kind in (None, record["kind"]):
            yield record


def truncate_after(path: Path, step: int, epochs_done: int | None = None, *, say: Say = lambda _text: None) -> int:
    """Drops every line after `step` and returns how many; the file is then that of an uninterrupted run. Damaged lines
    are dropped, too, and `say` is told.

    Call it before the file is opened, with the checkpoint's values. `epochs_done` says whether the epoch that ends at
    `step` had been validated when the checkpoint was written; without it, the epoch's line stays.
    """
    if not path.exists():
        return 0
    dropped = damaged = 0
    with open_regular(path) as stream:
        fates = [_fate(line, step, epochs_done) for line in whole_lines(stream)]
        damaged, dropped = fates.count("damaged"), len(fates) - fates.count("stays")
        if dropped:
            stream.seek(0)
            with atomic_file(path, "wb") as new:
                new.writelines(line for line, fate in zip(whole_lines(stream), fates, strict=True) if fate == "stays")
    if damaged:
        say(f"warning: {path}: {damaged:,} damaged lines were dropped")
    return dropped


def metrics_of(record: Mapping[str, Any]) -> dict[str, float]:
    """The metrics of a record that were measured and are finite."""
    return {
        name: value
        for name, value in record.items()
        if name not in ABOUT and isinstance(value, (int, float)) and not isinstance(value, bool)
    }


def _fate(line: bytes, step: int, epochs_done: int | None) -> Literal["stays", "later", "damaged"]:
    record = parse_line(line)
    at, epoch = (None, None) if record is None else (record.get("step"), record.get("epoch"))
    numbers = all(value is None or finite(value) is not None for value in (at, epoch))
    if record is None or not isinstance(record.get("kind"), str) or not numbers:
        return "damaged"
    if record["kind"] == "epoch" and epochs_done is not None and (epoch or 0) >= epochs_done:
        return "later"
    return "stays" if at is None or at <= step else "later"


def _plain(value: Any) -> tuple[Any, str | None]:
    """The value as JSON can hold it, and its text if it is NaN or infinite."""
    if value is None or isinstance(value, (bool, int, str)):
        return value, None
    if isinstance(value, Mapping):
        return {str(key): _plain(item)[0] for key, item in value.items()}, None
    if isinstance(value, (list, tuple)):
        return [_plain(item)[0] for item in value], None
    number = float(value)
    return (number, None) if math.isfinite(number) else (None, str(number))


def _repair_last_line(path: Path) -> None:
    """A power cut may leave half a line, and the next one must not be appended to it."""
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
