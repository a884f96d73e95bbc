"""Adds up the lines of clock.jsonl: for the checks as one `Observed`, for the report as a timeline of intervals."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar

from stoker.clock.file import FORMAT, HEADER
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
from stoker.clock.steps import BATCH_COLUMNS
from stoker.errors import UserError
from stoker.run.folder import RunFolder
from stoker.run.json_lines import Record, finite, number, read_records

NEWEST = 400
"""Single steps and batches that are read back: enough to simulate the loader with, and no older than a few hours."""
SLOWEST_SAMPLES = 16
MOST_STAGES = 20
"""We write five; a damaged file must not make it thousands."""
PARTS = ("wait", "transfer", "compute", "other")
"""The parts of a step, in the order in which they are drawn."""
MEMORY = ("process_bytes", "device_bytes", "shm_used_bytes", "available_bytes")

_STEP_SUMS = (
    "steps", "samples", "elapsed_s", "wait_s", "transfer_s", "compute_s", "other_s", "consumer_cpu_s", "made_samples",
    "batch_bytes",
)  # fmt: skip
_STAGE_SUMS = ("wall_s", "cpu_s", "runq_s", "blocked_s", "read_bytes", "calls")

Facts = TypeVar("Facts")


def read_observed(run_folder: Path) -> Observed:
    """What the clock measured since the run was last set up as it is now.

    Raises UserError `no-clock` if there is nothing to read, `clock-format` if another version wrote it.
    """
    path = RunFolder(run_folder).clock_file
    if not path.is_file():
        raise UserError(
            "no-clock",
            f"{run_folder} has no {path.name}",
            why="the run has not started yet; it records there where the time of its steps goes",
            hint="stoker train in this folder, or stoker doctor CONFIG for a short trial",
        )
    return observed_from(read_records(path), str(path))


def observed_from(records: Iterable[Record], name: str) -> Observed:
    """The same from the lines themselves; `name` is for error messages."""
    sums = ClockSums()
    for record in records:
        sums.append(record)
    return sums.observed(name)


@dataclass(frozen=True, slots=True)
class StepTimes:
    """The steps between two lines."""

    step: int
    """The last of them."""
    epoch: int | None
    steps: int
    parts_s: dict[str, float]
    """Seconds of all these steps by part; a part that was not measured is absent. `rest` stands for all but the wait
    where nothing finer was measured."""
    images_per_second: float | None = None
    longest_s: float | None = None
    """The longest single step."""
    memory_bytes: dict[str, float] = field(default_factory=dict)
    """At the end of the interval."""

    @property
    def seconds(self) -> float:
        return sum(self.parts_s.values())


class ClockSums:
    """What the lines of clock.jsonl add up to, taken one by one so that a run can be followed while it writes.

    A missing value, or one of the wrong type, counts as not measured. A run of months writes a hundred megabytes: only
    a few numbers of each line are kept.
    """

    def __init__(self) -> None:
        self.intervals: list[StepTimes] = []
        self._run = _Sums()
        # The sums since the last change of set-up; the same object until there is a change.
        self._setup = self._run
        self._header: Record | None = None
        self._foreign_format: Record | None = None

    def append(self, record: Record) -> None:
        """Adds one line."""
        if record.get("event") == HEADER:
            self._begin(record)
        elif record.get("kind") in ("step", "epoch"):
            self._run.add(record)
            if self._setup is not self._run:
                self._setup.add(record)
            self._add_interval(record)

    def observed(self, name: str) -> Observed:
        """The record that the checks judge; `name` is the file's, for error messages.

        Raises UserError `no-clock` or `clock-format`."""
        if self._foreign_format is not None:
            raise UserError(
                "clock-format",
                f"{name} has format {self._foreign_format.get('format')}; this version reads {FORMAT}",
                why="another version of stoker wrote it, and its numbers may mean something else",
                hint="read it with the version in environment.json, or measure again: stoker doctor CONFIG",
            )
        if self._header is None:
            raise UserError(
                "no-clock",
                f"{name} does not say which version wrote it",
                why="its first line is missing, and without it the numbers cannot be interpreted",
                hint="stoker doctor CONFIG    # measures again",
            )
        return self._setup.observed(self._header)

    @property
    def besides_s(self) -> dict[str, float]:
        """Seconds of the whole run that are in no step."""
        found = {name: self._run.totals.get(f"{name}_s") for name in ("validation", "saving")}
        if self._run.epoch_starts_s:
            found["epoch_starts"] = sum(self._run.epoch_starts_s)
        return {name: seconds for name, seconds in found.items() if seconds is not None}

    @property
    def made_samples(self) -> float:
        """Samples that all workers made in the whole run."""
        return self._run.totals.get("made_samples", 0.0)

    @property
    def stages(self) -> dict[str, StageTime]:
        """What the workers did in the whole run."""
        return self._run.stage_times()

    @property
    def slowest(self) -> list[SlowSample]:
        """The slowest samples of the whole run, each once, the slowest first."""
        return self._run.slowest

    def _begin(self, header: Record) -> None:
        if header.get("format") != FORMAT and self._foreign_format is None:
            self._foreign_format = header
        # With other workers, cores or devices, earlier lines say nothing about the run as it is now.
        before = self._header
        if not self._run.is_empty if before is None else _setup_of(before) != _setup_of(header):
            self._setup = _Sums()
        self._header = header

    def _add_interval(self, record: Record) -> None:
        steps, step, elapsed_s = number(record, "steps"), number(record, "step"), number(record, "elapsed_s")
        parts = {part: seconds for part in PARTS if (seconds := number(record, f"{part}_s")) is not None}
        if not steps or step is None or "wait" not in parts:
            return
        if elapsed_s is not None and "compute" in parts:
            # Time in which the device computes while the loop waits counts once, as waiting: that can be fixed.
            hidden_s = max(0.0, sum(parts.values()) - elapsed_s)
            parts["compute"] = max(0.0, parts["compute"] - hidden_s)
        samples, epoch, memory = number(record, "samples"), number(record, "epoch"), record.get("memory")
        # The throughput includes the stall at the start of an epoch: on a timeline it has to be visible.
        seconds = sum(parts.values()) + sum(_finite_in(record.get("epoch_starts_s")))
        world = number(self._header or {}, "world") or 1.0
        self.intervals.append(
            StepTimes(
                step=int(step),
                epoch=None if epoch is None else int(epoch),
                steps=int(steps),
                parts_s=parts,
                images_per_second=world * samples / seconds if samples and seconds else None,
                longest_s=number(record, "longest_s"),
                memory_bytes={name: value for name in MEMORY if (value := number(memory, name)) is not None}
                if isinstance(memory, dict)
                else {},
            )
        )


class _Sums:
    """What some lines add up to."""

    def __init__(self) -> None:
        self.is_empty = True
        self.totals: dict[str, float] = {}
        self.epoch_starts_s: list[float] = []
        self.slowest: list[SlowSample] = []
        self._stages: dict[str, dict[str, float | None]] = {}
        self._newest_steps: deque[tuple[float, float]] = deque(maxlen=NEWEST)
        self._newest_batches: deque[BatchTime] = deque(maxlen=NEWEST)
        self._host: Record = {}
        self._shm_used_bytes: float | None = None
        self._shares: dict[str, list[float]] = {"throttled_share": [0, 0.0], "cpu_busy_share": [0, 0.0]}
        """How often each was measured, and the sum."""

    def add(self, record: Record) -> None:
        self.is_empty = False
        # Sums belong together: where one of these is damaged, the line's steps are not counted.
        whole = all(number(record, name) is not None for name in ("steps", "elapsed_s", "wait_s"))
        for name in (*(_STEP_SUMS if whole else ()), "validation_s", "saving_s"):
            value = number(record, name)
            if value is not None:
                self.totals[name] = self.totals.get(name, 0.0) + value
        self.epoch_starts_s += _finite_in(record.get("epoch_starts_s"))
        self._add_stages(record.get("stages"))
        self._add_newest(record)
        self._add_slowest(record)
        self._add_host(record.get("host"))

    def _add_stages(self, stages: Any) -> None:
        for name, stage in stages.items() if isinstance(stages, dict) else ():
            if not isinstance(stage, dict) or (name not in self._stages and len(self._stages) >= MOST_STAGES):
                continue
            sums = self._stages.setdefault(name, {})
            for part in _STAGE_SUMS:
                if part in stage:
                    known, value = sums.get(part, 0.0), number(stage, part)
                    # A part that was not measured once is not known in the sum either.
                    sums[part] = None if value is None or known is None else known + value

    def _add_newest(self, record: Record) -> None:
        waits, rests, batches = record.get("waits_s"), record.get("steps_s"), record.get("batches")
        if isinstance(waits, list) and isinstance(rests, list):
            for wait_s, rest_s in zip(map(finite, waits), map(finite, rests), strict=False):
                if wait_s is not None and rest_s is not None:
                    self._newest_steps.append((wait_s, rest_s))
        for row in batches if isinstance(batches, list) else ():
            batch = _batch_time(row)
            if batch is not None:
                self._newest_batches.append(batch)

    def _add_slowest(self, record: Record) -> None:
        samples, typical_s = record.get("slowest"), number(record, "typical_sample_s")
        if not isinstance(samples, list) or typical_s is None:
            return
        known = {sample.name: sample for sample in self.slowest}
        for sample in samples:
            seconds = number(sample, "seconds") if isinstance(sample, dict) else None
            if seconds is not None:
                name = str(sample.get("name", "?"))[:1000]
                if name not in known or known[name].seconds < seconds:
                    known[name] = SlowSample(name, seconds, typical_s)
        self.slowest = sorted(known.values(), key=lambda sample: -sample.seconds)[:SLOWEST_SAMPLES]

    def _add_host(self, host: Any) -> None:
        if not isinstance(host, dict):
            return
        self._host = host
        used = number(host, "shm_used_bytes")
        if used is not None:
            self._shm_used_bytes = max(used, self._shm_used_bytes or 0.0)
        for name, sums in self._shares.items():
            share = number(host, name)
            if share is not None:
                sums[0] += 1
                sums[1] += share

    def stage_times(self) -> dict[str, StageTime]:
        found = {}
        for name, sums in self._stages.items():
            read, calls = sums.get("read_bytes"), sums.get("calls")
            found[name] = StageTime(
                wall_s=sums.get("wall_s") or 0.0,
                cpu_s=sums.get("cpu_s"),
                runq_s=sums.get("runq_s"),
                blocked_s=sums.get("blocked_s"),
                read_bytes=None if read is None else int(read),
                calls=int(calls or 0),
            )
        return found

    def observed(self, header: Record) -> Observed:
        totals, stages = self._between_starts(), self.stage_times()
        loader = known_facts(LoaderShape, header["loader"])
        return Observed(
            source="run",
            steps=int(totals.get("steps", 0)),
            samples=round(totals.get("samples", 0)),
            elapsed_s=totals.get("elapsed_s", 0.0),
            wait_s=totals.get("wait_s", 0.0),
            transfer_s=totals.get("transfer_s"),
            compute_s=totals.get("compute_s"),
            other_s=totals.get("other_s"),
            consumer_cpu_s=max(0.0, totals["consumer_cpu_s"]) if "consumer_cpu_s" in totals else None,
            validation_s=totals.get("validation_s"),
            epoch_starts_s=tuple(self.epoch_starts_s),
            waits_s=tuple(wait_s for wait_s, _ in self._newest_steps),
            steps_s=tuple(rest_s for _, rest_s in self._newest_steps),
            loader=loader,
            stages=stages,
            batches=tuple(self._newest_batches),
            slow_samples=tuple(self.slowest),
            host=self._host_facts(header),
            storage=self._storage_facts(header, loader, stages.get("fetch")),
            accelerator=self._accelerator_facts(header),
            torch_version=header.get("torch"),
            convolves_3d=header.get("convolves_3d"),
            missing=_missing(header, stages),
        )

    def _between_starts(self) -> dict[str, float]:
        """The sums without the first step of each epoch. Its wait is kept apart, and with short epochs a step that
        waits for nothing would make the others look faster than they are."""
        totals, firsts = dict(self.totals), len(self.epoch_starts_s)
        steps, wait_s = totals.get("steps", 0), totals.get("wait_s", 0.0)
        if not 0 < firsts < steps:
            return totals
        others = 1 - firsts / steps
        for name in ("samples", "transfer_s", "compute_s", "other_s", "consumer_cpu_s"):
            if name in totals:
                totals[name] *= others
        totals["steps"] = steps - firsts
        totals["elapsed_s"] = wait_s + others * (totals.get("elapsed_s", 0.0) - wait_s)
        return totals

    def _host_facts(self, header: Record) -> HostFacts:
        """The newest facts, with the peak of shared memory and the mean of each share."""
        if not self._host:
            return HostFacts(cpus=header["cpus"])
        facts = dict(self._host)
        if self._shm_used_bytes is not None:
            facts["shm_used_bytes"] = int(self._shm_used_bytes)
        facts |= {name: total / count for name, (count, total) in self._shares.items() if count}
        return known_facts(HostFacts, facts)

    def _storage_facts(self, header: Record, loader: LoaderShape, fetch: StageTime | None) -> StorageFacts | None:
        facts = dict(header.get("storage", {}))
        made, read = self.totals.get("made_samples", 0), None if fetch is None else fetch.read_bytes
        if made and read:
            facts["bytes_per_sample"] = read / made
            if loader.samples is not None:
                facts.setdefault("dataset_bytes", int(read / made * loader.samples * header.get("world", 1)))
        return known_facts(StorageFacts, facts) if facts else None

    def _accelerator_facts(self, header: Record) -> AcceleratorFacts | None:
        if "accelerator" not in header:
            return None
        facts = dict(header["accelerator"])
        if self.totals.get("transfer_s") and self.totals.get("batch_bytes"):
            facts["transfer_bytes_per_second"] = self.totals["batch_bytes"] / self.totals["transfer_s"]
        return known_facts(AcceleratorFacts, facts)


def _setup_of(header: Record) -> Record:
    return {name: header.get(name) for name in ("loader", "cpus", "world", "device", "accelerator")}


def _missing(header: Record, stages: dict[str, StageTime]) -> tuple[str, ...]:
    found = [
        "the ceiling and the loader's own throughput: a run does not stop training to measure them; "
        "`stoker doctor CONFIG` does"
    ]
    if any(stage.cpu_s is None for stage in stages.values()):
        found.append("CPU, run-queue and blocked time of the workers: this kernel has no /proc/thread-self/schedstat")
    if header.get("world", 1) > 1:
        found.append(f"ranks 1 to {header['world'] - 1}: only rank 0 records its times")
    return tuple(found)


def _finite_in(values: Any) -> list[float]:
    known = map(finite, values) if isinstance(values, list) else ()
    return [value for value in known if value is not None]


def _batch_time(row: Any) -> BatchTime | None:
    if not isinstance(row, list) or len(row) != len(BATCH_COLUMNS):
        return None
    if any(value is not None and finite(value) is None for value in row):
        return None
    batch = BatchTime(**dict(zip(BATCH_COLUMNS, row, strict=True)))
    return None if batch.wall_s is None or batch.samples is None else batch


def known_facts(kind: type[Facts], values: Record) -> Facts:
    """A record of facts from a line; names that this version does not know are dropped."""
    names = {part.name for part in fields(kind)}  # type: ignore[arg-type]
    return kind(**{name: value for name, value in values.items() if name in names})
