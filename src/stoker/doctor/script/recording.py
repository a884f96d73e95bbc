"""Reads the files that a watched script recorded: as one `Observed`, and its traced step, for a card."""

from __future__ import annotations

import json
import os
import signal
import struct
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from stoker.attach import ring
from stoker.attach.ring import FetchRecord, Habits, StepRecord
from stoker.attach.stage_clock import STAGE_COUNT
from stoker.core.errors import UserError
from stoker.core.files import open_regular
from stoker.doctor.script import timeline
from stoker.doctor.script.loop_facts import habits_of, memory_of, preparation_of, shown_path, threads_of
from stoker.doctor.script.process_watch import SeenProcess, seen_from
from stoker.doctor.script.timeline import About, FetchFile, StepFile
from stoker.plan.records import TracedOp
from stoker.plan.roofline import step_seconds
from stoker.profile.datasheets import Datasheet
from stoker.profile.mounts import mount_of
from stoker.profile.observed import AcceleratorFacts, HostFacts, LoaderShape, LoopTimes, Observed, StorageFacts
from stoker.run.json_lines import parse_line, whole_lines

ABOUT_FILES = "about-*.jsonl"
MOST_STEPS = 512
"""Steps that are kept one by one in an Observed: the newest few hundred."""

LEAST_READ_BYTES = 512
SPLIT_FOLDERS = frozenset({"train", "training", "val", "valid", "validation", "test"})


@dataclass(frozen=True)
class Recording:
    """An observation, if there is one, and notes about it."""

    observed: Observed | None
    notes: tuple[str, ...]


def read_attached(folder: Path) -> Observed:
    if not has_records(folder):
        raise UserError(
            "no-record",
            f"{folder} contains no recording of a script",
            hint="add one line to the script:  import stoker; stoker.watch(report='FOLDER')",
        )
    recording = read_recording(folder)
    if recording.observed is None:
        raise UserError("nothing-observed", recording.notes[0] if recording.notes else "the script recorded no batches")
    return recording.observed


def read_recording(
    folder: Path, host: HostFacts | None = None, rank: int = 0, seen: Sequence[SeenProcess] | None = None
) -> Recording:
    """Whatever was recorded so far; never raises for what is missing. `seen`: its processes, watched from outside."""
    abouts, fetches = read_about(folder), read_fetches(folder)
    notes = list(dict.fromkeys(note for about in abouts.values() for note in about.notes))
    notes += [_death(worker, code) for about in abouts.values() for worker, code in about.died.items()]
    process = _training_process(read_steps(folder), abouts, rank)
    if process is None:
        torch = next((about.facts["torch"] for about in abouts.values() if "torch" in about.facts), None)
        notes.insert(
            0,
            "the script took no batch from a torch DataLoader, so there is nothing to diagnose"
            + ("" if torch else "; it never imported torch.utils.data"),
        )
        return Recording(None, tuple(notes))
    about = abouts.get(process.pid, About(process.pid))
    others = sum(1 for other in abouts.values() if other.rank not in (None, about.rank) and other.loaders)
    if others:
        notes.append(f"{others + 1} ranks trained; these are the times of rank {about.rank}")
    if seen is None:
        seen = [each for other in abouts.values() for each in seen_from(other.facts.get("processes"))]
    if host is None:
        host = next((HostFacts(**other.facts["host"]) for other in abouts.values() if "host" in other.facts), None)
    return Recording(_observe(process, about, fetches, host, notes, seen), tuple(notes))


def _death(worker: int, code: int) -> str:
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    reasons = {
        signal.SIGKILL: "the kernel does this when memory runs out",
        signal.SIGBUS: "usually /dev/shm is full",
        signal.SIGSEGV: "a library that it uses crashed, or does not support forking",
    }
    reason = f": {reasons[signal.Signals(-code)]}" if -code in reasons else ""
    return f"worker {worker} of a loader was killed by {name}{reason}"


def _training_process(files: Sequence[StepFile], abouts: dict[int, About], rank: int) -> StepFile | None:
    """The process of the requested rank, or the only one; if several trained in turn, the one with the most batches."""

    def order(file: StepFile) -> tuple[bool, float, int]:
        about = abouts.get(file.pid, About(file.pid))
        fed = timeline.saw_optimizer(file.records)
        return about.rank in (None, rank), fed, len(file.records) + file.lost

    return max((file for file in files if file.records), key=order, default=None)


def _observe(
    process: StepFile,
    about: About,
    fetches: Sequence[FetchFile],
    host: HostFacts | None,
    notes: list[str],
    seen: Sequence[SeenProcess],
) -> Observed | None:
    records = process.records
    feeding = timeline.training_loaders(records)
    if not feeding:
        notes.append("a DataLoader was opened, but no batch was taken from it")
        return None
    if not timeline.saw_optimizer(records):
        notes.append("no torch optimizer step was seen; the loader with most batches is taken as the training loader")
    if process.lost:
        notes.append(f"the oldest {process.lost} batches are not included in the sums")
    steps = timeline.steady_steps(records, feeding)
    shape = about.loaders.get(steps.loader)
    # The worker processes of each of its iterators, oldest first; the training process where it has none.
    workers, count = about.worker_pids.get(steps.loader, []), (shape or {}).get("workers") or 0
    starts = [workers[first : first + count] for first in range(0, len(workers), count)] if count else []
    starts = starts or [[process.pid]]
    pids = {pid for group in starts for pid in group}
    made = [file for file in fetches if file.pid in pids and file.loader in (0, steps.loader) and file.batches]
    samples = steps.samples
    if steps.unknown_samples and made:
        samples += round(steps.unknown_samples * sum(f.samples for f in made) / sum(f.batches for f in made))
    taken = len([record for record in records if record.loader == steps.loader and not record.flags & ring.LAST])
    share = taken / (taken + process.lost) if process.lost else 1.0
    device = about.facts.get("device")
    return Observed(
        source="script",
        steps=len(steps.waits_s),
        samples=samples,
        times=_times(steps, made, process.pid),
        loader=_loader_shape(shape, made),
        stages=timeline.stages_of(made, share) if made else {},
        batches=timeline.batches_of(made, starts),
        slow_samples=timeline.slow_samples_of(made),
        host=host,
        storage=_storage(made),
        accelerator=None if device is None else AcceleratorFacts(device, about.facts.get("devices")),
        preparation=preparation_of(made),
        memory=memory_of(seen, process.pid, made, about),
        threads=threads_of(seen, process.pid, made, about),
        habits=habits_of(about, records, feeding),
        scaled_in_32_bits=about.facts.get("scaled_in_32_bits"),
        scaled_at=shown_path(about.facts.get("scaled_at")),
        torch_version=about.facts.get("torch"),
        convolves_3d=about.facts.get("convolves_3d"),
        missing=tuple(_missing(made, about)),
    )


def _times(steps: timeline.SteadySteps, made: Sequence[FetchFile], main_pid: int) -> LoopTimes:
    # The loop's own CPU time is without the making of batches, where it makes them itself.
    own = [record.cpu_ns / 1e9 for file in made if file.pid == main_pid for record in file.records]
    making_s = sum(own) / len(own) * len(steps.waits_s) if own else 0.0
    return LoopTimes(
        elapsed_s=steps.elapsed_s,
        wait_s=sum(steps.waits_s),
        compute_s=steps.compute_s,
        other_s=None if steps.compute_s is None else max(0.0, sum(steps.works_s) - steps.compute_s),
        consumer_cpu_s=max(0.0, steps.cpu_s - making_s) if steps.waits_s else None,
        validation_s=steps.validation_s,
        epoch_starts_s=tuple(steps.epoch_starts_s),
        waits_s=tuple(steps.waits_s[-MOST_STEPS:]),
        steps_s=tuple(steps.works_s[-MOST_STEPS:]),
    )


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
    read, samples = timeline.read_bytes_of(made), sum(file.samples for file in made)
    path = next((file.path for file in made if file.path), None)
    from_sockets = sum(file.socket_bytes for file in made)
    # Reading our own timers under /proc counts as well: some ten bytes a sample.
    if read is not None and samples and read < samples * LEAST_READ_BYTES:
        read = None
    if path is None and not from_sockets and not read:
        return None
    mount = mount_of(path) if path else None
    kind, remote = (None, None) if mount is None else (mount.kind, mount.remote)
    if from_sockets * 2 > (read or 0):
        kind, remote = "network", True
    # Read from sockets: the file that was opened is not where the data is.
    root = None if kind == "network" else data_root([file.path for file in made if file.path])
    return StorageFacts(
        remote=remote, kind=kind, bytes_per_sample=read / samples if read and samples else None, root=root
    )


def data_root(paths: Sequence[str]) -> str | None:
    """The folder that a data set is probably in, from some of its files: above `train`, or what they have in common."""
    folders = [Path(path).parent for path in paths if Path(path).is_absolute()]
    if not folders:
        return None
    common = Path(os.path.commonpath(folders))
    for part in (common, *common.parents):
        if part.name.lower() in SPLIT_FOLDERS:
            return str(part.parent)
    return str(common)


def _missing(made: Sequence[FetchFile], about: About) -> list[str]:
    missing = []
    if not made:
        missing.append("how batches are prepared: no worker recorded anything")
    elif not all(file.knows_run_queue for file in made):
        missing.append("run-queue and blocked time: this system has no /proc/thread-self/schedstat")
    if made and timeline.read_bytes_of(made) is None:
        missing.append("bytes read: this system has no readable /proc/thread-self/io")
    if "device" in about.facts:
        missing.append("copies to the device: they are part of computing")
    return missing


def has_records(folder: Path) -> bool:
    return folder.is_dir() and any(folder.glob(ABOUT_FILES))


def read_about(folder: Path) -> dict[int, About]:
    """What each process said about itself, by pid; a line that was cut off when it died is skipped."""
    found: dict[int, About] = {}
    for path in sorted(folder.glob(ABOUT_FILES)):
        about = About(int(path.stem.split("-")[1]))
        with suppress(OSError), open_regular(path) as stream:
            for line in whole_lines(stream):
                said = parse_line(line)
                if said is not None:
                    with suppress(KeyError, TypeError):  # hand-made
                        _take_in(about, said)
        found[about.pid] = about
    return found


def _take_in(about: About, said: dict[str, Any]) -> None:
    if "note" in said:
        about.notes.append(said["note"])
    elif "worker_died" in said:
        about.died[said["worker_died"]] = said["exit_code"]
    elif "workers_of" in said:
        about.worker_pids.setdefault(said["workers_of"], []).extend(said["pids"])
    elif "held" in said:
        about.held[said.pop("held")] = said
    elif "loader" in said:
        about.loaders[said.pop("loader")] = said
    else:
        about.facts |= said


def read_steps(folder: Path) -> list[StepFile]:
    files = []
    for path in sorted(folder.glob("steps-*.ring")):
        data = path.read_bytes()
        if not _is_whole(data, path, ring.STEP):
            continue
        rows, lost = _records(data, ring.STEP)
        files.append(StepFile(int(path.stem.split("-")[1]), lost, tuple(StepRecord(*row) for row in rows)))
    return files


def read_fetches(folder: Path) -> list[FetchFile]:
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
    opened = ring.text_of(ring.PATH.unpack_from(data, ring.PATH_AT)[0])
    rows, _ = _records(data, ring.FETCH_STRUCT)
    return FetchFile(
        int(pid), int(loader), batches, samples, read if read >= 0 else None, from_sockets, worker, threads,
        bool(knows), wall, cpu, queue, calls, ring.HISTOGRAM.unpack_from(data, ring.HISTOGRAM_AT),
        tuple(row for row in ring.SLOW.read(data) if row[0]), opened or None, tuple(FetchRecord(*row) for row in rows),
        habits=Habits(*ring.HABITS.unpack_from(data, ring.HABITS_AT)),
        shapes=tuple(text for (text,) in ring.SHAPES.read(data) if text),
        worked=tuple(row for row in ring.WORKED.read(data) if row[0]),
        caches=tuple(row for row in ring.CACHES.read(data) if row[-1]),
        grown=tuple(row for row in ring.GROWN.read(data) if row[-1]),
        spots=tuple(
            (took, line, *names.split("\t", 2))
            for took, line, names in ring.SPOTS.read(data)
            if took and names.count("\t") >= 2
        ),
    )  # fmt: skip


def _is_whole(data: bytes, path: Path, record: struct.Struct) -> bool:
    """False for a file whose process died while creating it; refuses one of another version."""
    if len(data) < ring.HEADER_BYTES:
        return False
    magic, version, size, _ = ring.HEAD.unpack_from(data)
    if magic != ring.MAGIC:
        return False
    if version != ring.VERSION or size != record.size:
        raise UserError(
            "record-of-another-version",
            f"{path} has format version {version}; this stoker reads version {ring.VERSION}",
            hint="record the script again with this version: stoker doctor -- python your_script.py",
        )
    return True


def _records(data: bytes, record: struct.Struct) -> tuple[list[tuple[Any, ...]], int]:
    """The records that are there, oldest first, and how many were overwritten."""
    (count,) = ring.COUNT.unpack_from(data, ring.COUNT_AT)
    capacity = ring.HEAD.unpack_from(data)[3]
    kept = min(count, capacity)
    places = [(count - kept + number) % capacity for number in range(kept)]
    return [record.unpack_from(data, ring.HEADER_BYTES + place * record.size) for place in places], count - kept


STEP_FILES = "step-*.json"
MOST_BYTES = 100_000_000
HALF = ("float16", "bfloat16")


@dataclass(frozen=True)
class TracedStep:
    """What the training process computed for one update."""

    ops: tuple[TracedOp, ...]
    batches: int
    """Batches that the update was made from."""
    channels_last: bool
    tf32: bool
    wanted_dtype: str | None
    """The dtype that its autocast asks for on a GPU: without one, torch computes in float32."""

    def seconds_on(self, sheet: Datasheet) -> float:
        """For one batch, by the roofline of each operator."""
        ops = [self._on_a_gpu(op) for op in self.ops]
        return step_seconds(ops, sheet, channels_last=self.channels_last, tf32=self.tf32).total_s / self.batches

    @property
    def precision(self) -> str:
        """The precision of most of its products, on a card."""
        flops: dict[str, int] = {}
        for op in map(self._on_a_gpu, self.ops):
            flops[op.dtype] = flops.get(op.dtype, 0) + op.flops
        most = max(flops, key=flops.__getitem__)
        return "TF32" if most == "float32" and self.tf32 else most

    def _on_a_gpu(self, op: TracedOp) -> TracedOp:
        """As autocast would run it there, except that losses and a few other operators stay in float32. ResNet-50 at
        batch 32 is then within 5 % of the plan's own trace."""
        if self.wanted_dtype not in HALF or op.dtype != "float32" or op.phase == "update":
            return op
        return replace(op, dtype=self.wanted_dtype, read_bytes=op.read_bytes // 2, written_bytes=op.written_bytes // 2)


def read_traced_step(folder: Path) -> TracedStep | str:
    """What a script has recorded, or why there is nothing."""
    for path in sorted(folder.glob(STEP_FILES)):
        try:
            with open_regular(path) as stream:
                document = json.loads(stream.read(MOST_BYTES))
            ops = tuple(TracedOp(**op) for op in document["ops"])
            # A file of a damaged disk, or of a script that writes there: what is added up must be numbers.
            assert all(isinstance(value, int) for op in ops for value in (op.flops, op.read_bytes, op.written_bytes))
            return TracedStep(
                ops, max(1, int(document["batches"])), bool(document["channels_last"]), bool(document["tf32"]),
                None if document["wanted_dtype"] is None else str(document["wanted_dtype"]),
            )  # fmt: skip
        except (OSError, ValueError, KeyError, TypeError, AssertionError) as error:
            return f"its record cannot be read: {error}"
    said = (about.facts.get("untraced") for about in read_about(folder).values())
    return next((str(why) for why in said if why), "it ended before its fourth update; the third is traced")
