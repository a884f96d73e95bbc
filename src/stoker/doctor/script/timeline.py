"""The records of a watched script, and the steps, stages, batches and slow samples that follow from them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from stoker.attach.ring import BUCKETS, FIRST, LAST, FetchRecord, Habits, StepRecord
from stoker.attach.stage_clock import AUGMENT, COLLATE, DECODE, FETCH, OTHER, PREPROCESS, READ_AND_DECODE, SOCKET
from stoker.profile.observed import BatchTime, SlowSample, StageTime

# Loaders that are read side by side (a zip of two) feed every optimizer step; a validation loader feeds, by this
# count, only the first one after it.
SHARE_OF_STEPS_FED = 0.5
MOST_BATCHES = 512
# Four times the median is beyond the spread of image sizes and busy cores (a JPEG of twice the side takes
# four times as long); below 5 ms a single sample delays nothing that a prefetched batch would not hide.
FAR_LONGER, WORTH_NAMING_S = 4.0, 0.005
MOST_SLOW_SAMPLES = 8

RAW_STAGES = {
    "fetch": (FETCH, SOCKET), "decode": (DECODE,), "preprocess": (PREPROCESS,), "augment": (AUGMENT,),
    "collate": (COLLATE,), "other": (OTHER,),
}  # fmt: skip


@dataclass(frozen=True)
class FetchFile:
    """What one process prepared for one loader."""

    pid: int
    loader: int
    """0 in a worker: its parent knows the loader."""
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
    habits: Habits = field(default_factory=Habits)
    shapes: tuple[str, ...] = ()
    worked: tuple[tuple[int, int, str], ...] = ()
    """Calls, elements and name of each filtering function."""
    caches: tuple[tuple[int, int, int, str], ...] = ()
    """Entries, bytes (-1 if unknown), vanished entries and name."""
    grown: tuple[tuple[int, int, int, str], ...] = ()
    """Entries at first, entries now, 1 for a dict, and name."""
    spots: tuple[tuple[int, int, str, str, str], ...] = ()
    """Time in ns, line, function, called library function and path."""


@dataclass(frozen=True)
class StepFile:
    """What one training process took."""

    pid: int
    lost: int
    """Records that newer ones have overwritten."""
    records: tuple[StepRecord, ...]


@dataclass
class About:
    """What one process said about itself."""

    pid: int
    facts: dict[str, Any] = field(default_factory=dict)
    loaders: dict[int, dict[str, Any]] = field(default_factory=dict)
    worker_pids: dict[int, list[int]] = field(default_factory=dict)
    """By loader."""
    died: dict[int, int] = field(default_factory=dict)
    """Workers that were killed, with minus the signal number."""
    notes: list[str] = field(default_factory=list)
    held: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Containers of the loop that got longer, by name."""

    @property
    def rank(self) -> int | None:
        for name in ("in_group_rank", "rank"):
            with suppress(KeyError, TypeError, ValueError):
                return int(self.facts[name])
        return None


@dataclass
class SteadySteps:
    """Steady steps of the training loader, without the first step of each epoch and without validation."""

    loader: int
    waits_s: list[float] = field(default_factory=list)
    works_s: list[float] = field(default_factory=list)
    """The rest of the same steps."""
    samples: int = 0
    unknown_samples: int = 0
    """Steps whose number of samples is not known."""
    compute_s: float | None = None
    """From a batch's arrival to the end of the optimizer step; None if none was seen."""
    cpu_s: float = 0.0
    """CPU time of the process in these steps, including their waits."""
    epoch_starts_s: list[float] = field(default_factory=list)
    validation_s: float | None = None
    device_waited: bool = False
    """Whether waits are those of the device, not of the Python loop."""

    @property
    def elapsed_s(self) -> float:
        return sum(self.waits_s) + sum(self.works_s)


def training_loaders(records: Sequence[StepRecord]) -> list[int]:
    """Loaders that feed the optimizer, the one with the longest waits first; the one with most batches if no optimizer
    step was seen."""
    votes: Counter[int] = Counter()
    since: set[int] = set()
    batches: Counter[int] = Counter()
    waits: Counter[int] = Counter()
    for record in records:
        if record.optimizer_steps:
            votes.update(since)
            since.clear()
        if not record.flags & LAST:
            since.add(record.loader)
            batches[record.loader] += 1
            waits[record.loader] += record.exit_ns - record.enter_ns
    if not batches:
        return []
    if not votes:
        return [batches.most_common(1)[0][0]]
    most = max(votes.values())
    feeding = [loader for loader, count in votes.items() if count >= SHARE_OF_STEPS_FED * most]
    # If two feed equally often, a validation loader of a few batches after each short epoch has more batches for
    # each step that it fed.
    best = min(batches[loader] / votes[loader] for loader in feeding)
    feeding = [loader for loader in feeding if batches[loader] / votes[loader] <= best / SHARE_OF_STEPS_FED]
    return sorted(feeding, key=lambda loader: -waits[loader])


def saw_optimizer(records: Sequence[StepRecord]) -> bool:
    return any(record.optimizer_steps for record in records)


def steady_steps(records: Sequence[StepRecord], feeding: Sequence[int]) -> SteadySteps:
    """The steps of the first of the feeding loaders; time in the others' `__next__` counts as waiting too."""
    steps = SteadySteps(loader=feeding[0])
    computed_ns = 0
    seen_optimizer = saw_optimizer(records)
    for place, record in enumerate(records):
        if record.loader != steps.loader or record.flags & LAST:
            continue
        wait_ns = record.exit_ns - record.enter_ns
        if record.flags & FIRST:
            steps.epoch_starts_s.append((wait_ns + record.iterator_us * 1000) / 1e9)
            continue
        end = _end_of_step(records, place, feeding)
        if end is None:
            continue  # the script ended, or was stopped, within it
        following, waited_elsewhere_ns = end
        if 0 <= record.device_idle_ns < wait_ns:
            # The device still had work while the loop waited: only what it noticed was lost.
            steps.device_waited = True
            wait_ns = record.device_idle_ns
        whole_ns = _begins_ns(following) - record.enter_ns
        wait_ns += waited_elsewhere_ns
        steps.waits_s.append(wait_ns / 1e9)
        steps.works_s.append(max(0, whole_ns - wait_ns) / 1e9)
        steps.cpu_s += max(0, following.enter_cpu_ns - record.enter_cpu_ns) / 1e9
        if record.samples < 0:
            steps.unknown_samples += 1
        else:
            steps.samples += record.samples
        optimizer_end = following.optimizer_end_ns
        computed_end = optimizer_end if optimizer_end > record.exit_ns else _begins_ns(following)
        computed_ns += max(0, computed_end - record.exit_ns - waited_elsewhere_ns)
    if seen_optimizer and steps.waits_s:
        steps.compute_s = min(computed_ns / 1e9, sum(steps.works_s))
    steps.validation_s = _validation_s(records, set(feeding))
    return steps


def _begins_ns(record: StepRecord) -> int:
    """When the loop turned to the loader: before it made the iterator, if it did."""
    return record.enter_ns - record.iterator_us * 1000


def _end_of_step(records: Sequence[StepRecord], place: int, feeding: Sequence[int]) -> tuple[StepRecord, int] | None:
    """The record with which the step at `place` ends, and the waiting for other feeding loaders before it."""
    waited_ns = 0
    for number in range(place + 1, len(records)):  # no slice: a copy of 65,000 records for each step
        record = records[number]
        if record.loader == records[place].loader or record.loader not in feeding:
            return record, waited_ns
        waited_ns += record.exit_ns - record.enter_ns
    return None


def _validation_s(records: Sequence[StepRecord], feeding: set[int]) -> float | None:
    """The time from turning to a loader that does not feed the optimizer until turning back to one that does."""
    total_ns = 0
    began: int | None = None
    last_exit = 0
    for record in records:
        if record.loader in feeding:
            if began is not None:
                total_ns += _begins_ns(record) - began
            began = None
        else:
            began = _begins_ns(record) if began is None else began
            last_exit = record.exit_ns
    if began is not None:
        total_ns += last_exit - began
    return total_ns / 1e9 if last_exit else None


def stages_of(files: Sequence[FetchFile], share: float) -> dict[str, StageTime]:
    """What each stage took, all workers together; times `share`, where the steps' records do not reach back as far."""
    knows = all(file.knows_run_queue for file in files)

    def total(part: str, raw: int) -> float:
        return float(sum(getattr(file, part)[raw] for file in files)) * share / 1e9

    both_wall, both_cpu, both_queue = (total(part, READ_AND_DECODE) for part in ("wall_ns", "cpu_ns", "run_queue_ns"))
    both_blocked = max(0.0, both_wall - both_cpu - both_queue)
    both_calls = sum(file.calls[READ_AND_DECODE] for file in files)
    stages = {}
    for name, raws in RAW_STAGES.items():
        wall, cpu, queue = (sum(total(part, raw) for raw in raws) for part in ("wall_ns", "cpu_ns", "run_queue_ns"))
        calls = sum(file.calls[raw] for file in files for raw in raws)
        # One call that reads and decodes: its blocked time was reading, the rest decoding.
        if name == "fetch":
            wall, calls = wall + both_blocked, calls + both_calls
        elif name == "decode":
            wall, cpu = wall + both_wall - both_blocked, cpu + both_cpu
            queue, calls = queue + both_queue, calls + both_calls
        if calls == 0 and name != "other":
            continue
        stages[name] = StageTime(
            wall_s=wall,
            cpu_s=cpu,
            runq_s=queue if knows else None,
            blocked_s=max(0.0, wall - cpu - queue) if knows else None,
            read_bytes=read_bytes_of(files) if name == "fetch" else None,
            calls=calls,
        )
    return stages


def read_bytes_of(files: Sequence[FetchFile]) -> int | None:
    """Bytes from files and sockets; None where the kernel does not count them.

    A worker with a single batch has not counted; it is assumed to be like the others."""
    counted = [(file.read_bytes, file.batches) for file in files if file.read_bytes is not None]
    if not counted:
        return None
    read = sum(read for read, _ in counted) * sum(file.batches for file in files) / sum(n for _, n in counted)
    return round(read) + sum(file.socket_bytes for file in files)


def batches_of(files: Sequence[FetchFile], starts: Sequence[Sequence[int]]) -> tuple[BatchTime, ...]:
    """The newest batches in the order in which they were handed out: in turns, worker by worker.

    `starts` lists the processes of each iterator, oldest first."""
    turn = {pid: number for number, pids in enumerate(starts) for pid in pids}
    rows = [
        ((turn.get(file.pid, 0), record.epoch, record.number, max(0, file.worker)), file, record)
        for file in files
        for record in file.records
    ]
    rows.sort(key=lambda row: row[0])
    return tuple(
        BatchTime(
            wall_s=record.wall_ns / 1e9,
            cpu_s=record.cpu_ns / 1e9,
            runq_s=record.run_queue_ns / 1e9 if record.run_queue_ns >= 0 else None,
            blocked_s=max(0, record.wall_ns - record.cpu_ns - record.run_queue_ns) / 1e9
            if record.run_queue_ns >= 0
            else None,
            samples=record.samples,
            worker=max(0, file.worker),
            fetch_s=record.fetch_ns / 1e9 if record.fetch_ns >= 0 else None,
            bytes=record.bytes if record.bytes >= 0 else None,
            collect_s=record.collect_us / 1e6,
        )
        for _, file, record in rows[-MOST_BATCHES:]
    )


def slow_samples_of(files: Sequence[FetchFile]) -> tuple[SlowSample, ...]:
    """Samples that took far longer than the median, the slowest first; each by the worst of its times."""
    typical = _median_s(files)
    if typical is None:
        return ()
    worst: dict[str, float] = {}
    for file in files:
        for took, name in file.slow:
            worst[name] = max(worst.get(name, 0.0), took / 1e9)
    far = sorted(
        ((s, name) for name, s in worst.items() if s >= max(FAR_LONGER * typical, WORTH_NAMING_S)), reverse=True
    )
    return tuple(SlowSample(name, seconds, typical) for seconds, name in far[:MOST_SLOW_SAMPLES])


def _median_s(files: Sequence[FetchFile]) -> float | None:
    """The mean of the power of two in which the median lies."""
    counts = [sum(file.histogram[bucket] for file in files) for bucket in range(BUCKETS)]
    sums = [sum(file.histogram[BUCKETS + bucket] for file in files) for bucket in range(BUCKETS)]
    passed = 0
    for count, total in zip(counts, sums, strict=True):
        passed += count
        if count and passed * 2 >= sum(counts):
            return total / count / 1e9
    return None
