"""Trackers: W&B, TensorBoard, CSV. None of them can delay or stop a step.

Each has its own thread and queue. A full queue drops its oldest record; a tracker that fails is reported once and
disabled. metrics.jsonl does not pass through here: trackers get copies of what it holds.
"""

from __future__ import annotations

import csv
import netrc
import os
import secrets
import string
import threading
import time
import urllib.error
import urllib.request
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

from stoker.config import Config, config_values
from stoker.core.child import Child, ChildDied, ChildFailed, Parent
from stoker.core.console import Say
from stoker.core.console import say as say_on_stderr
from stoker.core.errors import StokerError, UserError
from stoker.core.files import atomic_file, read_regular, write_text
from stoker.core.redact import redact
from stoker.run.folder import RunFolder
from stoker.run.metrics import metrics_of, read_metrics

QUEUED_RECORDS = 10_000
CLOSE_S = 8.0
"""W&B needs one to four seconds to finish a run over a good connection; a dead one must not hold the machine."""


class Tracker(Protocol):
    """All but `abandon` are called in the tracker's own thread, and may take their time or raise."""

    name: str

    def open(self) -> None: ...
    def log(self, record: Mapping[str, Any]) -> None: ...
    def close(self) -> None:
        return

    def abandon(self) -> str | None:
        """Called from outside when time is up: must end whatever the tracker waits for. Returns what to do later."""
        return None


class CsvTracker(Tracker):
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

    def _keep(self, record: Mapping[str, Any]) -> None:
        self._rows[record["epoch"]] = {"epoch": record["epoch"], "step": record["step"], **metrics_of(record)}

    def _write(self) -> None:
        rows = [self._rows[epoch] for epoch in sorted(self._rows)]
        columns = list(dict.fromkeys([*self._columns, *(name for row in rows for name in row)]))
        with atomic_file(self._csv_file) as stream:
            writer = csv.DictWriter(stream, columns, restval="", lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)


class TensorboardTracker(Tracker):
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


class Trackers:
    """Several trackers; `log` returns at once, `close` within its timeout.

    Create it on one rank only.
    """

    def __init__(self, trackers: Sequence[Tracker], say: Say = say_on_stderr, queued: int = QUEUED_RECORDS) -> None:
        self._closed = False
        self._lanes = [_Lane(tracker, say, queued) for tracker in trackers]

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


# W&B runs in a child process, not in a thread: importing wandb holds Python's lock for seconds, its exit hooks wait for
# the network, and a process can be killed where a thread cannot.

PROBE_S = 3.0
INIT_S = 20.0
GRACE_S = 2.0
"""Time left after the training process died: the rows are on disk, and `wandb sync` can send them."""


class WandbTracker(Tracker):
    """Online if there is a key and a network, offline otherwise; a resumed run keeps its id."""

    name = "W&B"

    def __init__(self, config: Config, folder: RunFolder, say: Callable[[str], None]) -> None:
        self._say = say
        self._about = {
            "id": run_id(folder.wandb_id_file),
            "project": config.wandb_project,
            "name": config.wandb_name or folder.root.name,
            "folder": str(folder.root.resolve()),
            "config": redact(config_values(config)),
        }
        self._child: Child | None = None
        self._listener = threading.Thread(target=self._listen, name="W&B's notes", daemon=True)
        self._failure: Exception | None = None
        self._kept_in: str | None = None
        self._abandoned = False

    def open(self) -> None:
        self._child = Child(report_to_wandb, self._about, grace_s=GRACE_S)
        self._listener.start()
        if self._abandoned:
            self._child.end(at_once=True)

    def log(self, record: Mapping[str, Any]) -> None:
        assert self._child is not None
        try:
            self._child.send({"step": record["step"], "epoch": record["epoch"], **metrics_of(record)})
        except ChildDied as died:
            self._listener.join(1.0)
            raise self._failure or died from None

    def close(self) -> None:
        assert self._child is not None
        self._child.finish()
        self._listener.join()
        self._child.end()
        if self._failure is not None:
            raise self._failure

    def abandon(self) -> str | None:
        self._abandoned = True
        if self._child is not None:
            self._child.end(at_once=True)
        return f"to send the rest: wandb sync {self._kept_in}" if self._kept_in else None

    def _listen(self) -> None:
        assert self._child is not None
        try:
            self._child.wait(self._hear)
        except (StokerError, ChildFailed) as error:
            self._failure = error

    def _hear(self, message: dict[str, str]) -> None:
        self._kept_in = message["folder"]
        self._say(f"{self.name}: {message['note']}")


def run_id(file: Path) -> str:
    """The run's id at W&B, which a resumed run keeps."""
    with suppress(OSError, ValueError):
        known = read_regular(file, 1000).decode().strip()
        if known:
            return known
    letters = string.ascii_lowercase + string.digits
    new = os.environ.get("WANDB_RUN_ID") or "".join(secrets.choice(letters) for _ in range(8))
    write_text(file, new + "\n")
    return new


# In the child process: it takes rows, and sends notes for the user.


def report_to_wandb(about: dict[str, Any], parent: Parent) -> None:
    """Starts or resumes the run at W&B and logs every row until the parent has no more."""
    # The cores belong to the steps and to the loader's workers; W&B's service inherits this.
    os.nice(10)
    try:
        import wandb
    except ImportError as error:
        seen = f"the wandb package cannot be imported ({error}); pip install 'stoker[trackers]'"
        raise UserError("wandb-not-importable", seen) from None
    run = _start(wandb, about, parent.send)
    for row in parent.messages():
        run.log(row)
    run.finish()


def _start(wandb: Any, about: dict[str, Any], tell: Callable[[dict[str, str]], None]) -> Any:
    """The run at W&B; with WANDB_MODE=disabled no process is started."""
    mode = os.environ.get("WANDB_MODE")
    if mode in ("offline", "dryrun"):
        why: str | None = f"WANDB_MODE={mode}"
    else:
        why = why_offline()
    run = None
    if why is None:
        try:
            run = _init(wandb, about, "online")
        except Exception as error:
            why = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            wandb.teardown()
    if run is None:
        run = _init(wandb, about, "offline")
        folder = Path(run.dir).parent
        tell({"folder": str(folder), "note": f"offline ({why}); to send it later: wandb sync {folder}"})
    else:
        tell({"folder": str(Path(run.dir).parent), "note": run.url})
    # Rows carry our own step: W&B's counter only grows, and would refuse the steps that a resumed run repeats.
    run.define_metric("step")
    run.define_metric("*", step_metric="step")
    return run


def _init(wandb: Any, about: dict[str, Any], mode: str) -> Any:
    wishes = {
        "console": "off",
        "silent": True,
        "init_timeout": INIT_S,
        "x_stats_pid": os.getppid(),  # how busy the training process is, not how busy this one is
        "disable_code": True,
        "save_code": False,
    }
    known = {name: value for name, value in wishes.items() if name in wandb.Settings.model_fields}
    return wandb.init(
        project=about["project"], name=about["name"], id=about["id"], dir=about["folder"], config=about["config"],
        resume="allow", mode=mode, settings=wandb.Settings(**known),
    )  # fmt: skip


def why_offline() -> str | None:
    """Why nothing can be sent (no key, no answer); None if it can. Takes a few seconds at most."""
    base_url = os.environ.get("WANDB_BASE_URL") or "https://api.wandb.ai"
    if not _has_key(base_url):
        return "no key: neither WANDB_API_KEY nor `wandb login`"
    try:
        # Any answer will do.
        urllib.request.urlopen(base_url, timeout=PROBE_S).close()  # noqa: S310
    except urllib.error.HTTPError:
        return None
    except (OSError, ValueError) as error:
        return f"{base_url} does not answer: {getattr(error, 'reason', error)}"
    return None


def _has_key(base_url: str) -> bool:
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    try:
        known = netrc.netrc(os.environ.get("NETRC"))
    except (OSError, netrc.NetrcParseError):
        return False
    return known.authenticators(urlsplit(base_url).hostname or "") is not None
