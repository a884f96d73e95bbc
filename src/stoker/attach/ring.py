"""Files of fixed-size records in shared memory: written without a system call, readable however the process ended.

When a file is full, the oldest records are overwritten. There are two kinds: `steps` (one record for each batch that a
training process took) and `fetch` (one for each batch that a worker prepared, with totals in the header).
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Iterable
from itertools import islice
from typing import Any, NamedTuple

from stoker.attach.stage_clock import STAGE_COUNT

VERSION = 4
MAGIC = b"STKR"
HEADER_BYTES = 12288
HEAD = struct.Struct("<4sIII")  # magic, version, record size, capacity
COUNT = struct.Struct("<Q")
COUNT_AT = 16

# 65,536 batches of 64 bytes: 22 minutes of 20 ms steps in 4 MB.
STEP_CAPACITY = 65536
# 256 batches of each worker process: 'the newest few hundred' of a loader, in 28 KB a process.
FETCH_CAPACITY = 256
STEP_MARKS = struct.Struct("<QQq")  # steps of the training loader, done, moment of the first batch
STEP_MARKS_AT = 24

# batches, samples, bytes read, bytes from sockets, worker, threads, run queue known; then for each stage wall time, for
# each time off its core, for each time in the run queue, for each calls
TOTALS = struct.Struct(f"<{7 + 4 * STAGE_COUNT}q")
TOTALS_AT = 64
# Samples' durations by power of two of nanoseconds: from 1 µs to 18 minutes are 2**10 to 2**40.
BUCKETS = 48
HISTOGRAM = struct.Struct(f"<{2 * BUCKETS}q")
HISTOGRAM_AT = 512
PATH = struct.Struct("<400s")
PATH_AT = 3600


class HeaderTable:
    """A number of rows in the header; those that are not used are zeros, and text that is too long is cut off."""

    def __init__(self, row: str, at: int, count: int) -> None:
        self._row, self._at, self.count = struct.Struct(row), at, count

    def write(self, memory: Any, rows: Iterable[tuple[Any, ...]]) -> None:
        for place, row in enumerate(islice(rows, self.count)):
            self._row.pack_into(memory, self._at + place * self._row.size, *row)

    def read(self, data: bytes) -> list[tuple[Any, ...]]:
        rows = (self._row.unpack_from(data, self._at + place * self._row.size) for place in range(self.count))
        return [tuple(text_of(value) if isinstance(value, bytes) else value for value in row) for row in rows]


def text_of(raw: bytes) -> str:
    return raw.rstrip(b"\0").decode(errors="replace")


# What the samples cost: see `sampling.py` (spots) and `habits.py` (the rest). -1 in HABITS means 'not measured'.
HABITS = struct.Struct("<14q")
HABITS_AT = 4096
SLOW = HeaderTable("<q240s", at=1536, count=8)  # ns, name of the sample
SHAPES = HeaderTable("<64s", at=4224, count=2)  # of batches that followed each other, as text
WORKED = HeaderTable(
    "<qq48s", at=4608, count=6
)  # calls, elements of the arrays that were worked on, name of the function
CACHES = HeaderTable("<qqq96s", at=5120, count=4)  # entries, bytes or -1, entries that have vanished, name
GROWN = HeaderTable("<qqq88s", at=5632, count=4)  # entries at first, entries now, whether it is a dict, name
SPOTS = HeaderTable("<qi244s", at=6144, count=24)  # ns, line, names


class StepRecord(NamedTuple):
    """A call of a DataLoader iterator's `__next__` in the training process."""

    loader: int
    flags: int
    ready: int
    """Batches that were ready on entry; -1 if unknown."""
    samples: int
    """Samples of the batch; -1 if unknown."""
    optimizer_steps: int
    """Between the previous record and this one."""
    iterator_us: int
    """How long creating the iterator (starting workers) took; only with FIRST."""
    enter_ns: int
    exit_ns: int
    optimizer_end_ns: int
    """When the last optimizer step before this call ended; 0 if there was none."""
    device_idle_ns: int
    """How long the device was idle meanwhile; -1 if not measured."""
    enter_cpu_ns: int
    """CPU time of the process, all its threads, on entry."""


STEP = struct.Struct("<IIiiIIqqqqq")
DEVICE_IDLE_AT = 48
FIRST, LAST = 1, 2
"""Flags: the first batch of an epoch; the call that ended the epoch."""


class FetchRecord(NamedTuple):
    """The preparation of one batch."""

    began_ns: int
    wall_ns: int
    cpu_ns: int
    run_queue_ns: int
    """-1 if the kernel does not provide it."""
    fetch_ns: int
    bytes: int
    """Size of the batch as it is handed over; -1 if it contains no arrays."""
    samples: int
    epoch: int
    """Counts the fetchers of this process: a persistent worker gets a new one for each epoch."""
    number: int
    """Within the epoch."""
    collect_us: int
    """Full garbage collections in that time, in microseconds."""


FETCH_STRUCT = struct.Struct("<qqqqqqiiii")


class Habits(NamedTuple):
    """What a process does again and again while it prepares samples."""

    sampled_ns: int = 0
    """Time of preparing batches over which the stack was looked at; the spots are shares of it."""
    looks: int = 0
    samples: int = 0
    """Samples that were counted here; 0 where single samples cannot be distinguished."""
    samples_that_read: int = 0
    """Samples for which a file was opened."""
    samples_that_read_again: int = 0
    """Samples for which only files were opened that this process had opened before."""
    opens: int = 0
    files: int = 0
    """Different files that were opened."""
    shapes_seen: int = 0
    """Batches whose shape was looked at."""
    shape_changes: int = 0
    """How often it was another one than before."""
    elements: int = 0
    """Per sample, in the largest array of a batch; summed over the batches that were looked at."""
    smallest: int = 0
    largest: int = 0
    """Over the same batches."""
    dimensions: int = 0
    """Dimensions of that array, including the batch's; 0 if there is none."""
    private_bytes: int = -1
    """The most memory that this process had for itself alone; only in a worker."""


class Ring:
    def __init__(self, path: str, record: struct.Struct, capacity: int) -> None:
        self.record = record
        self.capacity = capacity
        self.count = 0
        size = HEADER_BYTES + record.size * capacity
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
        try:
            # Allocated now: a full disk must be an error here, not a SIGBUS in the script's loop.
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(descriptor, 0, size)
            else:
                os.write(descriptor, b"\0" * size)
            self.memory = mmap.mmap(descriptor, size)
        finally:
            os.close(descriptor)
        HEAD.pack_into(self.memory, 0, MAGIC, VERSION, record.size, capacity)

    def append(self, *values: int) -> int:
        """Writes a record; returns its offset in the file."""
        at = HEADER_BYTES + self.record.size * (self.count % self.capacity)
        self.record.pack_into(self.memory, at, *values)
        self.count += 1
        COUNT.pack_into(self.memory, COUNT_AT, self.count)
        return at
