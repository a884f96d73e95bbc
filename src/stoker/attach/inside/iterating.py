"""The clock in the training process: how long each batch was waited for, and which loader feeds the optimizer."""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import signal
import time
from collections import deque
from typing import Any

from stoker.attach.inside import session
from stoker.attach.inside.fetching import fetches
from stoker.attach.inside.loader_facts import LoaderNumbers, shape_of
from stoker.attach.inside.step_log import StepLog

_now = time.perf_counter_ns
# Workers whose end we look at: those of the newest iterators.
MOST_WORKERS = 256


class _Process:
    """What this process knows of its loaders; a forked child begins anew."""

    def __init__(self) -> None:
        self.log: StepLog | None = None
        self.numbers = LoaderNumbers()
        self.workers: deque[tuple[int, Any]] = deque(maxlen=MOST_WORKERS)

    def steps(self, opened: session.Session) -> StepLog:
        if self.log is None:
            self.log = StepLog(opened)
        return self.log

    def forget(self) -> None:
        """After a fork: the log and the workers are the parent's."""
        self.log = None
        self.workers.clear()


process = _Process()


def patch_loaders(module: Any) -> None:
    """Hangs the clock into DataLoader and its iterators."""
    loader, base, many = module.DataLoader, module._BaseDataLoaderIter, module._MultiProcessingDataLoaderIter
    loader.__iter__ = _clocked_iter(loader.__iter__)
    base.__init__ = _named_after_its_loader(base.__init__)
    many.__init__ = _with_its_workers(many.__init__)
    base.__next__ = _clocked_next(base.__next__)
    os.register_at_fork(after_in_child=process.forget)
    atexit.register(_name_killed_workers)
    session_here = session.current()
    torch = module.torch
    if session_here is not None:
        session_here.say(torch=str(torch.__version__))


def patch_optimizers(module: Any) -> None:
    """Counts optimizer steps; through torch's own hook for all optimizers."""
    import sys

    compiler = sys.modules.get("torch.compiler")

    def after_step(optimizer: Any, args: Any, kwargs: Any) -> None:  # noqa: ARG001 - torch's signature
        # Traced by torch.compile, this line ends the tracing of the hook: a clock in a graph would break it.
        if compiler is not None and compiler.is_compiling():
            return
        opened = session.current()
        if opened is None or not opened.recording or process.log is None:
            return
        try:
            process.log.optimizer_stepped(optimizer)
        except Exception as error:
            opened.failed("an optimizer step could not be counted", error)

    module.register_optimizer_step_post_hook(after_step)


def _clocked_iter(original: Any) -> Any:
    @functools.wraps(original)
    def __iter__(self: Any) -> Any:  # noqa: N807
        began = _now()
        iterator = original(self)
        iterator.__dict__["_stoker_started_us"] = (_now() - began) // 1000
        return iterator

    return __iter__


def _named_after_its_loader(original: Any) -> Any:
    """An iterator remembers the number of its loader, and how many samples an epoch and a batch have."""

    @functools.wraps(original)
    def __init__(self: Any, loader: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        opened = session.current()
        if opened is not None and opened.recording:
            try:
                number, shape = process.numbers.number_of(loader), shape_of(loader)
                self._stoker_loader, self._stoker_sizes = number, (shape["samples"], shape["batch_size"])
                opened.say(loader=number, **shape)
            except Exception as error:
                opened.note(f"a loader could not be described: {type(error).__name__}: {error}")
        original(self, loader, *args, **kwargs)

    return __init__


def _with_its_workers(original: Any) -> Any:
    @functools.wraps(original)
    def __init__(self: Any, loader: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        original(self, loader, *args, **kwargs)
        opened = session.current()
        if opened is not None and opened.recording:
            try:
                process.workers.extend(enumerate(self._workers))
                opened.say(workers_of=self._stoker_loader, pids=[worker.pid for worker in self._workers])
            except Exception as error:
                opened.note(f"workers could not be listed: {type(error).__name__}: {error}")

    return __init__


def _clocked_next(original: Any) -> Any:
    @functools.wraps(original)
    def __next__(self: Any) -> Any:  # noqa: N807
        opened = session.current()
        number = self.__dict__.get("_stoker_loader")
        if opened is None or not opened.recording or number is None:
            return original(self)
        try:
            log = process.steps(opened)
            if self._num_workers == 0:
                fetches.loader = number
            ready, first = _ready(self), self._num_yielded == 0
            started_us = self.__dict__.pop("_stoker_started_us", 0)
            entered = log.device_event()
        except Exception as error:
            opened.failed("a loader could not be watched", error)
            return original(self)
        enter_cpu = time.process_time_ns()
        enter = _now()
        try:
            data = original(self)
        except StopIteration:
            log.over(number, enter, enter_cpu)
            raise
        try:
            log.batch(number, first, ready, _samples(self), started_us, enter, enter_cpu, entered)
        except Exception as error:
            opened.failed("a wait could not be recorded", error)
        return data

    return __next__


def _name_killed_workers() -> None:
    """At the end of the process: which workers the kernel has killed.

    Not where a batch is taken: torch raises its error from a signal handler, wherever the script happens to be."""
    opened = session.current()
    with contextlib.suppress(Exception):
        for number, worker in process.workers:
            code = worker.exitcode
            # SIGTERM is how torch and multiprocessing themselves end workers.
            if opened is not None and code is not None and code < 0 and code != -signal.SIGTERM:
                opened.say(worker_died=number, exit_code=code)


def _ready(iterator: Any) -> int:
    """Batches that are made and not taken; -1 where nobody knows."""
    if iterator._num_workers == 0:
        return -1
    waiting = sum(1 for task in iterator._task_info.values() if len(task) == 2)
    try:
        return waiting + int(iterator._data_queue.qsize())
    except (NotImplementedError, OSError):  # macOS
        return -1


def _samples(iterator: Any) -> int:
    """Of the batch that was just handed out; the last one of an epoch may be smaller."""
    total, size = iterator._stoker_sizes
    if size is None:
        return -1
    if total is None:
        return int(size)
    # A sampler that repeats itself for ever (timm's) has no last batch.
    left = total - (iterator._num_yielded - 1) * size
    return int(min(size, left)) if left > 0 else int(size)
