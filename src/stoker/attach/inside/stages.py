"""A stack of stages for the thread that makes a batch: a parent's clock stops while its child runs.

Each boundary closes a piece of time and gives it to the stage on top: wall time, time on a core, and time ready
to run. The kernel is asked for the second only where a piece was long, and for the third only where the first two
differ: most pieces are short and never left their core.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable
from typing import Any

from stoker.attach.inside.targets import NOTHING_TO_DO_WITHOUT, OTHER, SOCKET, STAGE_COUNT
from stoker.clock.costs import read_schedule

# A piece that is shorter counts as run, and one that was off its core for less as not queued: asking for a thread's
# CPU time takes 0.3 to 1.2 µs, reading schedstat about 3 µs.
WORTH_ASKING_NS = 20_000
WRAPPED = "_stoker_wrapped"

_wall_ns = time.perf_counter_ns
_cpu_ns = time.thread_time_ns


class StageClock:
    """Splits the time of a loader's batches, one after another, in the thread that makes them.

    The lists are sums over all batches so far: a batch is the difference of two readings."""

    def __init__(self) -> None:
        self.socket_bytes = 0
        self.opened: Any = None
        """The path that was opened last, and not yet given to a sample."""
        self.knows_run_queue = read_schedule() is not None
        self.wall = [0] * STAGE_COUNT
        self.off_core = [0] * STAGE_COUNT
        self.run_queue = [0] * STAGE_COUNT
        self.calls = [0] * STAGE_COUNT
        self.queued_ns = 0
        """What this thread has stood in the run queue, as far as it was asked for."""
        self.began_ns = self.took_ns = self.ran_ns = self.queue_ns = 0
        """Of the batch that was made last."""
        self._stage = OTHER
        self._stack: list[int] = []
        self._off_before = 0
        self._last_wall = self._last_cpu = self._asked_wall = 0

    def begin(self) -> None:
        """A batch begins; this thread's calls count from here on."""
        self._stack.clear()
        self._stage = OTHER
        schedule = read_schedule() if self.knows_run_queue else None
        self.queued_ns = self.queue_ns = schedule[1] if schedule else 0
        here.clock = self
        self._off_before = sum(self.off_core)
        self._last_cpu = _cpu_ns()
        self._last_wall = self._asked_wall = self.began_ns = _wall_ns()

    def end(self) -> None:
        """The batch is made."""
        self.close_piece()
        here.clock = None
        self.took_ns = self._last_wall - self.began_ns
        off_core = sum(self.off_core) - self._off_before
        self.ran_ns = self.took_ns - off_core
        self.queue_ns = min(off_core, self.queued_ns - self.queue_ns)

    def enter(self, stage: int) -> None:
        wall, top = _wall_ns(), self._stage
        took = wall - self._last_wall
        self._last_wall = wall
        self.wall[top] += took
        if took > WORTH_ASKING_NS:
            self._ask(wall, took, top)
        self._stack.append(top)
        self._stage = stage
        self.calls[stage] += 1

    def leave(self) -> None:
        self.close_piece()
        self._stage = self._stack.pop() if self._stack else OTHER

    def close_piece(self) -> None:
        """Gives the time since the last boundary to the stage on top."""
        wall, top = _wall_ns(), self._stage
        took = wall - self._last_wall
        self._last_wall = wall
        self.wall[top] += took
        if took > WORTH_ASKING_NS:
            self._ask(wall, took, top)

    def _ask(self, wall: int, took: int, stage: int) -> None:
        """Why a long piece was long: asks the kernel how much of it this thread did not run, and why."""
        cpu = _cpu_ns()
        off_core = (wall - self._asked_wall) - (cpu - self._last_cpu)
        self._asked_wall, self._last_cpu = wall, cpu
        if off_core <= 0:
            return
        off_core = min(took, off_core)
        self.off_core[stage] += off_core
        if off_core > WORTH_ASKING_NS and self.knows_run_queue:
            schedule = read_schedule()
            if schedule is not None:
                self.run_queue[stage] += min(off_core, schedule[1] - self.queued_ns)
                self.queued_ns = schedule[1]


class _Here(threading.local):
    clock: StageClock | None = None


here = _Here()
"""The clock of the thread that is making a batch; None in every other thread."""


def timed(function: Callable[..., Any], stage: int, only_with: str | None = None) -> Callable[..., Any]:
    """The same function; inside the making of a batch its time counts for the stage. `only_with` names an attribute
    without which a method has nothing to do, and needs no clock."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        clock = here.clock
        if clock is None or (only_with is not None and not getattr(args[0], only_with, True)):
            return function(*args, **kwargs)
        clock.enter(stage)
        try:
            got = function(*args, **kwargs)
        finally:
            clock.leave()
        if stage == SOCKET:
            clock.socket_bytes += _bytes_of(got)
        return got

    setattr(call, WRAPPED, True)
    # TorchScript compiles a function from its source: it is shown the function's own (torchvision.io's are scripted).
    call.__dict__.update({"__script_if_tracing_wrapper": True, "__original_fn": function})
    return call


def _bytes_of(received: Any) -> int:
    # recv_into and SSLSocket.read into a buffer return a count, the others what they received.
    if type(received) is int:
        return received
    return len(received) if isinstance(received, (bytes, bytearray)) else 0


def patch_stages(module: Any, targets: tuple[tuple[str, int], ...]) -> None:
    """Wraps the named functions and methods of a module; one that this version lacks is passed over."""
    for qualified, stage in targets:
        *classes, name = qualified.split(".")
        owner = module
        for part in classes:
            owner = getattr(owner, part, None)
        # A class is asked for its own methods only: an inherited one is wrapped where it is defined. That of a
        # class written in C may still be overridden in its Python subclass (socket.recv_into).
        function = getattr(owner, name, None)
        if function is None or getattr(function, WRAPPED, False):
            continue
        setattr(owner, name, timed(function, stage, NOTHING_TO_DO_WITHOUT.get(qualified)))
