"""clock.jsonl: where the time of a run's steps and batches went; how it is written and read back."""

from __future__ import annotations

import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Protocol, TypeVar

from stoker.clock.observed import (
    AcceleratorFacts,
    BatchTime,
    HostFacts,
    LoaderShape,
    Observed,
    SlowSample,
    StageTime,
    StorageFacts,
)
from stoker.clock.steps import BATCH_COLUMNS, Interval
from stoker.console import say as say_on_stderr
from stoker.errors import UserError
from stoker.run.folder import RunFolder
from stoker.run.metrics import MetricsFile, Record, read_metrics

# clock.jsonl: where the time of a run's steps and batches went, one line for each interval and epoch.
#
# The first line of every start says how the run is set up (`event: clock`). A line of kind `step` holds the sums over
# the steps since the line before, one of kind `epoch` what was left of its steps, and validation. Seconds of all steps
# together: `elapsed_s` = `wait_s` + `transfer_s` + `compute_s` + `other_s`; apart from these `epoch_starts_s` (waits
# for
# the first batch of an epoch), `validation_s`, `saving_s`. `stages` are all workers' seconds. `waits_s`, `steps_s` and
# `batches` (in the header's `batch_columns`) are single ones, the newest of the interval. About 1.5 kB a line: 156 kB
# for an epoch of 5,004 steps with a line every 50 (results/clock_cost).

FORMAT = 1
HEADER = "clock"
# The kernel's counters are for long times, and a run may write a line every 20 ms.
HOST_EVERY_S = 10.0

NameSamples = Callable[[Sequence[int]], list[str]]


class HostLook(Protocol):
    """Looks at this host now and then (stoker.machine.host.HostWatch)."""

    def look(self) -> None: ...

    def facts(self) -> HostFacts: ...


class ClockFile:
    """Appends what the clock has seen; a disk that is full delays nothing (as metrics.jsonl)."""

    def __init__(
        self,
        path: Path,
        header: dict[str, Any],
        host: HostLook,
        *,
        step: int = 0,
        name_samples: NameSamples | None = None,
        say: Callable[[str], None] = say_on_stderr,
    ) -> None:
        self._file = MetricsFile(path, say)
        self._name_samples = name_samples
        self._watch = host
        self._host_due_s = time.monotonic() + HOST_EVERY_S
        self._host_told = False
        self._file.event(HEADER, step, **header)

    def step(self, step: int, epoch: int, interval: Interval) -> None:
        """The steps since the line before, up to this one."""
        self._file.step(step, epoch, self._record(interval, tell_host=False))

    def epoch(self, step: int, epoch: int, interval: Interval) -> None:
        """What was left of an epoch's steps, and its validation."""
        # Of a run of seconds, too, something is known.
        self._file.epoch(step, epoch, self._record(interval, tell_host=not self._host_told))

    def close(self) -> None:
        self._file.close()

    def _record(self, interval: Interval, *, tell_host: bool) -> dict[str, Any]:
        record = interval_record(interval, self._name_samples)
        self._watch.look()
        if tell_host or time.monotonic() >= self._host_due_s:
            self._host_due_s, self._host_told = time.monotonic() + HOST_EVERY_S, True
            host = self._watch.facts()
            record["host"] = {name: value for name, value in asdict(host).items() if value is not None}
            record["memory"] = _memory(host.page_cache_bytes, host.shm_used_bytes)
        return record


def interval_record(interval: Interval, name_samples: NameSamples | None) -> dict[str, Any]:
    """What a line says of an interval, with the names of its slowest samples."""
    record, cost = interval.as_record(), interval.cost
    if interval.slowest and name_samples is not None:
        found = sorted(interval.slowest, reverse=True)
        names = name_samples([sample for _, sample in found])
        record["slowest"] = [
            # A name may hold bytes that are no text.
            {"name": name.encode("utf-8", "replace").decode(), "seconds": round(seconds, 6)}
            for (seconds, _), name in zip(found, names, strict=True)
        ]
        record["typical_sample_s"] = round(cost.decode_s / max(1, cost.samples), 6)
    return record


def clock_header(
    loader: LoaderShape,
    *,
    cpus: int,
    world: int,
    torch_version: str,
    device: str,
    accelerator: AcceleratorFacts | None = None,
    storage: StorageFacts | None = None,
    convolves_3d: bool | None = None,
) -> dict[str, Any]:
    """The first line of a start: what the lines after it are about."""
    header: dict[str, Any] = {"format": FORMAT, "loader": _known(loader), "cpus": cpus, "world": world}
    header |= {"torch": torch_version, "device": device, "convolves_3d": convolves_3d}
    header |= {"accelerator": _known(accelerator), "storage": _known(storage)}
    header["batch_columns"] = list(BATCH_COLUMNS)
    return {name: value for name, value in header.items() if value is not None}


def _known(record: Any) -> dict[str, Any] | None:
    return None if record is None else {name: value for name, value in asdict(record).items() if value is not None}


def _memory(available: int | None, shm_used: int | None) -> dict[str, int]:
    """Bytes at the end of the interval: this process, what is left, shared memory, the device's allocator."""
    found = {"available_bytes": available, "shm_used_bytes": shm_used, "process_bytes": None}
    with suppress(OSError, ValueError):
        found["process_bytes"] = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    torch = sys.modules.get("torch")  # whoever trains has it
    if torch is not None and torch.cuda.is_initialized():
        found["device_bytes"] = torch.cuda.max_memory_reserved()
    return {name: value for name, value in found.items() if value is not None}


# What a run's clock.jsonl says, as the one record that the checks judge by.

NEWEST = 400
"""Single steps and batches: enough to draw from, and no older than the run's last hours."""
SLOWEST_SAMPLES = 16

Known = TypeVar("Known")


def read_observed(run_folder: Path) -> Observed:
    """Everything that the clock wrote down since the run was last set up as it is now.

    Raises UserError where there is nothing to read, or where another version of this program wrote it.
    """
    path = RunFolder(run_folder).clock_file
    if not path.is_file():
        raise UserError(
            "no-clock",
            f"{run_folder} has no {path.name}",
            why="it tells where the time went; runs of an older version have none"
            if RunFolder(run_folder).metrics_file.exists()
            else "this is no run folder, or its run has not started",
            hint="stoker train again in this folder, or stoker doctor CONFIG for a trial",
        )
    return observed_from(read_metrics(path), str(path))


def observed_from(records: Iterable[Record], name: str) -> Observed:
    """The same from the lines themselves; `name` is for error messages."""
    header: Record | None = None
    sums = _Sums()
    for record in records:
        if record.get("event") == HEADER:
            _check_format(record, name)
            # Other workers, cores or devices: what was before says nothing about the run as it is now.
            if header is not None and _setup(header) != _setup(record):
                sums = _Sums()
            header = record
        elif record["kind"] in ("step", "epoch") and header is not None:
            sums.add(record)
    if header is None:
        raise UserError(
            "no-clock",
            f"{name} does not say which version wrote it",
            why="its first line is missing, so that its numbers cannot be read with certainty",
            hint="stoker doctor CONFIG measures anew",
        )
    return sums.observed(header)


def _check_format(header: Record, name: str) -> None:
    if header.get("format") != FORMAT:
        raise UserError(
            "clock-format",
            f"{name} has format {header.get('format')}; this version reads {FORMAT}",
            why="another version of stoker wrote it, and its numbers may mean something else",
            hint="read it with the version in environment.json, or measure anew: stoker doctor CONFIG",
        )


def _setup(header: Record) -> Record:
    return {name: header.get(name) for name in ("loader", "cpus", "world", "device", "accelerator")}


@dataclass
class _Sums:
    """What lines add up to."""

    parts: dict[str, float] = field(default_factory=dict)
    stages: dict[str, dict[str, float | None]] = field(default_factory=dict)
    epoch_starts: list[float] = field(default_factory=list)
    waits: deque[float] = field(default_factory=lambda: deque(maxlen=NEWEST))
    rests: deque[float] = field(default_factory=lambda: deque(maxlen=NEWEST))
    batches: deque[BatchTime] = field(default_factory=lambda: deque(maxlen=NEWEST))
    slow: list[SlowSample] = field(default_factory=list)
    hosts: list[Record] = field(default_factory=list)

    def add(self, record: Record) -> None:
        for name in (
            "steps", "samples", "elapsed_s", "wait_s", "transfer_s", "compute_s", "other_s", "validation_s",
            "consumer_cpu_s", "made_samples", "batch_bytes",
        ):  # fmt: skip
            if name in record:
                self.parts[name] = self.parts.get(name, 0) + record[name]
        for name, stage in record.get("stages", {}).items():
            into = self.stages.setdefault(name, {})
            for part, value in stage.items():
                known = into.get(part, 0.0)
                into[part] = None if value is None or known is None else known + value
        self.epoch_starts += record.get("epoch_starts_s", [])
        self.waits.extend(record.get("waits_s", []))
        self.rests.extend(record.get("steps_s", []))
        self.batches.extend(
            BatchTime(**dict(zip(BATCH_COLUMNS, row, strict=True))) for row in record.get("batches", [])
        )
        if "slowest" in record:
            typical_s = record["typical_sample_s"]
            self.slow += [SlowSample(slow["name"], slow["seconds"], typical_s) for slow in record["slowest"]]
            self.slow = sorted(self.slow, key=lambda sample: -sample.seconds)[:SLOWEST_SAMPLES]
        if "host" in record:
            self.hosts.append(record["host"])

    def observed(self, header: Record) -> Observed:
        parts = self._between_starts()
        loader = known_parts(LoaderShape, header["loader"])
        return Observed(
            source="run",
            steps=int(parts.get("steps", 0)),
            samples=round(parts.get("samples", 0)),
            elapsed_s=parts.get("elapsed_s", 0.0),
            wait_s=parts.get("wait_s", 0.0),
            transfer_s=parts.get("transfer_s"),
            compute_s=parts.get("compute_s"),
            other_s=parts.get("other_s"),
            consumer_cpu_s=max(0.0, parts["consumer_cpu_s"]) if "consumer_cpu_s" in parts else None,
            validation_s=parts.get("validation_s"),
            epoch_starts_s=tuple(self.epoch_starts),
            waits_s=tuple(self.waits),
            steps_s=tuple(self.rests),
            loader=loader,
            stages={name: _stage_time(stage) for name, stage in self.stages.items()},
            batches=tuple(self.batches),
            slow_samples=tuple(self.slow),
            host=self._host(header),
            storage=self._storage(header, loader),
            accelerator=self._accelerator(header),
            torch_version=header.get("torch"),
            convolves_3d=header.get("convolves_3d"),
            missing=self._missing(header),
        )

    def _between_starts(self) -> dict[str, float]:
        """The sums without the first step of each epoch: its wait stands apart, and a step that waits for nothing
        would make the others, where epochs are short, look faster than they are."""
        parts, firsts = dict(self.parts), len(self.epoch_starts)
        steps, wait_s = parts.get("steps", 0), parts.get("wait_s", 0.0)
        if not 0 < firsts < steps:
            return parts
        others = 1 - firsts / steps
        for name in ("samples", "transfer_s", "compute_s", "other_s", "consumer_cpu_s"):
            if name in parts:
                parts[name] *= others
        parts["steps"] = steps - firsts
        parts["elapsed_s"] = wait_s + others * (parts.get("elapsed_s", 0.0) - wait_s)
        return parts

    def _host(self, header: Record) -> HostFacts:
        """The newest look, with the most that was used of shared memory; shares are means over all looks."""
        if not self.hosts:
            return HostFacts(cpus=header["cpus"])
        merged = dict(self.hosts[-1])
        used = [host["shm_used_bytes"] for host in self.hosts if "shm_used_bytes" in host]
        if used:
            merged["shm_used_bytes"] = max(used)
        for share in ("throttled_share", "cpu_busy_share"):
            values = [host[share] for host in self.hosts if share in host]
            if values:
                merged[share] = sum(values) / len(values)
        return known_parts(HostFacts, merged)

    def _storage(self, header: Record, loader: LoaderShape) -> StorageFacts | None:
        known = dict(header.get("storage", {}))
        made, read = self.parts.get("made_samples", 0), self.stages.get("fetch", {}).get("read_bytes")
        if made and read:
            known["bytes_per_sample"] = read / made
            if loader.samples is not None:
                known.setdefault("dataset_bytes", int(read / made * loader.samples * header.get("world", 1)))
        return known_parts(StorageFacts, known) if known else None

    def _accelerator(self, header: Record) -> AcceleratorFacts | None:
        if "accelerator" not in header:
            return None
        known = dict(header["accelerator"])
        if self.parts.get("transfer_s") and self.parts.get("batch_bytes"):
            known["transfer_bytes_per_second"] = self.parts["batch_bytes"] / self.parts["transfer_s"]
        return known_parts(AcceleratorFacts, known)

    def _missing(self, header: Record) -> tuple[str, ...]:
        found = ["ceiling and loader alone: a run does not stop training to measure them (stoker doctor CONFIG does)"]
        if any(stage.get("cpu_s") is None for stage in self.stages.values()):
            found.append(
                "running, run queue and blocking of the workers: this kernel has no /proc/thread-self/schedstat"
            )
        if header.get("world", 1) > 1:
            found.append(f"ranks 1 to {header['world'] - 1}: the clock of the first one is written")
        return tuple(found)


def _stage_time(stage: dict[str, float | None]) -> StageTime:
    read, calls = stage.get("read_bytes"), stage.get("calls")
    return StageTime(
        wall_s=stage.get("wall_s") or 0.0,
        cpu_s=stage.get("cpu_s"),
        runq_s=stage.get("runq_s"),
        blocked_s=stage.get("blocked_s"),
        read_bytes=None if read is None else int(read),
        calls=int(calls or 0),
    )


def known_parts(kind: type[Known], values: dict[str, Any]) -> Known:
    """A record of facts from a line; what this version does not know is left out."""
    names = {part.name for part in fields(kind)}  # type: ignore[arg-type]
    return kind(**{name: value for name, value in values.items() if name in names})
