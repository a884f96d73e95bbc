"""Where the time of steps and batches went, interval by interval; kept small while it is read."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from stoker.clock.costs import STAGES
from stoker.run.metrics import Record, number

# Columns of numbers for charts, thinned so that a page of a year's training stays small.

Column = list[float | None]

POINTS = 900
"""More than a screen has pixels for: 900 points of 6 digits in 20 columns are 130 KB."""
DIGITS = 5
"""Significant ones: what a chart can show, and a tenth of what a float is written with."""


def columns(
    rows: Sequence[Mapping[str, float | None]], names: Sequence[str], worst: Sequence[str] = (), points: int = POINTS
) -> dict[str, Column]:
    """The rows as columns of at most `points` values each, those without any value left out.

    Neighbours are averaged; of a column in `worst` the largest stays, so that a stall is not averaged away.
    """
    edges = _edges(len(rows), points)
    found: dict[str, Column] = {}
    for name in names:
        merge = max if name in worst else _mean
        column = [_merged([row.get(name) for row in rows[a:b]], merge) for a, b in pairwise(edges)]
        if any(value is not None for value in column):
            found[name] = column
    return found


def rounded(value: float | None, digits: int = DIGITS) -> float | None:
    """The number with as many digits as anybody reads; whole numbers stay whole."""
    if value is None or not math.isfinite(value):
        return None
    if value == int(value) and abs(value) < 1e15:
        return int(value)
    return float(f"{value:.{digits}g}")


def _edges(count: int, points: int) -> list[int]:
    if count <= points:
        return list(range(count + 1))
    return [round(number * count / points) for number in range(points + 1)]


def _merged(values: Sequence[float | None], merge: Callable[[list[float]], float]) -> float | None:
    known = [value for value in values if value is not None and math.isfinite(value)]
    return rounded(merge(known)) if known else None


def _mean(values: list[float]) -> float:
    return values[0] if len(values) == 1 else math.fsum(values) / len(values)


# Where the time of steps went, interval by interval, from metrics.jsonl alone: for runs without clock.jsonl.
#
# A step's line says how fast the epoch has been so far and which share of that was waiting; the difference of two
# lines is what happened between them. Transfer and computing are one there.

PARTS = ("wait", "transfer", "compute", "other")
"""Of a step, in the order in which they are drawn; `rest` stands for the last three where they were not told apart."""


@dataclass(frozen=True)
class StepInterval:
    """The steps between two lines."""

    step: int
    """The last of them."""
    epoch: int | None
    steps: int
    parts_s: dict[str, float]
    """Seconds of all these steps together, by part; what was not measured is absent."""
    images_per_second: float | None = None
    longest_s: float | None = None
    """The longest single step."""
    extra: dict[str, float] = field(default_factory=dict)
    """Memory and the like, at the end of the interval."""

    @property
    def seconds(self) -> float:
        return sum(self.parts_s.values())

    def row(self) -> dict[str, float | None]:
        """As a chart takes it: milliseconds of one step."""
        each = {f"{part}_ms": 1000 * seconds / self.steps for part, seconds in self.parts_s.items()}
        longest = None if self.longest_s is None else 1000 * self.longest_s
        return {
            "step": self.step, "epoch": self.epoch, "longest_ms": longest, "images_per_second": self.images_per_second,
            **each, **self.extra,
        }  # fmt: skip


def intervals_of_metrics(records: Sequence[Record], images_per_step: float | None = None) -> list[StepInterval]:
    """The intervals between the lines of steps; `images_per_step` where it is known from the config."""
    marks = list(_marks(records))
    # The clock of the lines themselves tells how many images a step has, whatever the config and the ranks are.
    pace = [
        (b.time - a.time) / (b.relative - a.relative)
        for a, b in pairwise(marks)
        if a.since == b.since and b.relative > a.relative and b.time > a.time
    ]
    images = statistics.median(pace) if len(pace) >= 3 else images_per_step
    if not images:
        return []
    found = []
    before: _Mark | None = None
    for mark in marks:
        last = _Mark(mark.since, mark.since, mark.epoch, 0.0, 0.0, 0.0)
        if before is not None and before.since == mark.since:
            last = before
        total_s = images * (mark.relative - last.relative)
        wait_s = images * (mark.relative * mark.wait_share - last.relative * last.wait_share)
        steps = mark.step - last.step
        before = mark
        if steps > 0 and total_s > 0:
            wait_s = min(max(0.0, wait_s), total_s)
            parts = {"wait": wait_s, "rest": total_s - wait_s}
            found.append(StepInterval(mark.step, mark.epoch, steps, parts, images * steps / total_s))
    return found


@dataclass(frozen=True)
class _Mark:
    since: int
    """The step at which the clock of the line began: an epoch's start, or a resumed run's."""
    step: int
    epoch: int
    time: float
    relative: float
    """Steps over images a second: seconds, but for the number of images that a step has."""
    wait_share: float


def _marks(records: Iterable[Record]) -> Iterable[_Mark]:
    since = 0
    for record in records:
        kind, step = record.get("kind"), number(record, "step")
        if step is None:
            continue
        if kind == "epoch" or (kind == "event" and record.get("event") == "resumed"):
            since = int(step)
        rate, share = number(record, "images_per_second"), number(record, "wait_share")
        if kind == "step" and rate and share is not None and step > since:
            yield _Mark(
                since, int(step), int(number(record, "epoch") or 0), number(record, "time") or 0.0,
                (step - since) / rate, share,
            )  # fmt: skip


# Where the time of steps and batches went, as clock.jsonl has it; kept small while it is read.
#
# A run of months writes a hundred megabytes of it: of each line only what a page shows is kept.

BESIDES = ("validation", "saving", "epoch_starts")
"""Times that are in no step."""
STAGE_PARTS = ("wall_s", "cpu_s", "runq_s", "blocked_s", "read_bytes")
MEMORY = ("process_bytes", "device_bytes", "shm_used_bytes", "available_bytes")
SLOWEST_SAMPLES = 10


class ClockSums:
    """The lines of clock.jsonl so far."""

    def __init__(self) -> None:
        self.intervals: list[StepInterval] = []
        self.besides_s: dict[str, float] = {}
        self.slowest: list[dict[str, Any]] = []
        self._stages: dict[str, dict[str, float]] = {}
        self._samples = 0.0
        self._world = 1.0

    def append(self, record: Record) -> None:
        """Takes one line; what it lacks, or has as something else than a number, is as if it were not measured."""
        if record.get("kind") == "event":
            self._world = number(record, "world") or 1.0
            return
        self._add_besides(record)
        self._add_stages(record)
        self._add_slowest(record)
        steps, step, elapsed_s = number(record, "steps"), number(record, "step"), number(record, "elapsed_s")
        parts = {part: seconds for part in PARTS if (seconds := number(record, f"{part}_s")) is not None}
        if not steps or step is None or "wait" not in parts:
            return
        if elapsed_s is not None and "compute" in parts:
            # A device that computes while the loop waits is counted once: as waiting, which is what can be cured.
            hidden_s = max(0.0, sum(parts.values()) - elapsed_s)
            parts["compute"] = max(0.0, parts["compute"] - hidden_s)
        images, seconds, epoch = number(record, "samples"), sum(parts.values()), number(record, "epoch")
        # A person who looks at images/s over time wants to see the stall at the start of an epoch.
        seconds += _seconds_of(record.get("epoch_starts_s"))
        rate = self._world * images / seconds if images and seconds else None
        longest_s, memory = number(record, "longest_s"), _bytes_of(record.get("memory"))
        self.intervals.append(
            StepInterval(int(step), None if epoch is None else int(epoch), int(steps), parts, rate, longest_s, memory)
        )

    def stages(self) -> list[dict[str, Any]]:
        """What workers do for one image: microseconds by stage, each split into on-CPU, run-queue and blocked."""
        if not self._samples:
            return []
        found = []
        for name in sorted(self._stages, key=lambda name: (*STAGES, name).index(name)):
            stage = self._stages[name]
            if stage.get("wall_s"):
                told: dict[str, Any] = {"name": name}
                for part in ("wall", "cpu", "runq", "blocked"):
                    if f"{part}_s" in stage:
                        told[f"{part}_us"] = rounded(stage[f"{part}_s"] / self._samples * 1e6)
                if "read_bytes" in stage:
                    told["read_bytes"] = rounded(stage["read_bytes"] / self._samples)
                found.append(told)
        return found

    def _add_besides(self, record: Record) -> None:
        for name in BESIDES:
            if record.get(f"{name}_s") is not None:
                self.besides_s[name] = self.besides_s.get(name, 0.0) + _seconds_of(record[f"{name}_s"])

    def _add_stages(self, record: Record) -> None:
        stages = record.get("stages")
        if not isinstance(stages, dict):
            return
        made = number(record, "made_samples")
        self._samples += (number(record, "samples") if made is None else made) or 0.0
        for name, stage in stages.items():
            if isinstance(stage, dict) and (name in self._stages or len(self._stages) < 20):
                into = self._stages.setdefault(str(name)[:40], {})
                for part in STAGE_PARTS:
                    value = number(stage, part)
                    if value is not None:
                        into[part] = into.get(part, 0.0) + value

    def _add_slowest(self, record: Record) -> None:
        told, typical_s = record.get("slowest"), number(record, "typical_sample_s")
        known = {sample["name"]: sample for sample in self.slowest}
        for sample in told if isinstance(told, list) else []:
            seconds = number(sample, "seconds") if isinstance(sample, dict) else None
            if seconds is None:
                continue
            name, ms = str(sample.get("name", "?"))[:1000], rounded(1000 * seconds) or 0.0
            if name not in known or known[name]["ms"] < ms:
                typical_ms = None if typical_s is None else rounded(1000 * typical_s)
                known[name] = {"name": name, "ms": ms, "typical_ms": typical_ms}
        self.slowest = sorted(known.values(), key=lambda sample: -sample["ms"])[:SLOWEST_SAMPLES]


def _seconds_of(value: Any) -> float:
    """The sum of a number or a list of numbers; of anything else nothing."""
    return sum(number({"": one}, "") or 0.0 for one in (value if isinstance(value, list) else [value]))


def _bytes_of(memory: Any) -> dict[str, float]:
    if not isinstance(memory, dict):
        return {}
    return {name: value for name in MEMORY if (value := number(memory, name)) is not None}
