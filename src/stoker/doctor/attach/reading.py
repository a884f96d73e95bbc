"""What a watched script has left, as one `Observed`."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
from stoker.doctor.attach import timeline
from stoker.doctor.attach.inside.ring import BUCKETS, LAST
from stoker.doctor.attach.inside.stages import AUGMENT, COLLATE, DECODE, FETCH, OTHER, READ_AND_DECODE, SOCKET
from stoker.doctor.attach.records import About, FetchFile, StepFile, has_records, read_about, read_fetches, read_steps
from stoker.errors import UserError
from stoker.machine.storage import mount_of

# From the records of the workers to stages, batches and slow samples of one loader: pure arithmetic.

MOST_BATCHES = 512
# Four times the median is beyond the spread that image sizes and busy cores bring (a JPEG of twice the side takes
# four times as long); below 5 ms a single sample delays nothing that a prefetched batch would not hide.
FAR_LONGER, WORTH_NAMING_S = 4.0, 0.005
MOST_SLOW_SAMPLES = 8

RAW_STAGES = {"fetch": (FETCH, SOCKET), "decode": (DECODE,), "augment": (AUGMENT,), "collate": (COLLATE,), "other": (OTHER,)}  # fmt: skip  # noqa: E501


def stages_of(files: Sequence[FetchFile], share: float) -> dict[str, StageTime]:
    """What each stage took, all workers together; `share` of it where the steps' records do not reach as far back."""
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
        # One call that reads and decodes: what it stood still for was reading, the rest decoding.
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

    A worker that made a single batch has not counted: it is taken for one like the others."""
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


# What a watched script has left, as one `Observed`.

MOST_STEPS = 512
"""Single steps that are kept in an Observed: the newest few hundred."""

LEAST_READ_BYTES = 512


@dataclass(frozen=True)
class Recording:
    """An observation, where there is one, and what has to be said about it in words."""

    observed: Observed | None
    notes: tuple[str, ...]


def read_attached(folder: Path) -> Observed:
    """The observation that `stoker.watch(report=folder)` has left."""
    if not has_records(folder):
        raise UserError(
            "no-record",
            f"{folder} holds no record of a watched script",
            hint="add two lines to the script:  import stoker; stoker.watch(report='FOLDER')",
        )
    recording = read_recording(folder)
    if recording.observed is None:
        raise UserError("nothing-observed", recording.notes[0] if recording.notes else "the script left no batches")
    return recording.observed


def read_recording(folder: Path, host: HostFacts | None = None, rank: int = 0) -> Recording:
    """Whatever was recorded so far; never fails for what is not there."""
    abouts, fetches = read_about(folder), read_fetches(folder)
    notes = list(dict.fromkeys(note for about in abouts.values() for note in about.notes))
    notes += [_death(worker, code) for about in abouts.values() for worker, code in about.died.items()]
    process = _training_process(read_steps(folder), abouts, rank)
    if process is None:
        torch = next((about.facts["torch"] for about in abouts.values() if "torch" in about.facts), None)
        notes.insert(
            0,
            "the script took no batch from a torch DataLoader: there is nothing to say about its data"
            + ("" if torch else "; it never imported torch's data loading"),
        )
        return Recording(None, tuple(notes))
    about = abouts.get(process.pid, About(process.pid))
    others = sum(1 for other in abouts.values() if other.rank not in (None, about.rank) and other.loaders)
    if others:
        notes.append(f"{others + 1} ranks trained; this is rank {about.rank}'s time")
    return Recording(_observe(process, about, fetches, host or _host_of(abouts), notes), tuple(notes))


def _death(worker: int, code: int) -> str:
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    reasons = {
        signal.SIGKILL: "the kernel does that when memory runs out",
        signal.SIGBUS: "most often /dev/shm is full",
        signal.SIGSEGV: "a library that it uses is broken, or is not made for forking",
    }
    reason = f": {reasons[signal.Signals(-code)]}" if -code in reasons else ""
    return f"worker {worker} of a loader was killed by {name}{reason}"


def _training_process(files: Sequence[StepFile], abouts: dict[int, About], rank: int) -> StepFile | None:
    """Of the rank that is asked for, or the only one; of several that trained in turn the one with most batches."""

    def order(file: StepFile) -> tuple[bool, float, int]:
        about = abouts.get(file.pid, About(file.pid))
        fed = timeline.saw_optimizer(file.records)
        return about.rank in (None, rank), fed, len(file.records) + file.lost

    return max((file for file in files if file.records), key=order, default=None)


def _observe(
    process: StepFile, about: About, fetches: Sequence[FetchFile], host: HostFacts | None, notes: list[str]
) -> Observed | None:
    records = process.records
    feeding = timeline.training_loaders(records)
    if not feeding:
        notes.append("a DataLoader was opened, but no batch was taken from it")
        return None
    if not timeline.saw_optimizer(records):
        notes.append("no step of a torch optimizer was seen; the loader with most batches is taken for training's")
    if process.lost:
        notes.append(f"the oldest {process.lost} batches are left out of the sums")
    steps = timeline.steady_steps(records, feeding)
    starts = _processes_of(about, steps.loader, process.pid)
    pids = {pid for group in starts for pid in group}
    made = [file for file in fetches if file.pid in pids and file.loader in (0, steps.loader) and file.batches]
    samples = steps.samples
    if steps.unknown_samples and made:
        samples += round(steps.unknown_samples * sum(f.samples for f in made) / sum(f.batches for f in made))
    taken = len([record for record in records if record.loader == steps.loader and not record.flags & LAST])
    share = taken / (taken + process.lost) if process.lost else 1.0
    work_s = sum(steps.works_s)
    loaders = {record.loader for record in records}
    return Observed(
        source="script",
        steps=len(steps.waits_s),
        samples=samples,
        elapsed_s=steps.elapsed_s,
        wait_s=sum(steps.waits_s),
        compute_s=steps.compute_s,
        other_s=None if steps.compute_s is None else max(0.0, work_s - steps.compute_s),
        consumer_cpu_s=_consumer_cpu_s(steps, made, process.pid),
        validation_s=steps.validation_s,
        epoch_starts_s=tuple(steps.epoch_starts_s),
        waits_s=tuple(steps.waits_s[-MOST_STEPS:]),
        steps_s=tuple(steps.works_s[-MOST_STEPS:]),
        ready_batches=tuple(steps.ready[-MOST_STEPS:]),
        loader=_loader_shape(about.loaders.get(steps.loader), made),
        other_loaders=len(loaders) - 1,
        stages=stages_of(made, share) if made else {},
        batches=batches_of(made, starts),
        slow_samples=slow_samples_of(made),
        host=host,
        storage=_storage(made),
        accelerator=_accelerator(about.facts),
        torch_version=about.facts.get("torch"),
        convolves_3d=about.facts.get("convolves_3d"),
        missing=tuple(_missing(made, about)),
    )


def _consumer_cpu_s(steps: timeline.SteadySteps, made: Sequence[FetchFile], main_pid: int) -> float | None:
    """CPU time of the training process, less the making of batches where it makes them itself."""
    if not steps.waits_s:
        return None
    own = [record.cpu_ns / 1e9 for file in made if file.pid == main_pid for record in file.records]
    making_s = sum(own) / len(own) * len(steps.waits_s) if own else 0.0
    return max(0.0, steps.cpu_s - making_s)


def _processes_of(about: About, loader: int, main_pid: int) -> list[list[int]]:
    """The worker processes of each of a loader's iterators, oldest first; the training process where it has none."""
    shape = about.loaders.get(loader, {})
    pids, count = about.worker_pids.get(loader, []), shape.get("workers") or 0
    if not pids or not count:
        return [[main_pid]]
    return [pids[start : start + count] for start in range(0, len(pids), count)]


def _loader_shape(shape: dict[str, Any] | None, made: Sequence[FetchFile]) -> LoaderShape | None:
    if shape is None:
        return None
    return LoaderShape(
        workers=shape["workers"],
        prefetch=shape["prefetch"],
        engine="process" if shape["workers"] else "main",
        start_method=shape["start_method"],
        persistent=shape["persistent"] if shape["workers"] else None,
        pin_memory=shape["pin_memory"],
        batch_size=shape["batch_size"],
        samples=shape["samples"],
        threads_per_worker=max((file.threads for file in made), default=None),
    )


def _storage(made: Sequence[FetchFile]) -> StorageFacts | None:
    read, samples = read_bytes_of(made), sum(file.samples for file in made)
    path = next((file.path for file in made if file.path), None)
    from_sockets = sum(file.socket_bytes for file in made)
    # Reading our own clocks under /proc counts as well: some ten bytes a sample.
    if read is not None and samples and read < samples * LEAST_READ_BYTES:
        read = None
    if path is None and not from_sockets and not read:
        return None
    mount = mount_of(path) if path else None
    kind, remote = (None, None) if mount is None else (mount.kind, mount.remote)
    if from_sockets * 2 > (read or 0):
        kind, remote = "network", True
    return StorageFacts(remote=remote, kind=kind, bytes_per_sample=read / samples if read and samples else None)


def _accelerator(facts: dict[str, Any]) -> AcceleratorFacts | None:
    return AcceleratorFacts(name=facts["device"], count=facts.get("devices")) if "device" in facts else None


def _host_of(abouts: dict[int, About]) -> HostFacts | None:
    told = [about.facts["host"] for about in abouts.values() if "host" in about.facts]
    return HostFacts(**told[0]) if told else None


def _missing(made: Sequence[FetchFile], about: About) -> list[str]:
    missing = []
    if not made:
        missing.append("the making of batches: no worker left a record")
    elif not all(file.knows_run_queue for file in made):
        missing.append("run-queue and blocked time: this system has no /proc/thread-self/schedstat")
    if made and read_bytes_of(made) is None:
        missing.append("bytes read: this system has no readable /proc/thread-self/io")
    if "device" in about.facts:
        missing.append("transfer to the device: it is part of compute")
    return missing
