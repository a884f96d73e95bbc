"""tune.jsonl: what a search tried, why, what it measured and what it decided, a line each.

`begin` says what is tuned, how and where; `trial` is one run of one process, with what its clock observed; `step` is a
decision; `end` is the outcome. Each line is written at once, so a killed search loses at most the trial under way: the
same command takes the recorded trials instead of running them again.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import socket
import time
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from stoker.core.console import say
from stoker.core.errors import UserError
from stoker.core.files import open_to_append, write_text
from stoker.core.redact import redact
from stoker.core.units import count
from stoker.profile.host import Machine
from stoker.run.json_lines import Record, read_records
from stoker.run.lease import is_locked
from stoker.tune.records import Key, Measured, Outcome, Settings, Step, key_of

FORMAT = 1
MOST_WORKERS = 4096
"""Limit for a line that is read back: workers are simulated one by one."""

Kind = TypeVar("Kind")


_ADAPTERS: dict[Any, TypeAdapter[Any]] = {kind: TypeAdapter(kind) for kind in (Measured, Step, Outcome)}


def as_record(value: Measured | Step | Outcome) -> Record:
    record: Record = _ADAPTERS[type(value)].dump_python(value, mode="json")
    return record


def from_record(kind: type[Kind], record: Any) -> Kind | None:
    """What a line holds; None if it is damaged, or of another version."""
    try:
        found: Kind = _ADAPTERS[kind].validate_python(record)
    except ValidationError:
        return None
    return found


class Journal:
    """The journal of one search; without a path it is kept in memory only."""

    def __init__(self, path: Path | None = None) -> None:
        self.path = path
        self.resumed = 0
        """Trials that were taken over from an earlier start."""
        self._recorded: dict[Key, deque[Measured]] = {}
        self._steps: list[tuple[Any, ...]] = []
        """The decisions that are there already, in order."""
        self._steps_told = 0
        self._noted: dict[str, Record] = {}
        self._descriptor: int | None = None

    def begin(self, facts: Record, *, fresh: bool = False) -> str | None:
        """Opens the file: resumes the same search, or starts anew and returns why, if there was another one.

        `facts["same"]` is what has to be equal for trials to count.
        """
        if self.path is None:
            return None
        if is_locked(self.path):
            raise UserError(
                "search-under-way", f"another `stoker tune` is writing {self.path}",
                why="two at once would slow each other down, and measure that", hint=f"stoker watch {self.path}",
            )  # fmt: skip
        records = [] if fresh else list(read_journal(self.path))
        why_not = _why_not(records, facts)
        same = bool(records) and why_not is None and not fresh
        if same:
            self._take_over(records)
        else:
            write_text(self.path, _line({"kind": "begin", "format": FORMAT, **facts}))
        self._descriptor = open_to_append(self.path)
        if same:
            self._end_half_line()
        # Held until this process ends, however it does: it tells `stoker watch` that the search is under way. Taken
        # last: closing any other descriptor of the file would release it.
        with suppress(OSError):
            fcntl.lockf(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return None if same else why_not

    def recorded(self, settings: Settings) -> Measured | None:
        """The next run of these settings that is already in the journal; each is returned once."""
        runs = self._recorded.get(key_of(settings))
        return runs.popleft() if runs else None

    def trial(self, settings: Settings, measured: Measured) -> None:
        self._write({"kind": "trial", "settings": settings, "measured": as_record(measured)})

    def step(self, step: Step) -> None:
        """Records a decision, unless the journal has it from before."""
        place, self._steps_told = self._steps_told, self._steps_told + 1
        there = self._steps[place] if place < len(self._steps) else None
        if there != (step.number, step.decision, key_of(step.settings)):
            self._write({"kind": "step", **as_record(without_details(step))})

    def note(self, kind: str, **facts: Any) -> None:
        self._write({"kind": kind, **facts})

    def noted(self, kind: str) -> Record | None:
        """What `note` wrote before the search was interrupted."""
        return self._noted.get(kind)

    def end(self, outcome: Outcome) -> None:
        self._write({"kind": "end", **outcome_record(replace(outcome, steps=()))})

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _take_over(self, records: list[Record]) -> None:
        for record in records:
            self._noted[str(record.get("kind"))] = record
            settings = record.get("settings")
            if record.get("kind") == "step" and isinstance(settings, dict):
                self._steps.append((record.get("number"), record.get("decision"), key_of(settings)))
            if record.get("kind") != "trial" or not isinstance(settings, dict):
                continue
            measured = from_record(Measured, record.get("measured"))
            if measured is not None and _is_sane(measured):
                self._recorded.setdefault(key_of(settings), deque()).append(measured)
                self.resumed += 1

    def _end_half_line(self) -> None:
        """Ends a line that a killed search left unfinished: the next one begins on a new line."""
        assert self.path is not None
        with self.path.open("rb") as stream:
            stream.seek(-1, os.SEEK_END)
            whole = stream.read(1) == b"\n"
        if not whole and self._descriptor is not None:
            os.write(self._descriptor, b"\n")

    def _write(self, record: Record) -> None:
        if self._descriptor is not None:
            # One write: a line is complete, or it is the last one.
            os.write(self._descriptor, _line(record).encode())


def open_journal(path: Path, facts: dict[str, Any], same: dict[str, Any], machine: Machine, *, fresh: bool) -> Journal:
    """The journal, resumed or new, and prints which; trials count again if `same` and this machine are unchanged."""
    journal = Journal(path)
    same = {**same, "host": [socket.gethostname(), machine.cpus, machine.accelerators]}
    facts = {"time": time.time(), **facts, "same": same}
    try:
        why_anew = journal.begin(facts, fresh=fresh)
    except OSError as error:
        raise UserError(
            "journal-not-writable",
            f"{path} cannot be written: {error.strerror or error}",
            why="it records every trial, so that an interrupted search can resume",
            hint="run it in a folder of yours, or for a config: --write ~/tuned.yaml",
        ) from None
    if why_anew is not None:
        say(f"note: {journal.path} is replaced: {why_anew}")
    if journal.resumed:
        say(f"resuming: {count(journal.resumed, 'trial')} of {journal.path} will not be run again")
    return journal


def without_details(step: Step) -> Step:
    """The step without what the clock observed, which the lines of its trials have."""

    def short(runs: Iterable[Measured]) -> tuple[Measured, ...]:
        return tuple(replace(run, observed=None) for run in runs)

    return replace(step, measured=short(step.measured), against=short(step.against))


def outcome_record(outcome: Outcome) -> Record:
    """An outcome as plain data, without details."""
    steps, others = (tuple(map(without_details, some)) for some in (outcome.steps, outcome.other_training))
    return as_record(replace(outcome, steps=steps, other_training=others))


def read_journal(path: Path) -> Iterator[Record]:
    """The records of a journal in order; raises UserError if it cannot be read."""
    try:
        yield from read_records(path)
    except OSError as error:
        raise UserError(
            "journal-unreadable", f"{path} cannot be read: {error.strerror or error}", hint=f"ls -l {path}"
        ) from None


def _why_not(records: list[Record], facts: Record) -> str | None:
    """Why trials of an earlier search do not count here; None if they do, or if there are none."""
    if not records:
        return None
    first = records[0]
    if first.get("kind") != "begin" or first.get("format") != FORMAT:
        return "it is damaged, or another version wrote it"
    if any(record.get("kind") == "end" for record in records):
        return "that search had ended"
    before, now = first.get("same"), facts["same"]
    if not isinstance(before, dict):
        return "it is damaged"
    changed = sorted(name for name in {*before, *now} if before.get(name) != now.get(name))
    return f"not the same {', '.join(changed)}" if changed else None


def _is_sane(measured: Measured) -> bool:
    shape = None if measured.observed is None else measured.observed.loader
    if shape is not None and max(shape.workers, shape.prefetch or 0) > MOST_WORKERS:
        return False
    return all(math.isfinite(rate) and rate > 0 for rate in measured.windows)


def _line(record: Record) -> str:
    return json.dumps(redact(record)) + "\n"
