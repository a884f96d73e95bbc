"""Where the time of steps went, interval by interval, from metrics.jsonl alone: for runs without clock.jsonl.

A step's line says how fast the epoch has been so far and which share of that was waiting; the difference of two
lines is what happened between them. Transfer and computing are one there.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from stoker.output.report.json_lines import Record, number

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
