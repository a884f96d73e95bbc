"""Trackers: W&B, TensorBoard, CSV. None of them can delay or stop a step.

Each has its own thread and queue. A full queue drops its oldest record; a tracker that fails is reported once and
disabled. metrics.jsonl does not pass through here: trackers get copies of what it holds.
"""

from __future__ import annotations

import csv
import os
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from stoker.config import Config
from stoker.core.console import Say
from stoker.core.console import say as say_on_stderr
from stoker.core.files import atomic_file
from stoker.run.folder import RunFolder
from stoker.run.metrics import metrics_of, read_metrics
from stoker.run.wandb_tracker import WandbTracker

QUEUED_RECORDS = 10_000
CLOSE_S = 8.0
"""W&B needs one to four seconds to finish a run over a good connection; a dead one must not hold the machine."""


class Tracker(Protocol):
    """All but `abandon` are called in the tracker's own thread, and may take their time or raise."""

    @property
    def name(self) -> str: ...
    def open(self) -> None: ...
    def log(self, record: Mapping[str, Any]) -> None: ...
    def close(self) -> None: ...
    def abandon(self) -> str | None:
        """Called from outside when time is up: must end whatever the tracker waits for. Returns what to do later."""


class CsvTracker:
    """metrics.csv, one row for each epoch; rewritten from metrics.jsonl, so it is always whole, also after a resume."""

    name = "CSV"

    def __init__(self, csv_file: Path, metrics_file: Path, columns: Sequence[str]) -> None:
        self._csv_file = csv_file
        self._columns = columns
        self._metrics_file = metrics_file
        self._rows: dict[int, dict[str, Any]] = {}

    def open(self) -> None:
        for record in read_metrics(self._metrics_file, "epoch"):
            self._keep(record)
        if self._rows:
            self._write()

    def log(self, record: Mapping[str, Any]) -> None:
        if record["kind"] == "epoch":
            self._keep(record)
            self._write()

    def close(self) -> None:
        pass

    def abandon(self) -> str | None:
        return None

    def _keep(self, record: Mapping[str, Any]) -> None:
        self._rows[record["epoch"]] = {"epoch": record["epoch"], "step": record["step"], **metrics_of(record)}

    def _write(self) -> None:
        rows = [self._rows[epoch] for epoch in sorted(self._rows)]
        columns = list(dict.fromkeys([*self._columns, *(name for row in rows for name in row)]))
        with atomic_file(self._csv_file) as stream:
            writer = csv.DictWriter(stream, columns, restval="", lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)


class TensorboardTracker:
    """Event files without torch or TensorFlow; every record is on disk before the next is taken."""

    name = "TensorBoard"

    def __init__(self, folder: Path, resumed_at: int | None = None) -> None:
        self._folder = folder
        self._resumed_at = resumed_at
        self._writer: Any = None

    def open(self) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog  # type: ignore[import-untyped]
        from tensorboard.summary.writer.event_file_writer import EventFileWriter  # type: ignore[import-untyped]

        self._writer = EventFileWriter(str(self._folder))
        if self._resumed_at is not None:
            # TensorBoard then drops what the run had written from this step on.
            start = SessionLog(status=SessionLog.START)
            self._writer.add_event(Event(step=self._resumed_at + 1, session_log=start))
            self._writer.flush()

    def log(self, record: Mapping[str, Any]) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary  # type: ignore[import-untyped]

        values = [Summary.Value(tag=name, simple_value=value) for name, value in metrics_of(record).items()]
        event = Event(wall_time=record["time"], step=record["step"], summary=Summary(value=values))
        self._writer.add_event(event)
        self._writer.flush()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()

    def abandon(self) -> str | None:
        return None


class Trackers:
    """Several trackers; `log` returns at once, `close` within its timeout.

    Create it on one rank only.
    """

    def __init__(self, trackers: Sequence[Tracker], say: Say = say_on_stderr, queued: int = QUEUED_RECORDS) -> None:
        self._closed = False
        self._lanes = [_Lane(tracker, say, queued) for tracker in trackers]

    @property
    def names(self) -> list[str]:
        return [lane.name for lane in self._lanes]

    @property
    def dropped(self) -> dict[str, int]:
        """Records that each tracker was too slow to take."""
        return {lane.name: lane.dropped for lane in self._lanes}

    def log(self, record: Mapping[str, Any]) -> None:
        """Hands over a record of metrics.jsonl; events are not for trackers."""
        if record["kind"] != "event":
            for lane in self._lanes:
                lane.put(record)

    def close(self, timeout: float = CLOSE_S) -> None:
        """Waits until everything is delivered or the time is up; a second call does nothing."""
        if self._closed:
            return
        self._closed = True
        deadline = time.monotonic() + timeout
        for lane in self._lanes:
            lane.no_more()
        for lane in self._lanes:
            lane.close(deadline)

    def __enter__(self) -> Trackers:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def trackers_for(
    config: Config,
    folder: RunFolder,
    *,
    scores: Sequence[str] = (),
    resumed_at: int | None = None,
    say: Say = say_on_stderr,
) -> Trackers:
    """The trackers that this config asks for, started.

    `scores` are columns of metrics.csv, in this order, whatever was measured; others follow as they appear.
    `resumed_at` is the checkpoint's step; call `truncate_after` first."""
    chosen: list[Tracker] = []
    # W&B's own switch: nothing is started, nothing is printed.
    if (config.wandb or config.wandb_project is not None) and os.environ.get("WANDB_MODE") != "disabled":
        chosen.append(WandbTracker(config, folder, say))
    if config.tensorboard:
        chosen.append(TensorboardTracker(folder.tensorboard, resumed_at))
    if config.csv:
        columns = ("epoch", "step", *scores, "seconds", "images_per_second", "wait_share")
        chosen.append(CsvTracker(folder.metrics_csv_file, folder.metrics_file, columns))
    return Trackers(chosen, say)


class _Lane:
    """One tracker, its thread and its queue."""

    def __init__(self, tracker: Tracker, say: Say, queued: int) -> None:
        self.name = tracker.name
        self.dropped = 0
        self._tracker = tracker
        self._say = say
        self._queued = queued
        self._records: deque[Mapping[str, Any]] = deque()
        self._changed = threading.Condition()
        self._ending = False
        self._off = False
        # A daemon: even a tracker that hangs in the kernel does not keep the interpreter from exiting.
        self._thread = threading.Thread(target=self._run, name=f"tracker {self.name}", daemon=True)
        self._thread.start()

    def put(self, record: Mapping[str, Any]) -> None:
        with self._changed:
            if self._off or self._ending:
                return
            if len(self._records) >= self._queued:
                self._records.popleft()
                self.dropped += 1
            self._records.append(record)
            self._changed.notify()

    def no_more(self) -> None:
        with self._changed:
            self._ending = True
            self._changed.notify()

    def close(self, deadline: float) -> None:
        self._thread.join(max(0.0, deadline - time.monotonic()))
        late = self._thread.is_alive()
        with self._changed:
            off, self._off = self._off, True
            left = len(self._records)
            self._records.clear()
        if late:
            later = self._tracker.abandon()
            rest = f"; {left} {'record was' if left == 1 else 'records were'} not delivered" if left else ""
            self._say(
                f"note: {self.name} did not finish in time{rest}; metrics.jsonl has everything"
                + (f"; {later}" if later else "")
            )
        if self.dropped and not off:
            self._say(f"note: {self.name} was too slow and missed {self.dropped} records; metrics.jsonl has them")

    def _run(self) -> None:
        try:
            self._tracker.open()
            while (record := self._next()) is not None:
                self._tracker.log(record)
            self._tracker.close()
        except Exception as error:
            with self._changed:
                said, self._off = self._off, True
                self._records.clear()
            if not said:
                self._say(f"warning: {self.name} is disabled: {_reason(error)}; metrics.jsonl has everything")

    def _next(self) -> Mapping[str, Any] | None:
        with self._changed:
            while not self._records and not self._ending:
                self._changed.wait()
            return self._records.popleft() if self._records else None


def _reason(error: Exception) -> str:
    if isinstance(error, ModuleNotFoundError):
        return f"the package {error.name} is not installed (pip install 'stoker[trackers]')"
    first_line = str(error).strip().splitlines()[:1]
    return first_line[0] if first_line else type(error).__name__
