"""Adds up the lines of clock.jsonl: for the checks as one `Observed`, for the report as a timeline of intervals."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import MISSING, dataclass, field, fields, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from stoker.core.errors import UserError
from stoker.core.units import count
from stoker.profile.clock_file import FORMAT, HEADER
from stoker.profile.memory import growth_rate, thinned
from stoker.profile.observed import (
    AcceleratorFacts,
    BatchTime,
    HostFacts,
    LoaderShape,
    LoopTimes,
    MemoryGrowth,
    Observed,
    SlowSample,
    StageTime,
    StorageFacts,
)
from stoker.profile.step_clock import BATCH_COLUMNS
from stoker.run.folder import RunFolder
from stoker.run.json_lines import LARGEST_NUMBER, MOST_LINES, JsonLines, Record, finite, number

NEWEST = 400
"""Single steps and batches that are read back: enough to simulate the loader with, and no older than a few hours."""
SLOWEST_SAMPLES = 16
MOST_STAGES = 20
"""We write five; a damaged file must not turn that into thousands."""
PARTS = ("wait", "transfer", "compute", "other")
"""The parts of a step, in the order in which they are drawn."""
MEMORY = ("process_bytes", "device_bytes", "shm_used_bytes", "available_bytes")

_STEP_SUMS = (
    "steps", "samples", "elapsed_s", "wait_s", "transfer_s", "compute_s", "other_s", "consumer_cpu_s",
    "consumer_runq_s", "made_samples", "batch_bytes",
)  # fmt: skip
_STAGE_SUMS = ("wall_s", "cpu_s", "runq_s", "blocked_s", "read_bytes", "calls")


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
    lines = JsonLines(path, ClockSums)
    lines.refresh()
    if lines.problem is not None:
        raise UserError("no-clock", f"{path}: {lines.problem}", hint="stoker doctor CONFIG    # measures again")
    return lines.records.observed(str(path), damaged=lines.broken)


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
        self.run = LineSums()
        """The whole run."""
        # The sums since the last change of set-up; the same object until there is a change.
        self._setup = self.run
        self._header: Record | None = None
        self._foreign_format: Record | None = None

    def append(self, record: Record) -> None:
        if record.get("event") == HEADER:
            self._begin(record)
        elif record.get("kind") in ("step", "epoch"):
            self.run.add(record)
            if self._setup is not self.run:
                self._setup.add(record)
            self._add_interval(record)

    def observed(self, name: str, *, damaged: int = 0) -> Observed:
        """The record that the checks judge; `name` is the file's, for error messages, and `damaged` the number of its
        lines that were skipped.

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
        try:
            observed = self._setup.observed(self._header)
        except ValueError as error:
            raise UserError(
                "no-clock",
                f"{name}: the line about the run's set-up is damaged: {error}",
                why="without it the numbers cannot be interpreted",
                hint="stoker doctor CONFIG    # measures again",
            ) from None
        if not damaged:
            return observed
        note = f"{count(damaged, 'damaged line')} of {Path(name).name}, which were skipped"
        return replace(observed, missing=(*observed.missing, note))

    def _begin(self, header: Record) -> None:
        if header.get("format") != FORMAT and self._foreign_format is None:
            self._foreign_format = header
        # With other workers, cores or devices, earlier lines say nothing about the run as it is now.
        before = self._header
        if not self.run.is_empty if before is None else _setup_of(before) != _setup_of(header):
            self._setup = LineSums()
        # A process that has just started, or other workers: earlier figures do not describe their memory.
        self._setup.memory.clear()
        self._header = header

    def _add_interval(self, record: Record) -> None:
        steps, step, elapsed_s = amount(record, "steps"), amount(record, "step"), amount(record, "elapsed_s")
        parts = {part: seconds for part in PARTS if (seconds := amount(record, f"{part}_s")) is not None}
        if steps is None or steps < 1 or step is None or "wait" not in parts or len(self.intervals) >= MOST_LINES:
            return
        if elapsed_s is not None and "compute" in parts:
            # Time in which the device computes while the loop waits counts once, as waiting: that can be fixed.
            hidden_s = max(0.0, sum(parts.values()) - elapsed_s)
            parts["compute"] = max(0.0, parts["compute"] - hidden_s)
        samples, epoch, memory = amount(record, "samples"), amount(record, "epoch"), record.get("memory")
        # The throughput includes the stall at the start of an epoch: on a timeline it has to be visible.
        seconds = sum(parts.values()) + sum(finite_in(record.get("epoch_starts_s")))
        world = amount(self._header or {}, "world") or 1.0
        self.intervals.append(
            StepTimes(
                step=int(step),
                epoch=None if epoch is None else int(epoch),
                steps=int(steps),
                parts_s=parts,
                images_per_second=world * samples / seconds if samples and seconds else None,
                longest_s=amount(record, "longest_s"),
                memory_bytes={name: value for name in MEMORY if (value := amount(memory, name)) is not None}
                if isinstance(memory, dict)
                else {},
            )
        )


class LineSums:
    """The sum of some lines."""

    def __init__(self) -> None:
        self.is_empty = True
        self.totals: dict[str, float] = {}
        self.epoch_starts_s: list[float] = []
        self.slowest: list[SlowSample] = []
        """The slowest samples, each once, the slowest first."""
        self._stages: dict[str, dict[str, float | None]] = {}
        self._newest_steps: deque[tuple[float, float]] = deque(maxlen=NEWEST)
        self._newest_batches: deque[BatchTime] = deque(maxlen=NEWEST)
        self._host: Record = {}
        self._shm_used_bytes: float | None = None
        self._shares: dict[str, list[float]] = {"throttled_share": [0, 0.0], "cpu_busy_share": [0, 0.0]}
        """How often each was measured, and the sum."""
        self.memory: list[tuple[float, float, float]] = []
        """When it was measured, and the bytes of the training process and of its workers."""

    def add(self, record: Record) -> None:
        self.is_empty = False
        # Sums belong together: where one of these is damaged, the line's steps are not counted.
        whole = all(amount(record, name) is not None for name in ("steps", "elapsed_s", "wait_s"))
        for name in (*(_STEP_SUMS if whole else ()), "validation_s", "saving_s"):
            # Slightly too much of the host's CPU time may have been subtracted.
            value = number(record, name) if name == "consumer_cpu_s" else amount(record, name)
            if value is not None:
                self.totals[name] = self.totals.get(name, 0.0) + value
        self.epoch_starts_s += finite_in(record.get("epoch_starts_s"))[: MOST_LINES - len(self.epoch_starts_s)]
        self._add_stages(record.get("stages"))
        self._add_newest(record)
        self._add_slowest(record)
        self._add_host(record.get("host"))
        self._add_memory(record)

    def _add_stages(self, stages: Any) -> None:
        for name, stage in stages.items() if isinstance(stages, dict) else ():
            if not isinstance(stage, dict) or (name not in self._stages and len(self._stages) >= MOST_STAGES):
                continue
            sums = self._stages.setdefault(name, {})
            for part in _STAGE_SUMS:
                if part in stage:
                    known, value = sums.get(part, 0.0), amount(stage, part)
                    # A part that was not measured once is not known in the sum either.
                    sums[part] = None if value is None or known is None else known + value

    def _add_newest(self, record: Record) -> None:
        waits, rests, batches = record.get("waits_s"), record.get("steps_s"), record.get("batches")
        if isinstance(waits, list) and isinstance(rests, list):
            for wait_s, rest_s in zip(map(finite, waits), map(finite, rests), strict=False):
                if wait_s is not None and rest_s is not None:
                    self._newest_steps.append((wait_s, rest_s))
        for row in batches if isinstance(batches, list) else ():
            batch = batch_time(row)
            if batch is not None:
                self._newest_batches.append(batch)

    def _add_slowest(self, record: Record) -> None:
        samples, typical_s = record.get("slowest"), amount(record, "typical_sample_s")
        if not isinstance(samples, list) or typical_s is None:
            return
        known = {sample.name: sample for sample in self.slowest}
        for sample in samples:
            seconds = amount(sample, "seconds") if isinstance(sample, dict) else None
            if seconds is not None:
                name = str(sample.get("name", "?"))[:LONGEST_NAME]
                if name not in known or known[name].seconds < seconds:
                    known[name] = SlowSample(name, seconds, typical_s)
        self.slowest = sorted(known.values(), key=lambda sample: -sample.seconds)[:SLOWEST_SAMPLES]

    def _add_host(self, host: Any) -> None:
        if not isinstance(host, dict):
            return
        self._host = host
        used = amount(host, "shm_used_bytes")
        if used is not None:
            self._shm_used_bytes = max(used, self._shm_used_bytes or 0.0)
        for name, sums in self._shares.items():
            share = amount(host, name)
            if share is not None:
                sums[0] += 1
                sums[1] += share

    def _add_memory(self, record: Record) -> None:
        memory, at_s = record.get("memory"), amount(record, "time")
        if isinstance(memory, dict) and at_s is not None:
            own, children = amount(memory, "own_bytes"), amount(memory, "children_bytes")
            if own is not None and children is not None:
                self.memory = thinned([*self.memory, (at_s, own, children)])

    def _memory_growth(self, header: Record, loader: LoaderShape) -> MemoryGrowth | None:
        if not self.memory:
            return None
        began, ended = self.memory[0], self.memory[-1]
        grown_own, grown_children = ended[1] - began[1], ended[2] - began[2]
        own = growth_rate([(at_s, bytes_) for at_s, bytes_, _ in self.memory])
        children = growth_rate([(at_s, bytes_) for at_s, _, bytes_ in self.memory])
        if grown_own + grown_children <= (amount(header, "may_grow_bytes") or 0.0):
            own, children = (None if rate is None else 0.0 for rate in (own, children))
        workers = loader.workers if loader.engine == "process" else 0
        return MemoryGrowth(
            watched_s=ended[0] - began[0],
            worker_bytes_per_second=children / workers if workers and children is not None else None,
            loop_bytes_per_second=own,
            worker_grown_bytes=grown_children / workers if workers else None,
            loop_grown_bytes=grown_own,
        )

    @property
    def besides_s(self) -> dict[str, float]:
        """Seconds that are in no step."""
        found = {name: self.totals.get(f"{name}_s") for name in ("validation", "saving")}
        if self.epoch_starts_s:
            found["epoch_starts"] = sum(self.epoch_starts_s)
        return {name: seconds for name, seconds in found.items() if seconds is not None}

    @property
    def stages(self) -> dict[str, StageTime]:
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
        totals, stages = self._between_starts(), self.stages
        loader = known_facts(LoaderShape, header.get("loader"))
        return Observed(
            source="run",
            steps=int(totals.get("steps", 0)),
            samples=round(totals.get("samples", 0)),
            times=LoopTimes(
                elapsed_s=totals.get("elapsed_s", 0.0),
                wait_s=totals.get("wait_s", 0.0),
                transfer_s=totals.get("transfer_s"),
                compute_s=totals.get("compute_s"),
                other_s=totals.get("other_s"),
                consumer_cpu_s=max(0.0, totals["consumer_cpu_s"]) if "consumer_cpu_s" in totals else None,
                consumer_runq_s=totals.get("consumer_runq_s"),
                validation_s=totals.get("validation_s"),
                epoch_starts_s=tuple(self.epoch_starts_s),
                waits_s=tuple(wait_s for wait_s, _ in self._newest_steps),
                steps_s=tuple(rest_s for _, rest_s in self._newest_steps),
            ),
            loader=loader,
            stages=stages,
            batches=tuple(self._newest_batches),
            slow_samples=tuple(self.slowest),
            host=self._host_facts(header),
            storage=self._storage_facts(header, loader, stages.get("fetch")),
            accelerator=self._accelerator_facts(header),
            torch_version=of_kind(header.get("torch"), str),
            convolves_3d=of_kind(header.get("convolves_3d"), bool),
            memory=self._memory_growth(header, loader),
            missing=_missing(header, stages),
        )

    def _between_starts(self) -> dict[str, float]:
        """The sums without the first step of each epoch. Its wait is kept apart, and with short epochs a step that
        waits for nothing would make the others look faster than they are: by a tenth if an epoch has six steps."""
        totals, firsts = dict(self.totals), len(self.epoch_starts_s)
        steps, wait_s = totals.get("steps", 0), totals.get("wait_s", 0.0)
        if not 0 < firsts < steps:
            return totals
        others = 1 - firsts / steps
        for name in ("samples", "transfer_s", "compute_s", "other_s", "consumer_cpu_s", "consumer_runq_s"):
            if name in totals:
                totals[name] *= others
        totals["steps"] = steps - firsts
        totals["elapsed_s"] = wait_s + others * (totals.get("elapsed_s", 0.0) - wait_s)
        return totals

    def _host_facts(self, header: Record) -> HostFacts:
        """The newest facts, with the peak of shared memory and the mean of each share."""
        if not self._host:
            return known_facts(HostFacts, {"cpus": header.get("cpus")})
        facts = {"cpus": header.get("cpus")} | self._host
        if self._shm_used_bytes is not None:
            facts["shm_used_bytes"] = int(self._shm_used_bytes)
        facts |= {name: total / count for name, (count, total) in self._shares.items() if count}
        return known_facts(HostFacts, facts)

    def _storage_facts(self, header: Record, loader: LoaderShape, fetch: StageTime | None) -> StorageFacts | None:
        facts = dict(of_kind(header.get("storage"), dict) or {})
        made, read = self.totals.get("made_samples", 0), None if fetch is None else fetch.read_bytes
        if made and read:
            facts["bytes_per_sample"] = read / made
            if loader.samples is not None:
                world = amount(header, "world") or 1.0
                facts.setdefault("dataset_bytes", int(min(LARGEST_NUMBER, read / made * loader.samples * world)))
        return known_facts(StorageFacts, facts) if facts else None

    def _accelerator_facts(self, header: Record) -> AcceleratorFacts | None:
        facts = of_kind(header.get("accelerator"), dict)
        if facts is None:
            return None
        facts = dict(facts)
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
    world = int(amount(header, "world") or 1)
    if world > 1:
        found.append(f"ranks 1 to {world - 1}: only rank 0 records its times")
    return tuple(found)


# Values of a line, each checked: a file may be damaged, or another version's.

MOST = {"workers": 4096, "prefetch": 4096, "threads_per_worker": 4096, "cpus": 1 << 16, "batch_size": 1 << 24}
"""The most of these that a machine may have. They are simulated one by one: a damaged file must not claim a billion."""
LONGEST_NAME = 1000

Facts = TypeVar("Facts")


def amount(record: Record, name: str) -> float | None:
    """The number under this name; None if it is absent, negative or anything else."""
    value = number(record, name)
    return value if value is not None and value >= 0 else None


def of_kind(value: Any, kind: type[Facts]) -> Facts | None:
    return value if isinstance(value, kind) and len(str(value)) <= LONGEST_NAME * 10 else None


def finite_in(values: Any) -> list[float]:
    known = map(finite, values) if isinstance(values, list) else ()
    return [value for value in known if value is not None and value >= 0]


def batch_time(row: Any) -> BatchTime | None:
    if not isinstance(row, list) or len(row) != len(BATCH_COLUMNS):
        return None
    known = [None if value is None else finite(value) for value in row]
    if any(value is not None and (number is None or number < 0) for value, number in zip(row, known, strict=True)):
        return None
    batch = BatchTime(**dict(zip(BATCH_COLUMNS, row, strict=True)))
    return batch if batch.wall_s and batch.samples else None  # neither is ever missing or zero


def known_facts(kind: type[Facts], values: Any) -> Facts:
    """A record of facts from a line. Names that this version does not know are dropped, and so are values of the wrong
    type. Raises ValueError if one of those is missing that every record has."""
    types = _types_of(kind)  # type: ignore[arg-type]
    given = values if isinstance(values, dict) else {}
    good = {name: value for name, value in given.items() if name in types and _is_a(value, types[name], name)}
    for part in fields(kind):  # type: ignore[arg-type]
        if part.name not in good and part.default is MISSING and part.default_factory is MISSING:
            raise ValueError(f"{part.name} is {str(given.get(part.name, 'missing'))[:100]}")
    return kind(**good)


@cache
def _types_of(kind: type[Any]) -> dict[str, tuple[Any, ...]]:
    hints = {name: hint for name, hint in get_type_hints(kind).items() if get_origin(hint) is not tuple}
    return {name: (hint,) if get_origin(hint) is Literal else get_args(hint) or (hint,) for name, hint in hints.items()}


def _is_a(value: Any, types: tuple[Any, ...], name: str) -> bool:
    if value is None or isinstance(value, (bool, str)):
        literal = any(get_origin(kind) is Literal and value in get_args(kind) for kind in types)
        return literal or (type(value) in types and len(str(value)) <= LONGEST_NAME)
    whole, real = type(value) is int and int in types, float in types
    return (whole or real) and finite(value) is not None and 0 <= value <= MOST.get(name, LARGEST_NUMBER)
