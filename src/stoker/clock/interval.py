"""The steps between two lines of the clock's file: sums of all, the details of the newest few."""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from stoker.clock.costs import BatchCost
from stoker.facts.observed import BatchTime

# Consecutive ones, so that head-of-line waits and every worker's turn are among them: 40 lines of 8 are the few
# hundred that a simulation of the loader draws from, and a line stays below a kilobyte and a half.
KEPT_STEPS = 8
MOST_SLOW_SAMPLES = 16
# Microseconds: what lies below is noise of the measuring itself.
_DIGITS = 6
_SUMS = (
    "elapsed_s", "wait_s", "transfer_s", "compute_s", "other_s", "consumer_cpu_s", "longest_s", "validation_s",
)  # fmt: skip

Record = dict[str, Any]


@dataclass
class Interval:
    """What some steps took, all together. The first wait of an epoch, validation and saving are in no other sum."""

    steps: int = 0
    samples: int = 0
    elapsed_s: float = 0.0
    """Of the steps: wait + transfer + compute + other."""
    wait_s: float = 0.0
    transfer_s: float | None = None
    """On the device; None where the host's memory is the device's."""
    compute_s: float = 0.0
    consumer_cpu_s: float = 0.0
    """CPU time of this process in these steps, all its threads, without the making of batches."""
    longest_s: float = 0.0
    """The longest of the steps."""
    validation_s: float | None = None
    saving_s: float = 0.0
    """The loop stood still for a checkpoint."""
    epoch_starts_s: list[float] = field(default_factory=list)
    """Waits for the first batch of an epoch."""
    cost: BatchCost = field(default_factory=BatchCost)
    """Of all batches of these steps."""
    newest_steps: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=KEPT_STEPS))
    """Wait, and the rest of the step."""
    newest_batches: deque[BatchTime] = field(default_factory=lambda: deque(maxlen=KEPT_STEPS))

    slowest: list[tuple[float, int]] = field(default_factory=list)
    """Seconds and number of the slowest samples, one of each batch at most; a heap."""

    @classmethod
    def keeping(cls, steps: int) -> Interval:
        """One that keeps the details of so many steps and batches."""
        return cls(newest_steps=deque(maxlen=steps), newest_batches=deque(maxlen=steps))

    def note_slowest(self, seconds: float, sample: int) -> None:
        """Remembers a sample where it is among the slowest."""
        if len(self.slowest) < min(MOST_SLOW_SAMPLES, (self.newest_batches.maxlen or 0) // 2):
            heapq.heappush(self.slowest, (seconds, sample))
        elif self.slowest and seconds > self.slowest[0][0]:
            heapq.heapreplace(self.slowest, (seconds, sample))

    @property
    def other_s(self) -> float:
        """What is left of the steps: logging, agreeing with other ranks, Python. Where the device computed while the
        loop waited, nothing is."""
        return max(0.0, self.elapsed_s - self.wait_s - (self.transfer_s or 0.0) - self.compute_s)

    def as_record(self) -> Record:
        """As a line holds it: seconds rounded to microseconds, what was not measured left out."""
        record: Record = {"steps": self.steps, "samples": self.samples}
        for name in _SUMS:
            record[name] = getattr(self, name)
        record |= {"saving_s": self.saving_s or None, "epoch_starts_s": self.epoch_starts_s or None}
        record |= {"made_samples": self.cost.samples, "batch_bytes": self.cost.batch_bytes}
        record["stages"] = {name: self._stage(name) for name in self.cost.stages}
        record["waits_s"] = [wait for wait, _ in self.newest_steps]
        record["steps_s"] = [rest for _, rest in self.newest_steps]
        record["batches"] = [batch_row(batch) for batch in self.newest_batches]
        return {name: _rounded(value) for name, value in record.items() if value is not None}

    def _stage(self, name: str) -> Record:
        stage = self.cost.stages[name]
        parts: Record = {"wall_s": stage.wall_s, "cpu_s": stage.cpu_s, "runq_s": stage.runq_s}
        parts |= {"blocked_s": stage.blocked_s, "calls": stage.calls}
        return parts | ({"read_bytes": self.cost.bytes_read} if name == "fetch" else {})


def batch_time(cost: BatchCost, worker: int) -> BatchTime:
    """The making of one batch, with workers counted from 0."""
    stages = cost.stages
    return BatchTime(
        wall_s=cost.wall_s, cpu_s=cost.on_cpu_s, runq_s=cost.run_queue_s, blocked_s=cost.blocked_s,
        samples=cost.samples, worker=worker, fetch_s=stages["fetch"].wall_s if "fetch" in stages else None,
        bytes=cost.batch_bytes,
    )  # fmt: skip


BATCH_COLUMNS = ("wall_s", "cpu_s", "runq_s", "blocked_s", "samples", "worker", "fetch_s", "bytes")
"""A batch in a line is a list in this order: names would be two thirds of the file."""


def batch_row(batch: BatchTime) -> list[Any]:
    return [getattr(batch, name) for name in BATCH_COLUMNS]


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return round(value, _DIGITS)
    if isinstance(value, dict):
        return {name: _rounded(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_rounded(item) for item in value]
    return value
