"""From the records of the workers to stages, batches and slow samples of one loader: pure arithmetic."""

from __future__ import annotations

from collections.abc import Sequence

from stoker.attach.inside.ring import BUCKETS
from stoker.attach.inside.targets import AUGMENT, COLLATE, DECODE, FETCH, OTHER, READ_AND_DECODE, SOCKET
from stoker.attach.records import FetchFile
from stoker.facts.observed import BatchTime, SlowSample, StageTime

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
