"""The clock around a worker's fetch: torch's own code runs, over a dataset and a collate function with clocks on."""

from __future__ import annotations

import functools
import os
import sys
from typing import Any

from stoker.attach.inside import session
from stoker.attach.inside.fetch_totals import FetchTotals
from stoker.attach.inside.stages import here
from stoker.attach.inside.targets import COLLATE
from stoker.attach.inside.timed_dataset import TimedIterator, timed_dataset

# Each is 20 KB; workers that are started anew each epoch would fill the disk in a long run.
MOST_FILES_OF_A_PROCESS = 64


class _Fetches:
    """The fetches of this process, with totals for each loader (a worker serves one)."""

    def __init__(self) -> None:
        self.totals: dict[int, FetchTotals] = {}
        self.loader = 0
        """Which of the loaders of the training process is making a batch; 0 in a worker."""
        self.fetchers = 0

    def forget(self) -> None:
        """After a fork: what was here is the parent's."""
        here.clock = None
        self.__init__()  # type: ignore[misc]


fetches = _Fetches()


def patch_fetchers(module: Any) -> None:
    """Hangs the clock into torch's two fetchers."""
    for name, attribute in (("_MapDatasetFetcher", "dataset"), ("_IterableDatasetFetcher", "dataset_iter")):
        fetcher = getattr(module, name)
        fetcher.fetch = _clocked(fetcher.fetch, attribute)
    os.register_at_fork(after_in_child=_after_fork)


def _after_fork() -> None:
    fetches.forget()
    opened = session.current()
    if opened is not None:
        opened.after_fork()


def _clocked(original: Any, attribute: str) -> Any:
    @functools.wraps(original)
    def fetch(self: Any, possibly_batched_index: Any) -> Any:
        opened = session.current()
        if opened is None or not opened.recording:
            return original(self, possibly_batched_index)
        if here.clock is not None:  # a loader inside a dataset: its time is the outer batch's
            return original(self, possibly_batched_index)
        try:
            totals = fetches.totals.get(fetches.loader) or _begin_totals(opened)
            source, collate = self.__dict__[attribute], self.collate_fn
            timed_source, timed_collate = _with_clocks(self, attribute, source, collate, totals)
        except Exception as error:  # the script comes first
            opened.failed("a fetch could not be watched", error)
            return original(self, possibly_batched_index)
        setattr(self, attribute, timed_source)
        self.collate_fn = timed_collate
        totals.batch_begins()
        try:
            data = original(self, possibly_batched_index)
        finally:
            totals.clock.end()
            setattr(self, attribute, source)
            self.collate_fn = collate
        try:
            totals.batch_made(self._stoker_epoch, _samples(possibly_batched_index, data), data)
        except Exception as error:
            opened.failed("a batch could not be recorded", error)
        return data

    return fetch


def _begin_totals(opened: session.Session) -> FetchTotals:
    """The first batch that this process makes for a loader."""
    from stoker.attach.inside.opened_files import take_over_open

    take_over_open()
    if len(fetches.totals) >= MOST_FILES_OF_A_PROCESS:
        raise RuntimeError("this process uses too many loaders")
    path = os.path.join(opened.folder, f"fetch-{os.getpid()}-{fetches.loader}.ring")  # noqa: PTH118
    totals = fetches.totals[fetches.loader] = FetchTotals(path, _worker_number(), _threads())
    return totals


def _with_clocks(fetcher: Any, attribute: str, source: Any, collate: Any, totals: FetchTotals) -> tuple[Any, Any]:
    """The fetcher's dataset (or iterator) and collate function with clocks on, made once for each fetcher."""
    kept = fetcher.__dict__.get("_stoker")
    if kept is not None and kept[0] is source and kept[1] is collate:
        return kept[2], kept[3]
    fetches.fetchers += 1
    fetcher._stoker_epoch = fetches.fetchers
    timed_source = timed_dataset(source, totals) if attribute == "dataset" else TimedIterator(source, totals)
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
    # Without torch's own batching an item is a sample, or a batch that the dataset has made: then its parts agree
    # about their length.
    parts = list(data.values()) if isinstance(data, dict) else data if isinstance(data, (list, tuple)) else []
    lengths = {part.shape[0] for part in parts if len(getattr(part, "shape", ())) > 0}
    return int(lengths.pop()) if len(parts) > 1 and len(lengths) == 1 else 1


def _worker_number() -> int:
    worker = sys.modules.get("torch.utils.data._utils.worker")
    info = worker.get_worker_info() if worker is not None else None
    return -1 if info is None else int(info.id)


def _threads() -> int:
    """Threads that torch and OpenCV would start here for one operation."""
    torch, cv2 = sys.modules.get("torch"), sys.modules.get("cv2")
    counts = [torch.get_num_threads() if torch is not None else 1]
    if cv2 is not None and hasattr(cv2, "getNumThreads"):
        counts.append(cv2.getNumThreads())
    return max(counts)
