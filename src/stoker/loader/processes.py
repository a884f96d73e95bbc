"""Batches made by worker processes, through torch's DataLoader, so that its options mean what users expect.

The batch sampler yields one request per batch, and the dataset's `__getitems__` makes the whole batch of that step in a
slot of shared memory: no sample is pickled, collated or copied.
"""

from __future__ import annotations

import errno
import math
import multiprocessing
import os
import re
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic

import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info
from torch.utils.data.dataloader import _BaseDataLoaderIter, _MultiProcessingDataLoaderIter

from stoker.core.cgroups import oom_kills
from stoker.core.console import Say
from stoker.core.errors import StokerError, UserError
from stoker.core.priority import step_back
from stoker.core.units import count
from stoker.io import outage
from stoker.loader.batch import Announcer, EnginePlan, Made, Maker
from stoker.loader.buffers import PageLock, SharedSlots, no_shared_memory, shared_array
from stoker.loader.loader_memory import batches_held, beyond_flight

if TYPE_CHECKING:
    from stoker.loader.loader import LoaderOptions

Request = tuple[int, int, int, int | None]
"""Epoch, step, start, and the slot to fill; None if none was free."""


@dataclass
class InFlight:
    """How many batches may be in flight; changes while an epoch runs."""

    limit: int


class LimitedLoader(DataLoader[Any]):
    """torch's DataLoader, with a limit on its batches in flight."""

    def __init__(self, *arguments: Any, in_flight: InFlight, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.in_flight = in_flight

    def _get_iterator(self) -> _BaseDataLoaderIter:
        if self.num_workers == 0:
            return super()._get_iterator()
        self.check_worker_number_rationality()
        return LimitedIterator(self)


class LimitedIterator(_MultiProcessingDataLoaderIter):
    """torch's iterator sends one request for each batch that is taken; this one sends as many as the limit allows.

    Requests still go to the workers in order and in turn, so neither the batches nor who makes them change.
    """

    def __init__(self, loader: LimitedLoader) -> None:
        self._in_flight = loader.in_flight
        super().__init__(loader)

    def _try_put_index(self) -> None:
        while self._send_idx - self._rcvd_idx < self._in_flight.limit:
            sent = self._send_idx
            super()._try_put_index()
            if self._send_idx == sent:
                return  # the epoch has no more steps

    def ready(self) -> int:
        return self._worker_result_queue.qsize() + sum(len(task) > 1 for task in self._task_info.values())


@dataclass
class _Steps:
    """The batch sampler: the requests of the next epoch."""

    plan: EnginePlan
    slots: SharedSlots | None
    epoch: int = 0
    start: int = 0

    def __len__(self) -> int:
        return self.plan.steps.count(self.start)

    def __iter__(self) -> Iterator[Request]:
        for step in range(len(self)):
            # Runs in this process, when the request is sent to a worker.
            yield self.epoch, step, self.start, None if self.slots is None else self.slots.take()


class _Batches(Dataset[Made]):
    """The dataset: makes the batch of a request. Each worker process opens its own maker, and with it its reader."""

    def __init__(self, open_maker: Callable[[], Maker[Made]], lookahead: int, slots: list[torch.Tensor]) -> None:
        self._slots = slots
        self._open_maker = open_maker
        self._lookahead = lookahead
        self._maker: Maker[Made] | None = None
        self._announcer: Announcer | None = None
        self._announced_for: tuple[int, int] | None = None

    def __getitems__(self, request: Request) -> Made | StokerError:
        # Returned, not raised: torch would turn an error with more than one argument into a RuntimeError.
        try:
            return self._make(*request)
        except StokerError as error:
            return error

    def _make(self, epoch: int, step: int, start: int, slot: int | None) -> Made:
        if self._maker is None:
            self._maker = self._open_maker()
        self._announce(self._maker, epoch, step, start)
        if slot is None:
            batch = self._maker.make(epoch, step, start, shared_array)
            batch.images = torch.from_numpy(batch.images)
            return batch
        memory = self._slots[slot].numpy()
        batch = self._maker.make(epoch, step, start, lambda shape: memory[: shape[0]])
        batch.images = slot
        return batch

    def _announce(self, maker: Maker[Made], epoch: int, step: int, start: int) -> None:
        worker = get_worker_info()
        stride = worker.num_workers if worker is not None else 1
        if self._announced_for != (epoch, start) or self._announcer is None:
            maker.reader.forget()
            count = maker.plan.steps.count(start)
            budget = self._lookahead // stride
            self._announcer = Announcer(maker, epoch, start, count, budget, stride, step)
            self._announced_for = (epoch, start)
        self._announcer.before(step)


class ProcessEngine(Generic[Made]):
    """Yields an epoch's batches in order, made by worker processes."""

    def __init__(
        self,
        plan: EnginePlan,
        open_maker: Callable[[], Maker[Made]],
        options: LoaderOptions,
        say: Say = lambda _line: None,
    ) -> None:
        workers = options.workers
        # The threads of obstore and tensorstore do not survive a fork.
        start_method = "forkserver" if options.worker_start == "auto" else options.worker_start
        self.most_in_flight = max(1, workers * options.per_worker)
        self._in_flight = InFlight(self.most_in_flight)
        self._beyond_flight = beyond_flight(options.held)
        self._batch_bytes = math.prod(plan.batch_shape)
        self._slots = None
        if workers:
            held = batches_held("process", workers, options.per_worker, options.held)
            page_lock = PageLock(say) if options.pin_memory else None
            self._slots = SharedSlots(held, plan.batch_shape, page_lock=page_lock)
        self._steps = _Steps(plan, self._slots)
        self._iterator: LimitedIterator | None = None
        self._casualties = Casualties()
        if start_method == "forkserver" and workers:
            # So that a worker starts in milliseconds, the server imports what each needs: this, and what makes batches.
            needed = ["stoker.loader.processes", type(plan).__module__]
            multiprocessing.get_context("forkserver").set_forkserver_preload(needed)
        self._loader = LimitedLoader(
            _Batches(open_maker, options.lookahead, self._slots.tensors if self._slots is not None else []),
            batch_sampler=self._steps,
            num_workers=workers,
            prefetch_factor=options.per_worker if workers else None,
            pin_memory=False,  # the slots are pinned themselves
            persistent_workers=options.persistent_workers and workers > 0,
            multiprocessing_context=start_method if workers else None,
            collate_fn=_unchanged,
            # A fork server keeps the environment it was started with; credentials may have been set later.
            worker_init_fn=partial(_prepare_worker, dict(os.environ), outage.shared() if workers else None),
            in_flight=self._in_flight,
        )

    @property
    def in_flight(self) -> int:
        return self._in_flight.limit

    def limit(self, batches: int) -> None:
        """Limits the batches in flight from now on; those already made are still yielded."""
        self._in_flight.limit = max(1, min(batches, self.most_in_flight))
        if self._slots is not None:
            self._slots.keep(self._in_flight.limit + self._beyond_flight)

    def ready(self) -> int:
        iterator = self._iterator
        return 0 if iterator is None else iterator.ready()

    def batches(self, epoch: int, start: int) -> Iterator[Made]:
        self._steps.epoch, self._steps.start = epoch, start
        if self._slots is not None:
            self._slots.give_back_all()
        try:
            iterator = iter(self._loader)
            self._iterator = iterator if isinstance(iterator, LimitedIterator) else None
            for batch in iterator:
                if isinstance(batch, StokerError):
                    raise batch
                if isinstance(batch.images, int):
                    assert self._slots is not None
                    batch.images = self._slots.look_at(batch.images, len(batch))
                yield batch
        except StokerError:
            raise
        except (RuntimeError, EOFError, OSError) as error:
            if "shared memory" in str(error) or (isinstance(error, OSError) and error.errno == errno.ENOSPC):
                raise no_shared_memory(self.most_in_flight * self._batch_bytes, error) from error
            # torch names a dead worker only if it has been collected by the time the pipe breaks.
            raise self._casualties.explain(error, self._workers()) from error

    def _workers(self) -> list[BaseProcess]:
        iterator = self._iterator or getattr(self._loader, "_iterator", None)
        return list(getattr(iterator, "_workers", ()))

    def close(self) -> None:
        """Ends the workers, and frees the slots: memory that the consumer still holds stays until it is done."""
        if outage.is_left():
            # torch would wait five seconds for each in turn, and they wait for their store.
            for worker in self._workers():
                worker.terminate()
        self._iterator = None
        iterator = getattr(self._loader, "_iterator", None)
        if iterator is not None:
            iterator._shutdown_workers()
            self._loader._iterator = None
        if self._slots is not None:
            self._slots.close()


def _unchanged(batch: Any) -> Any:
    return batch


def _prepare_worker(environment: dict[str, str], outages: str | None, _worker: int) -> None:
    """Sets up a worker for one core: more threads would only delay the other workers."""
    os.environ.clear()
    os.environ.update(environment)
    outage.adopt(outages)
    step_back()
    torch.set_num_threads(1)
    # Ctrl-C is handled by the parent, which shuts its workers down.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_leave_with_parent, name="parent-watch", daemon=True).start()


def _leave_with_parent() -> None:
    """Ends this worker when the training process ends, however that happens.

    Neither torch's watchdog nor PR_SET_PDEATHSIG can do this: both watch the process that forked this one, the fork
    server, which lives as long as any worker.
    """
    parent = multiprocessing.parent_process()
    if parent is not None:
        connection.wait([parent.sentinel])
        os._exit(1)


SETTLE_S = 5.0
"""A pipe breaks before the process counts as ended: the fork server has to collect it first."""
KERNEL_LOG = Path("/dev/kmsg")
NOT_KNOWN = 255
"""What multiprocessing reports for a process whose fork server is gone, too."""
REASONS: dict[int, str] = {
    signal.SIGKILL: "the kernel does this when memory runs out, and so does kill -9",
    signal.SIGBUS: "usually /dev/shm is full, or a mapped file became shorter",
    signal.SIGSEGV: "a library that it uses crashed",
    signal.SIGILL: "a library that it uses was built for another CPU",
    signal.SIGXCPU: "it used the CPU time that `ulimit -t` allows",
}


class WorkerDied(UserError):
    """A loader process ended in the middle of its work."""


class Casualties:
    """How the workers of one loader died: which one, by which signal, and whether because memory ran out. Made before
    they start."""

    def __init__(self) -> None:
        self._oom_kills = oom_kills()

    def explain(self, error: Exception, workers: Sequence[BaseProcess]) -> Exception:
        """The error to raise in place of the loader's: who died, or the loader's own if all workers live."""
        with suppress(OSError, ValueError):
            ended = connection.wait([worker.sentinel for worker in workers], SETTLE_S)
            for worker in workers:
                if worker.sentinel in ended:
                    worker.join(SETTLE_S)  # its files are closed a moment before it is gone
        dead = {number: worker for number, worker in enumerate(workers) if not worker.is_alive()}
        if dead:
            seen = [f"loader worker {number} (process {one.pid}) {_how(one.exitcode)}" for number, one in dead.items()]
            return WorkerDied(
                "worker-died",
                f"{'; '.join(seen)}, of {len(workers)} in this loader",
                why=self._why(list(dead.values())),
                hint="the same command resumes; less memory: num_workers, prefetch_factor or batch_size",
            )
        # An error that a worker raised contains its name.
        if not isinstance(error, (EOFError, ConnectionError)) or "DataLoader worker process" in str(error):
            return error
        # No worker is left to ask: the fork server died before it had started one.
        return WorkerDied(
            "worker-died",
            f"the loader's processes are not there any more ({type(error).__name__})",
            why="the process that starts them was killed; the kernel does this when memory runs out",
            hint="the same command resumes; loader=thread needs no such process",
        )

    def _why(self, dead: Sequence[BaseProcess]) -> str:
        before, now = self._oom_kills, oom_kills()
        if before is not None and now is not None and now > before:
            ended = count(now - before, "process", "processes")
            return f"memory ran out: the kernel's OOM killer has ended {ended} of this cgroup meanwhile"
        if {worker.pid for worker in dead} & killed_for_memory():
            return "memory ran out: the kernel's log names it among those that the OOM killer ended"
        reason = REASONS.get(-(dead[0].exitcode or 0))
        return reason or "a worker only makes batches: it does not end by itself"


def killed_for_memory(log: Path = KERNEL_LOG) -> set[int]:
    """The processes that the kernel's log names as killed for lack of memory; empty if it cannot be read."""
    found: set[int] = set()
    with suppress(OSError):
        descriptor = os.open(log, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            # A device gives one record at a time, and BlockingIOError after the last.
            while record := os.read(descriptor, 8192):
                found.update(map(int, re.findall(rb"Killed process (\d+)", record)))
        except OSError:
            pass
        finally:
            os.close(descriptor)
    return found


def _how(code: int | None) -> str:
    if code is None or code == NOT_KNOWN:
        return "ended, and nobody knows how"
    if code >= 0:
        return f"exited with code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"
