"""What a check is, the `Facts` that it is given, and the thresholds that several checks share."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cached_property

from stoker.core.finding import Estimate, Finding
from stoker.doctor.diagnosis import Prediction
from stoker.doctor.preparing import Filling, filling
from stoker.plan.records import PACKED_BYTES
from stoker.profile.observed import BatchTime, HotSpot, Observed, StageTime

STARVED = 0.10
"""Share of the time from which waiting is worth a fix: below it no change of the data path could give more than
1.11x. TraceML uses the same threshold."""
BLOCKED = 0.5
"""Share of a worker's time from which waiting, not work, is what limits it: more than everything else together."""
QUEUEING = 0.35
"""Share of the time in which workers could run: above it, the cores are short by half. Two workers that fill two cores
stay below (results/verdicts)."""
DELAYS = 0.20
"""Share of the time of preparing a batch: workers that hardly compute may wait for a core most of that time, and it
does not matter."""
IS_FETCH = 0.5
"""Share of the blocked time that must be spent reading to call it storage."""
NO_BYTES = 1024
"""Bytes per sample: a stage that is blocked and reads less than this does not wait for storage."""
ONE_CORE = 0.15
"""How far from exactly one core the sum of all workers may be, to say that one blocks the others."""
SPEED_UP_SURE = 0.9
"""The part of a possible speed-up that a fix is expected to reach: some of it is always lost elsewhere."""
PACK = "stoker pack DATA FOLDER --longest 500 --quality 90"
"""What to type."""


@dataclass(frozen=True)
class Split:
    """How the workers spent the time of preparing batches, as shares of the wall time."""

    cpu: float
    runq: float
    blocked: float
    cpu_s: float
    """Per batch."""
    wall_s: float

    @property
    def queueing(self) -> float:
        """Share of the time in which a worker could run that it spent waiting for a core."""
        wanted = self.cpu + self.runq
        return self.runq / wanted if wanted > 0 else 0.0


@dataclass(frozen=True)
class Facts:
    """An observation, the predictions about it, and the sums that several checks need."""

    observed: Observed
    predictions: tuple[Prediction, ...] = ()

    @property
    def starved(self) -> bool:
        share = self.observed.times.wait_share
        return share is not None and share >= STARVED

    @property
    def epoch_start_share(self) -> float:
        """Share of the time spent waiting for first batches; the very first wait of a run cannot be avoided."""
        starts, elapsed_s = self.observed.times.epoch_starts_s[1:], self.observed.times.elapsed_s
        return sum(starts) / (elapsed_s + sum(starts)) if starts and elapsed_s > 0 else 0.0

    @cached_property
    def split(self) -> Split | None:
        """From the newest batches, or from the stages of all of them; None where the kernel does not provide it."""

        def known(parts: Iterable[BatchTime | StageTime]) -> list[tuple[float, float, float, float]]:
            return [
                (part.wall_s, part.cpu_s, part.runq_s, part.blocked_s)
                for part in parts
                if part.cpu_s is not None and part.runq_s is not None and part.blocked_s is not None
            ]

        rows, stages = known(self.observed.batches), self.observed.stages
        count = len(rows)
        if not rows:
            rows, count = known(stages.values()), self.observed.steps
            if len(rows) < len(stages):
                return None
        if not rows or not count:
            return None
        wall, cpu, runq, blocked = (sum(part) for part in zip(*rows, strict=True))
        return Split(cpu / wall, runq / wall, blocked / wall, cpu / count, wall / count) if wall > 0 else None

    @property
    def is_blocked(self) -> bool:
        return self.split is not None and self.split.blocked >= BLOCKED

    @property
    def waits_for_cores(self) -> bool:
        """Whether workers wait for cores so much that it delays batches."""
        return self.split is not None and self.split.queueing >= QUEUEING and self.split.runq >= DELAYS

    @property
    def has_too_many_threads(self) -> bool:
        """Whether workers wait for cores because they have more threads than there are cores."""
        shape, host = self.observed.loader, self.observed.host
        if shape is None or host is None or not self.waits_for_cores:
            return False
        return shape.workers * (shape.threads_per_worker or 1) > host.cpus

    @cached_property
    def waits_for_bytes(self) -> bool:
        """Whether the blocked time is due to storage: it is in the fetch stage, or, where stages are not distinguished,
        in one that reads."""
        stages = self.observed.stages
        blocked = sum(stage.blocked_s or 0.0 for stage in stages.values())
        if not stages or blocked <= 0:
            return True
        fetch = stages.get("fetch")
        if fetch is not None and (fetch.blocked_s or 0.0) >= IS_FETCH * blocked:
            return True
        other = stages.get("other")
        if other is None or (other.blocked_s or 0.0) < IS_FETCH * blocked:
            return False
        # A reader that we do not know. It waits for storage if it reads.
        if other.read_bytes is not None:
            return other.read_bytes >= NO_BYTES * max(1, self.observed.samples)
        storage = self.observed.storage
        return fetch is None and storage is not None and bool(storage.bytes_per_sample)

    @cached_property
    def busy_workers(self) -> float | None:
        """Share of the time in which a worker prepares a batch; low while the loop waits means that batches are held up
        between the two."""
        shape, elapsed = self.observed.loader, self.observed.times.elapsed_s
        if shape is None or shape.workers == 0 or elapsed <= 0:
            return None
        if self.observed.batches:
            wall_s = statistics.fmean(b.wall_s for b in self.observed.batches) * self.observed.steps
        elif self.observed.stages:
            wall_s = sum(s.wall_s for s in self.observed.stages.values())
        else:
            return None
        return min(1.0, wall_s / (shape.workers * elapsed))

    @cached_property
    def cores_used(self) -> float | None:
        if self.split is None or self.observed.times.elapsed_s <= 0:
            return None
        return self.split.cpu_s * self.observed.steps / self.observed.times.elapsed_s

    @property
    def own_cores(self) -> float:
        """Cores that the workers, the threads that libraries start in them, and the loop use."""
        times, threads = self.observed.times, self.observed.threads
        loop = (times.consumer_cpu_s or 0.0) / times.elapsed_s if times.elapsed_s > 0 else 0.0
        beside = 0.0 if threads is None else (threads.worker_threads_cpu_s or 0.0) / threads.watched_s
        return (self.cores_used or 0.0) + loop + beside

    @cached_property
    def filling(self) -> Filling | None:
        """What fills the memory; as long as something does, more workers are not advised."""
        return filling(self.observed)

    @cached_property
    def takes_turns(self) -> bool:
        """Whether a lock lets one worker compute at a time: together they use one core, are never idle, and do not wait
        for storage. Workers that sleep exactly as long would look the same; that is rare enough."""
        split, shape, used = self.split, self.observed.loader, self.cores_used
        if split is None or shape is None or used is None or shape.workers < 2 or shape.engine == "thread":
            return False
        runnable = split.runq * split.wall_s * self.observed.steps / self.observed.times.elapsed_s
        always_busy = (self.busy_workers or 0.0) > 1 - ONE_CORE
        return abs(used + runnable - 1) <= ONE_CORE and always_busy and not self.waits_for_bytes

    @property
    def spots(self) -> tuple[HotSpot, ...]:
        """The lines that take the time of preparing batches, the costliest first."""
        return () if self.observed.preparation is None else self.observed.preparation.spots

    def prediction(self, prediction_id: str) -> Prediction | None:
        return next((p for p in self.predictions if p.id == prediction_id), None)

    def gain(self, prediction_id: str) -> Estimate | None:
        """The predicted speed-up of a change; None where it was not predicted."""
        found = self.prediction(prediction_id)
        return None if found is None else found.speedup

    @property
    def has_large_files(self) -> bool:
        """Whether packing would make the files smaller, as far as we know."""
        storage = self.observed.storage
        return storage is None or storage.bytes_per_sample is None or storage.bytes_per_sample >= PACKED_BYTES

    @property
    def config_line(self) -> bool:
        """Whether fixes are lines of our config, rather than arguments of the script's DataLoader."""
        return self.observed.source != "script"

    def setting(self, key: str, value: object) -> str:
        """What to type for one setting of the loader."""
        if self.config_line:
            return f"{key}={str(value).lower() if isinstance(value, bool) else value}"
        return f"DataLoader(..., {key}={value})"


def speedup_without(share: float) -> Estimate:
    """The speed-up when this share of the time is gone, at most; a quarter of it may stay."""
    share = min(share, 0.99)
    return Estimate(1 / (1 - 0.75 * share), 1 / (1 - SPEED_UP_SURE * share), 1 / (1 - share))


Loss = Callable[[Facts], float]
"""The share of the time that is lost to one kind of trouble."""


@dataclass(frozen=True)
class DoctorCheck:
    """One thing that can be wrong: its name, what it costs, how the verdict puts it, and the function that looks."""

    name: str
    words: str | None
    loss: Loss | None
    look: Callable[[Facts], Finding | None]

    def __call__(self, facts: Facts) -> Finding | None:
        found = self.look(facts)
        return None if found is None else replace(found, name=self.name)


def check(
    name: str, words: str | None = None, *, loss: Loss | None = None
) -> Callable[[Callable[[Facts], Finding | None]], DoctorCheck]:
    """Declares a check; the module that holds it is listed in `verdict.MODULES`, and there is nothing else to register.

    The verdict is the finding with the largest `loss`. Among checks with the same loss, the first that fires names
    the cause: in the order of the modules, and in the order in which they are written there. A check without a loss is
    never the verdict: it says why something else is slow, or what may go wrong.
    """
    return lambda look: DoctorCheck(name, words, loss, look)


def waiting_for_data(facts: Facts) -> float:
    """The loss of most checks: the share of the time in which the loop waits for a batch."""
    return facts.observed.times.wait_share or 0.0
