"""Times the training process: how long it waits for each batch, and which loader feeds the optimizer."""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import signal
import struct
import sys
import time
import weakref
from collections import deque
from typing import Any, NamedTuple

from stoker.attach import ring, session
from stoker.attach.fetching import fetches
from stoker.attach.session import Session, leading_rank, rank_of_environment, ranks_here
from stoker.attach.watched_loop import Loop, place_of


class LoaderNumbers:
    """Numbers loaders from 1; a loader that is created again each epoch, with the same settings, keeps its number."""

    def __init__(self) -> None:
        self._holders: list[tuple[tuple[Any, ...], Any]] = []
        self.builds: dict[int, int] = {}
        """By number, how often it was made."""

    def number_of(self, loader: Any) -> int:
        for number, (_, held) in enumerate(self._holders, 1):
            if held() is loader:
                return number
        shape = shape_of(loader)
        signature = (*(shape[name] for name in sorted(shape)), type(loader.sampler).__name__, loader.drop_last)
        for number, (known, held) in enumerate(self._holders, 1):
            if held() is None and known == signature:
                self._holders[number - 1] = signature, weakref.ref(loader)
                self.builds[number] += 1
                return number
        self._holders.append((signature, weakref.ref(loader)))
        self.builds[len(self._holders)] = 1
        return len(self._holders)


def shape_of(loader: Any) -> dict[str, Any]:
    import multiprocessing

    context = loader.multiprocessing_context or multiprocessing
    size = loader.batch_size
    if size is None and loader.batch_sampler is not None:
        size = getattr(loader.batch_sampler, "batch_size", None)
    return {
        "workers": loader.num_workers,
        "prefetch": loader.prefetch_factor if loader.num_workers else None,
        "persistent": bool(loader.persistent_workers),
        "pin_memory": bool(loader.pin_memory),
        "start_method": str(context.get_start_method()) if loader.num_workers else None,
        "batch_size": size if isinstance(size, int) else None,
        "samples": _length(loader),
        "dataset": type(loader.dataset).__name__,
    }


def _length(loader: Any) -> int | None:
    """Samples of an epoch, on this rank; None for a stream."""
    from collections.abc import Sized

    if type(loader.sampler).__name__ == "_InfiniteConstantSampler":  # what torch uses for a stream
        return None
    batches = loader.batch_sampler
    own = getattr(batches, "sampler", None) if loader.batch_size is None and batches is not None else loader.sampler
    try:
        return len(own) if isinstance(own, Sized) else None
    except (TypeError, NotImplementedError):
        return None


# CUDA events that the device has not reached yet; with more it lags so far behind that we drop some.
MOST_PENDING_EVENTS = 64
MOST_OPTIMIZER_STEPS = 2**32 - 1


class AskedFor(NamedTuple):
    """What is known when the loop asks a loader for a batch."""

    loader: int
    first: bool
    """Whether it is the first one of an epoch."""
    ready: int
    started_us: int
    """How long making the iterator took."""
    event: Any
    """The device's, if there is one."""
    enter_cpu: int
    enter: int


class StepLog:
    """Writes one record for each batch that is taken, in a few microseconds, and decides when enough is recorded."""

    def __init__(self, session: Session) -> None:
        self._session = session
        path = os.path.join(session.folder, f"steps-{os.getpid()}.ring")  # noqa: PTH118
        self._ring = ring.Ring(path, ring.STEP, ring.STEP_CAPACITY)
        self._batches: dict[int, int] = {}
        self._votes: dict[int, int] = {}
        self._since_step: set[int] = set()
        self._optimizer_steps = 0
        self._optimizer_end = 0
        self._began = 0
        self._pending: deque[tuple[int, Any, Any]] = deque(maxlen=MOST_PENDING_EVENTS)
        self._described = False
        self._leads = rank_of_environment() in (None, leading_rank())
        self.loop = Loop()

    def optimizer_stepped(self, optimizer: Any) -> None:
        """Counts a step; the loaders that were read since the previous one have fed it."""
        self._optimizer_end = time.perf_counter_ns()
        self._optimizer_steps += 1
        for loader in self._since_step:
            self._votes[loader] = self._votes.get(loader, 0) + 1
        self._since_step.clear()
        if not self._described:
            self._described = True
            self._describe(optimizer)
        self.loop.optimizer_stepped(optimizer, self._session)

    def batch(self, entry: AskedFor, samples: int) -> None:
        leave = time.perf_counter_ns()
        at = self._write(entry, ring.FIRST if entry.first else 0, samples, leave)
        if entry.event is not None:
            self._pending.append((at, entry.event, self.device_event()))
        self._resolve_events()
        loader = entry.loader
        self._since_step.add(loader)
        taken = self._batches[loader] = self._batches.get(loader, 0) + 1
        if not self._began:
            self._began = leave
        training = not self._votes or loader == max(self._votes, key=self._votes.__getitem__)
        steps, seconds = self._session.steps, self._session.seconds
        # One batch more than requested: its arrival ends the last step.
        enough_steps = steps is not None and training and bool(self._votes) and taken > steps
        enough_seconds = seconds is not None and leave - self._began > seconds * 1e9
        enough = self._leads and (enough_steps or enough_seconds)
        if training:
            ring.STEP_MARKS.pack_into(self._ring.memory, ring.STEP_MARKS_AT, taken, int(enough), self._began)
        elif enough:
            ring.STEP_MARKS.pack_into(self._ring.memory, ring.STEP_MARKS_AT, 0, 1, self._began)
        if enough:
            self.loop.stop_counting(self._session)
            self._session.recording = False

    def over(self, entry: AskedFor) -> None:
        """Records that the epoch of this loader is over."""
        self._write(entry._replace(ready=-1), ring.LAST, 0, time.perf_counter_ns())

    def _write(self, entry: AskedFor, flags: int, samples: int, leave: int) -> int:
        at = self._ring.append(
            entry.loader, flags, entry.ready, samples, min(self._optimizer_steps, MOST_OPTIMIZER_STEPS),
            min(entry.started_us, 2**32 - 1) if flags & ring.FIRST else 0, entry.enter, leave, self._optimizer_end, -1,
            entry.enter_cpu,
        )  # fmt: skip
        self._optimizer_steps = 0
        return at

    def device_event(self) -> Any:
        """An event in the device's queue; None without a GPU, or before the script uses it."""
        cuda = sys.modules.get("torch.cuda")
        if cuda is None or not cuda.is_initialized():
            return None
        event = cuda.Event(enable_timing=True)
        event.record()
        return event

    def _resolve_events(self) -> None:
        """Reads the events that the device has passed; never synchronises."""
        while self._pending and self._pending[0][2].query():
            at, entered, left = self._pending.popleft()
            # From the end of the previous work to the arrival of the batch: the time in which the device was idle.
            idle_ns = int(entered.elapsed_time(left) * 1e6)
            struct.pack_into("<q", self._ring.memory, at + ring.DEVICE_IDLE_AT, idle_ns)

    def _describe(self, optimizer: Any) -> None:
        """Once, at the first optimizer step: what is trained, and on which device."""
        weights = [weight for group in optimizer.param_groups for weight in group["params"]]
        facts: dict[str, Any] = {"convolves_3d": any(weight.ndim == 5 for weight in weights)}
        facts |= {"threads": sys.modules["torch"].get_num_threads(), "ranks_here": ranks_here()}
        cuda, distributed = sys.modules.get("torch.cuda"), sys.modules.get("torch.distributed")
        if cuda is not None and cuda.is_initialized():
            facts |= {"device": cuda.get_device_name(), "devices": cuda.device_count()}
        if distributed is not None and distributed.is_available() and distributed.is_initialized():
            facts["in_group_rank"] = rank = distributed.get_rank()
            self._leads = rank == leading_rank()
        self._session.say(**facts)


_now = time.perf_counter_ns
# Workers whose exit codes we look at: those of the newest iterators.
MOST_WORKERS = 256


class _Process:
    """What this process knows about its loaders; a forked child starts empty."""

    def __init__(self) -> None:
        self.log: StepLog | None = None
        self.numbers = LoaderNumbers()
        self.workers: deque[tuple[int, Any]] = deque(maxlen=MOST_WORKERS)

    def forget(self) -> None:
        """After a fork: the log and the workers belong to the parent."""
        if self.log is not None:
            self.log.loop.stop_counting(None)
        self.log = None
        self.workers.clear()


process = _Process()


def patch_loaders(module: Any) -> None:
    loader, base, many = module.DataLoader, module._BaseDataLoaderIter, module._MultiProcessingDataLoaderIter
    loader.__iter__ = _clocked_iter(loader.__iter__)
    base.__init__ = _named_after_its_loader(base.__init__)
    many.__init__ = _with_its_workers(many.__init__)
    base.__next__ = _clocked_next(base.__next__)
    os.register_at_fork(after_in_child=process.forget)
    atexit.register(_say_what_is_left)
    opened = session.current()
    if opened is not None:
        opened.say(torch=str(module.torch.__version__))


def patch_optimizers(module: Any) -> None:
    """Counts optimizer steps, through torch's own hook for all optimizers."""
    compiler = sys.modules.get("torch.compiler")

    def after_step(optimizer: Any, args: Any, kwargs: Any) -> None:  # noqa: ARG001 - torch's signature
        # Traced by torch.compile, this line ends the tracing of the hook: a timer would break the graph.
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
    """Makes an iterator remember the number of its loader, and the samples of an epoch and of a batch."""

    @functools.wraps(original)
    def __init__(self: Any, loader: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        opened = session.current()
        if opened is not None and opened.recording:
            try:
                number, shape = process.numbers.number_of(loader), shape_of(loader)
                self._stoker_loader, self._stoker_sizes = number, (shape["samples"], shape["batch_size"])
                builds = process.numbers.builds[number]
                opened.say(loader=number, builds=builds, iterated_at=place_of(sys._getframe(1)), **shape)
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
            log = process.log = process.log or StepLog(opened)
            if self._num_workers == 0:
                fetches.loader = number
            started_us = self.__dict__.pop("_stoker_started_us", 0)
            ready, event = _ready(self), log.device_event()
            entry = AskedFor(number, self._num_yielded == 0, ready, started_us, event, time.process_time_ns(), _now())
        except Exception as error:
            opened.failed("a loader could not be timed", error)
            return original(self)
        try:
            data = original(self)
        except StopIteration:
            log.over(entry)
            raise
        try:
            log.batch(entry, _samples(self))
            log.loop.batch_taken(sys._getframe(1), entry.enter, opened)
        except Exception as error:
            opened.failed("a wait could not be recorded", error)
        return data

    return __next__


def _say_what_is_left() -> None:
    """At the end of the process: which workers were killed, and what was counted in a short run.

    The former not when a batch is taken: torch raises its error from a signal handler, wherever the script is."""
    opened = session.current()
    with contextlib.suppress(Exception):
        for number, worker in process.workers:
            code = worker.exitcode
            # torch and multiprocessing themselves end workers with SIGTERM.
            if opened is not None and code is not None and code < 0 and code != -signal.SIGTERM:
                opened.say(worker_died=number, exit_code=code)
        if opened is not None and opened.recording and process.log is not None:
            process.log.loop.stop_counting(opened)


def _ready(iterator: Any) -> int:
    """Batches that are ready and not taken; -1 if unknown."""
    if iterator._num_workers == 0:
        return -1
    waiting = sum(1 for task in iterator._task_info.values() if len(task) == 2)
    try:
        return waiting + int(iterator._data_queue.qsize())
    except (NotImplementedError, OSError):  # macOS
        return -1


def _samples(iterator: Any) -> int:
    """Samples of the batch that was just taken; the last one of an epoch may be smaller."""
    total, size = iterator._stoker_sizes
    if size is None:
        return -1
    if total is None:
        return int(size)
    # A sampler that repeats forever (timm's) has no last batch.
    left = total - (iterator._num_yielded - 1) * size
    return int(min(size, left)) if left > 0 else int(size)
