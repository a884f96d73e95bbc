"""Times how batches are prepared: torch's own fetcher runs on a timed dataset and a timed collate function."""

from __future__ import annotations

import functools
import gc
import os
import sys
import time
from typing import Any

from stoker.attach import ring, session
from stoker.attach.habits import DEEPEST, Watched, array_bytes
from stoker.attach.sampling import Spots, sampler, survive_forks
from stoker.attach.stage_clock import COLLATE, FETCH, READ_AND_DECODE, SOCKET, StageClock, here

# Asking how much was read takes 5 µs, twice, and adding up arrays as long: for every batch at first, then for some.
ALWAYS_BELOW, THEN_EVERY = 16, 8
# Timing the stages of a sample takes up to 0.1 ms: for every batch at first, and always where batches take long on
# average; then for a quarter of them, which stand for the others as well. Multiples of the golden ratio choose them:
# every fourth would be the one that opens a file of four batches, or never that one.
STAGES_BELOW, ALWAYS_FROM_NS = 64, 100_000_000
GOLDEN, CHOSEN_BELOW = 0x9E3779B1, 2**30
# Writing the sums takes 15 µs, twice as much with cold caches: after every batch of 10 ms or more, otherwise ten
# times a second. A worker is ended without notice, and its batches since the last write are missing from its sums.
WRITE_AFTER_NS = 10_000_000
WRITE_EVERY_NS = 100_000_000


class Collections:
    """How long full garbage collections have taken in this process."""

    def __init__(self) -> None:
        self.took_ns = 0
        self._began_ns = 0

    def watch(self) -> None:
        """Starts counting; again in a forked worker has no effect."""
        if self._count not in gc.callbacks:
            gc.callbacks.append(self._count)

    def _count(self, phase: str, about: dict[str, int]) -> None:
        if about["generation"] < 2:
            return
        if phase == "start":
            self._began_ns = time.perf_counter_ns()
        else:
            self.took_ns += time.perf_counter_ns() - self._began_ns


collections = Collections()


class FetchTotals:
    """A record for each batch that this process prepares for one loader, and sums, written often enough to survive a
    kill; also its slowest samples."""

    def __init__(self, path: str, worker: int, threads: int) -> None:
        self._ring = ring.Ring(path, ring.FETCH_STRUCT, ring.FETCH_CAPACITY)
        self.clock = StageClock()
        self.spots = Spots(self._ring.memory, self.clock)
        self._watched = Watched(self._ring.memory, worker >= 0, fetches.is_forked)
        self.clock.on_open = self._watched.files.opened
        self._about = worker, threads, int(self.clock.knows_run_queue)
        self._batches = self._samples = self._samples_in_stages = self._took_ns = 0
        self.in_stages = True
        """Whether the batch that is prepared now is split into stages."""
        self._size = -1
        self._fetched_before = self._collected_before = 0
        self._reads_before = 0
        self._written_ns = 0
        self._read_bytes = self._read_batches = 0
        self._read_before: tuple[int, int] | None = None
        self._io = _thread_io()
        self._epoch = self._number = 0
        self._queued = 0
        self._histogram = [0] * (2 * ring.BUCKETS)
        self._seen = 0
        self._slow: list[tuple[int, str]] = []
        self._slow_from = 0
        self._path_written = False

    def sample_begins(self) -> int:
        self._queued = self.clock.queued_ns + collections.took_ns
        return time.perf_counter_ns()

    def sample_ends(self, began_ns: int, index: Any) -> None:
        """Counts a sample, and keeps its name if it is among the slowest."""
        clock = self.clock
        took_ns = clock.settle() - began_ns
        # Waiting for a core is not the sample's fault, and neither is a full garbage collection: the first one in a
        # forked worker copies every page that it shares with the parent, and took 200 ms for samples of 1 ms.
        took_ns = max(0, took_ns - (clock.queued_ns + collections.took_ns - self._queued))
        path, clock.opened = clock.opened, None
        if path is not None and not self._path_written:
            self._write_path(path)
        self._watched.files.sample_ends()
        self._seen += 1
        if self._seen == 1:  # imports, opened archives: not this sample's fault
            return
        bucket = min(took_ns.bit_length(), ring.BUCKETS - 1)
        self._histogram[bucket] += 1
        self._histogram[ring.BUCKETS + bucket] += took_ns
        if took_ns > self._slow_from:
            self._remember(took_ns, f"sample {index}" if path is None else os.fsdecode(path))

    def _remember(self, took_ns: int, name: str) -> None:
        self._slow.append((took_ns, name))
        self._slow.sort(reverse=True)
        del self._slow[ring.SLOW.count :]
        if len(self._slow) == ring.SLOW.count:
            self._slow_from = self._slow[-1][0]
        # The end of a path tells more than its beginning.
        ring.SLOW.write(self._ring.memory, ((ns, known.encode(errors="replace")[-240:]) for ns, known in self._slow))

    def _write_path(self, path: Any) -> None:
        self._path_written = True
        full = os.fsencode(os.path.abspath(os.fspath(path)))  # noqa: PTH100 - may be bytes
        ring.PATH.pack_into(self._ring.memory, ring.PATH_AT, full[: ring.PATH.size])

    def choose(self) -> bool:
        """Whether the next batch is split into stages."""
        self.in_stages = (
            self._batches < STAGES_BELOW
            or self._batches * GOLDEN % 2**32 < CHOSEN_BELOW
            or self._took_ns > ALWAYS_FROM_NS * self._batches
        )
        return self.in_stages

    def batch_begins(self) -> None:
        clock = self.clock
        self._collected_before = collections.took_ns
        # The first batch reads what is imported for it as well.
        self._read_before = self._bytes_read() if self._batches and self._now_and_then() else None
        if not self.in_stages:
            clock.begin_whole()
            return
        self._fetched_before = _fetched_ns(clock)
        self._reads_before = clock.calls[FETCH] + clock.calls[SOCKET] + clock.calls[READ_AND_DECODE]
        clock.begin()
        sampler.begin(self.spots, clock.began_ns)

    def batch_ends(self) -> None:
        if self.in_stages:
            sampler.thread = 0
            self.clock.end()
        else:
            self.clock.end_whole()

    def batch_made(self, epoch: int, samples: int, data: Any, dataset: Any) -> None:
        clock = self.clock
        if epoch != self._epoch:
            self._epoch, self._number = epoch, 0
        if self._now_and_then():
            self._size = array_bytes(data, DEEPEST) or -1
            self._watched.batch_made(dataset, data, samples)
            if self._read_before is not None:
                now, before = self._bytes_read() or (0, 0), self._read_before
                self._read_bytes += max(now[0] - before[0], now[1] - before[1], 0)
                self._read_batches += 1
        reads = clock.calls[FETCH] + clock.calls[SOCKET] + clock.calls[READ_AND_DECODE]
        self._ring.append(
            clock.began_ns, clock.took_ns, clock.ran_ns, clock.queue_ns if clock.knows_run_queue else -1,
            max(0, _fetched_ns(clock) - self._fetched_before) if self.in_stages and reads > self._reads_before else -1,
            self._size, samples, epoch, self._number, (collections.took_ns - self._collected_before) // 1000,
        )  # fmt: skip
        self._number += 1
        self._batches += 1
        self._samples += samples
        self._samples_in_stages += samples if self.in_stages else 0
        self._took_ns += clock.took_ns
        long_ago = clock.began_ns - self._written_ns > WRITE_EVERY_NS
        if long_ago or clock.took_ns > WRITE_AFTER_NS or self._batches < ALWAYS_BELOW:
            self._written_ns = clock.began_ns
            self._write_totals()
        if clock.opened is not None and not self._path_written:
            self._write_path(clock.opened)

    def _now_and_then(self) -> bool:
        return self._batches < ALWAYS_BELOW or self._batches % THEN_EVERY == 0

    def _write_totals(self) -> None:
        clock, memory = self.clock, self._ring.memory
        read = self._read_bytes * self._batches // self._read_batches if self._read_batches else -1
        sums = clock.socket_bytes, *clock.wall, *clock.off_core, *clock.run_queue, *clock.calls
        if 0 < self._samples_in_stages < self._samples:
            sums = tuple(each * self._samples // self._samples_in_stages for each in sums)
        ring.TOTALS.pack_into(
            memory, ring.TOTALS_AT, self._batches, self._samples, read, sums[0], *self._about, *sums[1:]
        )
        ring.HISTOGRAM.pack_into(memory, ring.HISTOGRAM_AT, *self._histogram)
        self._watched.write(self.spots.sampled_ns, self.spots.looks, clock.worked)

    def _bytes_read(self) -> tuple[int, int] | None:
        """Bytes that this thread has read from files, and from disks; None if the kernel does not provide it."""
        if self._io is None:
            return None
        lines = os.pread(self._io, 512, 0).split(b"\n")
        # rchar counts what read() returned, page cache or not; read_bytes what disks gave, mapped files too.
        return int(lines[0][7:]), int(lines[4][12:])


def _fetched_ns(clock: StageClock) -> int:
    """Time spent fetching bytes; of calls that also decode, only their blocked time."""
    both = READ_AND_DECODE
    return clock.wall[FETCH] + clock.wall[SOCKET] + clock.off_core[both] - clock.run_queue[both]


def _thread_io() -> int | None:
    """The kernel's account of what this thread reads, kept open: opening costs more than reading."""
    try:
        descriptor = os.open("/proc/thread-self/io", os.O_RDONLY | os.O_CLOEXEC)
        os.pread(descriptor, 512, 0)
    except OSError:
        return None
    return descriptor


class _TimedItems:
    """A map-style dataset with each sample timed."""

    def __init__(self, dataset: Any, totals: FetchTotals) -> None:
        self._dataset = dataset
        self._totals = totals

    def __getitem__(self, index: Any) -> Any:
        began = self._totals.sample_begins()
        item = self._dataset[index]
        self._totals.sample_ends(began, index)
        return item


class _TimedLists(_TimedItems):
    """One that takes a whole batch of indices at once (`__getitems__`): single samples cannot be timed."""

    def __getitems__(self, indices: Any) -> Any:
        return self._dataset.__getitems__(indices)


class TimedIterator:
    """The iterator of an iterable dataset; samples are named by their place in the stream."""

    def __init__(self, iterator: Any, totals: FetchTotals) -> None:
        self._iterator = iterator
        self._totals = totals
        self._place = 0

    def __iter__(self) -> TimedIterator:
        return self

    def passed(self, samples: int) -> None:
        """Counts samples that were taken without us."""
        self._place += samples

    def __next__(self) -> Any:
        began = self._totals.sample_begins()
        item = next(self._iterator)
        self._totals.sample_ends(began, self._place)
        self._place += 1
        return item


# Each is 20 KB; workers that are restarted every epoch would fill the disk in a long run.
MOST_FILES_OF_A_PROCESS = 64


class _Fetches:
    """The fetches of this process, with totals for each loader (a worker has one)."""

    def __init__(self) -> None:
        self.totals: dict[int, FetchTotals] = {}
        self.loader = 0
        """Which loader of the training process is preparing a batch; 0 in a worker."""
        self.fetchers = 0
        self.is_forked = False

    def forget(self) -> None:
        """After a fork: what is here belongs to the parent."""
        here.clock, here.preparing = None, False
        self.__init__()  # type: ignore[misc]
        self.is_forked = True
        opened = session.current()
        if opened is not None:
            opened.after_fork()


fetches = _Fetches()


def patch_fetchers(module: Any) -> None:
    for name, attribute in (("_MapDatasetFetcher", "dataset"), ("_IterableDatasetFetcher", "dataset_iter")):
        fetcher = getattr(module, name)
        fetcher.fetch = _clocked(fetcher.fetch, attribute)
    os.register_at_fork(after_in_child=fetches.forget)
    survive_forks()


def _clocked(original: Any, attribute: str) -> Any:
    @functools.wraps(original)
    def fetch(self: Any, possibly_batched_index: Any) -> Any:
        opened = session.current()
        if opened is None or not opened.recording:
            return original(self, possibly_batched_index)
        if here.preparing:  # a loader inside a dataset: its time belongs to the outer batch
            return original(self, possibly_batched_index)
        try:
            totals = fetches.totals.get(fetches.loader) or _begin_totals(opened)
            source, collate = self.__dict__[attribute], self.collate_fn
            timed_source, timed_collate = _with_clocks(self, attribute, source, collate, totals)
            if not totals.choose():
                timed_source, timed_collate = source, collate
        except Exception as error:  # the script comes first
            opened.failed("a fetch could not be timed", error)
            return original(self, possibly_batched_index)
        setattr(self, attribute, timed_source)
        self.collate_fn = timed_collate
        totals.batch_begins()
        try:
            data = original(self, possibly_batched_index)
        finally:
            totals.batch_ends()
            setattr(self, attribute, source)
            self.collate_fn = collate
        try:
            samples = _samples(possibly_batched_index, data)
            totals.batch_made(self._stoker_epoch, samples, data, source)
            if timed_source is source and attribute != "dataset":
                self._stoker[2].passed(samples)
        except Exception as error:
            opened.failed("a batch could not be recorded", error)
        return data

    return fetch


def _begin_totals(opened: session.Session) -> FetchTotals:
    """At the first batch that this process prepares for a loader."""
    from stoker.attach.stages import take_over_open

    take_over_open()
    collections.watch()
    if len(fetches.totals) >= MOST_FILES_OF_A_PROCESS:
        raise RuntimeError("this process uses too many loaders")
    path = os.path.join(opened.folder, f"fetch-{os.getpid()}-{fetches.loader}.ring")  # noqa: PTH118
    worker = sys.modules.get("torch.utils.data._utils.worker")
    info = worker.get_worker_info() if worker is not None else None
    totals = FetchTotals(path, -1 if info is None else int(info.id), _threads())
    fetches.totals[fetches.loader] = totals
    sampler.start()
    return totals


def _with_clocks(fetcher: Any, attribute: str, source: Any, collate: Any, totals: FetchTotals) -> tuple[Any, Any]:
    """The fetcher's dataset (or iterator) and collate function, timed; made once for each fetcher."""
    kept = fetcher.__dict__.get("_stoker")
    if kept is not None and kept[0] is source and kept[1] is collate:
        return kept[2], kept[3]
    fetches.fetchers += 1
    fetcher._stoker_epoch = fetches.fetchers
    timed: Any = _TimedLists if getattr(source, "__getitems__", None) else _TimedItems
    timed_source = (timed if attribute == "dataset" else TimedIterator)(source, totals)
    clock = totals.clock

    def timed_collate(data: Any) -> Any:
        clock.enter(COLLATE)
        try:
            return collate(data)
        finally:
            clock.leave()

    fetcher._stoker = source, collate, timed_source, timed_collate
    return timed_source, timed_collate


def _samples(index: Any, data: Any) -> int:
    if isinstance(index, (list, tuple)):
        return len(index)
    # Without torch's own batching an item is a sample, or a batch that the dataset has put together: then its parts
    # have the same length.
    parts = list(data.values()) if isinstance(data, dict) else data if isinstance(data, (list, tuple)) else []
    lengths = {part.shape[0] for part in parts if len(getattr(part, "shape", ())) > 0}
    return int(lengths.pop()) if len(parts) > 1 and len(lengths) == 1 else 1


def _threads() -> int:
    """Threads that torch and OpenCV would start here for one operation."""
    torch, cv2 = sys.modules.get("torch"), sys.modules.get("cv2")
    counts = [torch.get_num_threads() if torch is not None else 1]
    if cv2 is not None and hasattr(cv2, "getNumThreads"):
        counts.append(cv2.getNumThreads())
    return max(counts)
