"""Where this process writes its records, how long it shall record, and the notes that it leaves."""

from __future__ import annotations

import json
import os
import time
from typing import Any

FOLDER_VARIABLE = "STOKER_ATTACH"
STEPS_VARIABLE = "STOKER_ATTACH_STEPS"
SECONDS_VARIABLE = "STOKER_ATTACH_SECONDS"
LEADING_RANK_VARIABLE = "STOKER_ATTACH_RANK"
RANK_VARIABLES = ("RANK", "SLURM_PROCID")
# A run of months must not fill a disk with notes.
MOST_LINES = 4000


class Session:
    """One process's part of a recording."""

    def __init__(self, folder: str, steps: int | None, seconds: float | None) -> None:
        self.folder = folder
        self.steps = steps
        self.seconds = seconds
        self.recording = True
        self._said: set[str] = set()

    def say(self, **facts: Any) -> None:
        """Appends one line of JSON to this process's facts; at once, so that a crash leaves what was said."""
        line = json.dumps(facts, sort_keys=True)
        if line in self._said or len(self._said) >= MOST_LINES:
            return
        self._said.add(line)
        try:
            path = os.path.join(self.folder, f"about-{os.getpid()}.jsonl")  # noqa: PTH118 - pathlib is slow to import
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
            try:
                os.write(descriptor, line.encode() + b"\n")
            finally:
                os.close(descriptor)
        except OSError:
            self.recording = False

    def note(self, text: str) -> None:
        """Leaves a sentence for the reader of the report."""
        self.say(note=text)

    def failed(self, what: str, error: BaseException) -> None:
        """Something of ours did not work: says so, and never again tries to record in this process."""
        self.recording = False
        self.note(f"{what}: {type(error).__name__}: {error}; recording stopped in process {os.getpid()}")

    def after_fork(self) -> None:
        """A child begins its own list: its lines go into a file of its own."""
        self._said = set()


_current: list[Session] = []


def current() -> Session | None:
    """The session of this process; None where nobody watches."""
    return _current[0] if _current else None


def begin(folder: str, steps: int | None = None, seconds: float | None = None) -> Session:
    """Opens the session of this process; a second call gives the first one's."""
    if not _current:
        _current.append(Session(folder, steps, seconds))
        _current[0].say(started_ns=time.perf_counter_ns(), clock_s=time.time(), rank=rank_of_environment())
    return _current[0]


def rank_of_environment() -> int | None:
    """The rank that a launcher gave to this process."""
    for name in RANK_VARIABLES:
        value = os.environ.get(name, "")
        if value.isdigit():
            return int(value)
    return None


def leading_rank() -> int:
    """The rank whose steps count: 0, or our own where the doctor itself was started once for each rank."""
    value = os.environ.get(LEADING_RANK_VARIABLE, "")
    return int(value) if value.isdigit() else 0
