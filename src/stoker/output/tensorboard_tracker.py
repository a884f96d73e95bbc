"""TensorBoard's events in the run folder, without importing torch or TensorFlow for it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stoker.output.metrics_file import metrics_of


class TensorboardTracker:
    """Scalars under their own names; every record is on disk before the next is taken."""

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
            # TensorBoard then forgets what the lost part of the run had written from this step on.
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
