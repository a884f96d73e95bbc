"""The files that a watched script and its workers have left, read back."""

from __future__ import annotations

import json
import struct
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stoker.doctor.attach.inside import ring
from stoker.doctor.attach.inside.ring import FetchRecord, StepRecord
from stoker.doctor.attach.inside.stages import STAGE_COUNT
from stoker.errors import UserError

ABOUT_FILES = "about-*.jsonl"


def has_records(folder: Path) -> bool:
    """Whether the clock was hung into a script that wrote here."""
    return folder.is_dir() and any(folder.glob(ABOUT_FILES))


@dataclass(frozen=True)
class FetchFile:
    """What one process made for one loader."""

    pid: int
    loader: int
    """0 in a worker, whose loader its parent knows."""
    batches: int
    samples: int
    read_bytes: int | None
    socket_bytes: int
    worker: int
    threads: int
    knows_run_queue: bool
    wall_ns: tuple[int, ...]
    cpu_ns: tuple[int, ...]
    run_queue_ns: tuple[int, ...]
    calls: tuple[int, ...]
    histogram: tuple[int, ...]
    slow: tuple[tuple[int, str], ...]
    path: str | None
    records: tuple[FetchRecord, ...]


@dataclass(frozen=True)
class StepFile:
    """What one training process took."""

    pid: int
    steps: int
    done: bool
    began_ns: int
    lost: int
    """Records that newer ones have overwritten."""
    records: tuple[StepRecord, ...]


@dataclass
class About:
    """What one process said of itself."""

    pid: int
    facts: dict[str, Any] = field(default_factory=dict)
    loaders: dict[int, dict[str, Any]] = field(default_factory=dict)
    worker_pids: dict[int, list[int]] = field(default_factory=dict)
    """By loader."""
    died: dict[int, int] = field(default_factory=dict)
    """Workers that were killed, and minus the signal."""
    notes: list[str] = field(default_factory=list)

    @property
    def rank(self) -> int | None:
        for name in ("in_group_rank", "rank"):
            with suppress(KeyError, TypeError, ValueError):
                return int(self.facts[name])
        return None


def read_about(folder: Path) -> dict[int, About]:
    """What each process said, by its number; a line that was cut off by its death is left out."""
    found: dict[int, About] = {}
    for path in sorted(folder.glob(ABOUT_FILES)):
        about = About(int(path.stem.split("-")[1]))
        for line in path.read_text(errors="replace").splitlines():
            with suppress(ValueError):
                _take_in(about, json.loads(line))
        found[about.pid] = about
    return found


def _take_in(about: About, said: dict[str, Any]) -> None:
    if "note" in said:
        about.notes.append(said["note"])
    elif "worker_died" in said:
        about.died[said["worker_died"]] = said["exit_code"]
    elif "workers_of" in said:
        about.worker_pids.setdefault(said["workers_of"], []).extend(said["pids"])
    elif "loader" in said:
        about.loaders[said.pop("loader")] = said
    else:
        about.facts |= said


def read_steps(folder: Path) -> list[StepFile]:
    """The records of every training process."""
    files = []
    for path in sorted(folder.glob("steps-*.ring")):
        data = path.read_bytes()
        if not _is_whole(data, path, ring.STEP):
            continue
        steps, done, began = ring.STEP_MARKS.unpack_from(data, ring.STEP_MARKS_AT)
        rows, lost = _records(data, ring.STEP)
        pid = int(path.stem.split("-")[1])
        files.append(StepFile(pid, steps, bool(done), began, lost, tuple(StepRecord(*row) for row in rows)))
    return files


def read_fetches(folder: Path) -> list[FetchFile]:
    """The records of every process that made batches."""
    files = []
    for path in sorted(folder.glob("fetch-*.ring")):
        data = path.read_bytes()
        if _is_whole(data, path, ring.FETCH_STRUCT):
            files.append(_read_fetch(path, data))
    return files


def _read_fetch(path: Path, data: bytes) -> FetchFile:
    _, pid, loader = path.stem.split("-")
    batches, samples, read, from_sockets, worker, threads, knows, *stages = ring.TOTALS.unpack_from(
        data, ring.TOTALS_AT
    )
    wall, off_core, queue, calls = (tuple(stages[part * STAGE_COUNT : (part + 1) * STAGE_COUNT]) for part in range(4))
    cpu = tuple(whole - off for whole, off in zip(wall, off_core, strict=True))
    slow = []
    for place in range(ring.SLOW_COUNT):
        took, name = ring.SLOW.unpack_from(data, ring.SLOW_AT + place * ring.SLOW.size)
        if took:
            slow.append((took, name.rstrip(b"\0").decode(errors="replace")))
    opened = ring.PATH.unpack_from(data, ring.PATH_AT)[0].rstrip(b"\0").decode(errors="replace")
    rows, _ = _records(data, ring.FETCH_STRUCT)
    return FetchFile(
        int(pid), int(loader), batches, samples, read if read >= 0 else None, from_sockets, worker, threads,
        bool(knows), wall, cpu, queue, calls, ring.HISTOGRAM.unpack_from(data, ring.HISTOGRAM_AT), tuple(slow),
        opened or None, tuple(FetchRecord(*row) for row in rows),
    )  # fmt: skip


def _is_whole(data: bytes, path: Path, record: struct.Struct) -> bool:
    """False for a file whose process died while it made it; refuses one of another version."""
    if len(data) < ring.HEADER_BYTES:
        return False
    magic, version, size, _ = ring.HEAD.unpack_from(data)
    if magic != ring.MAGIC:
        return False
    if version != ring.VERSION or size != record.size:
        raise UserError(
            "record-of-another-version",
            f"{path} was written in version {version} of the format; this is version {ring.VERSION}",
            hint="record the script again with this version: stoker doctor -- python your_script.py",
        )
    return True


def _records(data: bytes, record: struct.Struct) -> tuple[list[tuple[Any, ...]], int]:
    """The records that are left, oldest first, and how many are not."""
    (count,) = ring.COUNT.unpack_from(data, ring.COUNT_AT)
    capacity = ring.HEAD.unpack_from(data)[3]
    kept = min(count, capacity)
    places = [(count - kept + number) % capacity for number in range(kept)]
    return [record.unpack_from(data, ring.HEADER_BYTES + place * record.size) for place in places], count - kept
