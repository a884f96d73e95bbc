"""Starts one process per device of this node and waits for them; turns signals into a request to save and leave.

Each process runs the same command again with the variables that torchrun would set: one program runs alone, under this
launcher, under torchrun and under srun.

A wait for data is interrupted by a signal to the main thread (SIGURG), not by the loader: a stalled request cannot be
cancelled.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import TypeVar

from stoker.core.errors import EXIT_INTERRUPTED, EXIT_OK, EXIT_PREEMPTED, Interrupted, Preempted, StokerError, UserError
from stoker.core.signals import PREEMPTING, blocked_until_heard, handling, heard
from stoker.io import outage
from stoker.io.stores import StoreDown
from stoker.train.ranks import LAUNCHED

SIGNALS = (*PREEMPTING, signal.SIGINT)
GRACE_S = 120.0
"""How long the others may take to save after one process ended: the notice that a spot machine gets."""
TOLD_S = 5.0
"""A rank that leaves while it trains notifies the others itself, within a step; before training it cannot."""
POLL_S = 0.1
LEAVE_S = 2.0
"""After a signal, a batch may take this long; a store that does not respond may take minutes. Leaving without it loses
nothing: the run resumes with that batch."""
KICK = signal.SIGURG
"""Interrupts a wait of the main thread; ignored by processes without a handler."""
_PR_SET_PDEATHSIG = 1
# Loaded here: after a fork beside other threads, the dynamic loader's lock may be held by a thread that is gone.
_LIBC = ctypes.CDLL(None)


class LeaveValidation(Exception):
    """A signal arrived during validation: the resumed run validates and ends the epoch."""


class LeaveWait(BaseException):
    """A signal arrived, and the awaited batch did not. Not an Exception: it is raised in the middle of whatever code
    waits, which must not take it for its own failure."""


T = TypeVar("T")


class StopRequest:
    """Whether a signal asked this process to leave, and which one; the loop checks it after each step."""

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        self._waiting_since_s: float | None = None

    @property
    def wanted(self) -> bool:
        return self.signal is not None

    @property
    def interrupted(self) -> bool:
        return self.signal == signal.SIGINT

    def ending(self, step: int, *, interrupted: bool, saved: bool) -> StokerError:
        """The error that ends the run once its checkpoint is written: pre-empted, or interrupted by Ctrl-C."""
        # If the signal reached another rank, this one received none; it leaves in the same way.
        name = "Ctrl-C" if interrupted else self.signal.name if self.signal is not None else "another rank's signal"
        seen = f"{name}: saved at step {step}" if saved else f"{name}: stopped at step {step}, which could not be saved"
        hint = "the same command resumes from there" if saved else "the same command resumes from the save before"
        if interrupted:
            return Interrupted("interrupted", seen, hint=hint)
        return Preempted("preempted", seen, hint=hint)

    def unless_leaving(self, batches: Iterator[T]) -> Iterator[T]:
        """The same batches; raises LeaveWait if a signal has arrived and the next batch does not."""
        while True:
            self._waiting_since_s = time.monotonic()
            try:
                batch = next(batches)
            except StopIteration:
                return
            except (LeaveWait, StoreDown):
                if not self.wanted:
                    raise
                outage.abandon()
                raise LeaveWait from None
            finally:
                self._waiting_since_s = None
            yield batch

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Notes signals inside the block. A second Ctrl-C interrupts at once."""
        reading, writing = os.pipe2(os.O_CLOEXEC)

        def note(number: int, _frame: FrameType | None) -> None:
            if number == signal.SIGINT and self.interrupted:
                raise KeyboardInterrupt
            self.signal = signal.Signals(number)
            os.write(writing, b"!")  # neither an event nor a new thread: the handler may interrupt itself

        def leave(_number: int, _frame: FrameType | None) -> None:
            if self._waiting_since_s is not None:
                raise LeaveWait

        watch = threading.Thread(target=self._watch, args=(reading,), name="leaving", daemon=True)
        watch.start()
        try:
            with handling(leave, (KICK,)), handling(note, SIGNALS):
                self.signal = self.signal or heard()
                if self.wanted:
                    os.write(writing, b"!")
                yield
        finally:
            self._waiting_since_s = None
            os.close(writing)  # ends the thread
            watch.join(2 * LEAVE_S)

    def _watch(self, reading: int) -> None:
        """Once a signal has arrived, interrupts waits of the main thread that last too long."""
        main = threading.main_thread().ident
        with open(reading, "rb", buffering=0) as told:
            if not told.read(1) or main is None:
                return
            heard_s = time.monotonic()
            while not select.select([told], [], [], POLL_S)[0] or told.read(1):
                since_s = self._waiting_since_s
                if since_s is not None and time.monotonic() - max(since_s, heard_s) > LEAVE_S:
                    signal.pthread_kill(main, KICK)


def launch(command: Sequence[str], devices: int, nodes: int, environment: Mapping[str, str] = os.environ) -> int:
    """Runs the command once per device; returns the exit code of the first process that failed, or 0."""
    node = _node_rank(nodes, environment)
    address = environment.get("MASTER_ADDR")
    if nodes > 1 and not address:
        raise UserError(
            "no-master-address",
            f"num_nodes is {nodes}, but MASTER_ADDR is not set",
            why="the nodes connect to each other at that address",
            hint="MASTER_ADDR=<first node> MASTER_PORT=12355 NODE_RANK=<0, 1, ...> on every node",
        )
    port = environment.get("MASTER_PORT") or str(12355 if nodes > 1 else _free_port())
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for local in range(devices):
            own = dict(environment) | {
                "RANK": str(node * devices + local),
                "LOCAL_RANK": str(local),
                "WORLD_SIZE": str(nodes * devices),
                "LOCAL_WORLD_SIZE": str(devices),
                "MASTER_ADDR": address or "127.0.0.1",
                "MASTER_PORT": port,
                LAUNCHED: "1",
            }
            # In their own process group, so that Ctrl-C reaches them once, through us: twice means 'at once'.
            processes.append(
                subprocess.Popen([sys.executable, *command], env=own, process_group=0, preexec_fn=_prepare(os.getpid()))
            )
        return _attend(processes)
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.wait()


def launched_here() -> bool:
    """Whether `launch` started this process, and not torchrun or srun."""
    return LAUNCHED in os.environ


def _attend(processes: list[subprocess.Popen[bytes]]) -> int:
    """Forwards signals and waits for all; if one fails, asks the others to leave, and kills them after GRACE_S."""

    noticed = False

    def pass_on(number: int, _frame: FrameType | None) -> None:
        nonlocal noticed
        noticed = noticed or number in PREEMPTING
        tell(number)

    def tell(number: int) -> None:
        for process in processes:
            if process.poll() is None:
                process.send_signal(number)

    failed_at: float | None = None
    told = False
    first_code = EXIT_OK
    with handling(pass_on, SIGNALS):
        # Polls all of them each time: a living first one must not hide another that died.
        while None in (states := [process.poll() for process in processes]):
            codes = [code for code in states if code not in (None, EXIT_OK)]
            if codes and failed_at is None:
                first_code, failed_at = codes[0] or EXIT_OK, time.monotonic()
            if failed_at is not None and not told:
                # A rank that left to save has notified the others itself; a dead one could not.
                left = first_code in (EXIT_PREEMPTED, EXIT_INTERRUPTED)
                if not left or time.monotonic() - failed_at > TOLD_S:
                    tell(signal.SIGTERM)
                    told = True
            if failed_at is not None and time.monotonic() - failed_at > GRACE_S:
                for process in processes:
                    process.kill()
            time.sleep(POLL_S)
        codes = [process.returncode for process in processes if process.returncode != EXIT_OK]
        first_code = first_code or (codes[0] if codes else EXIT_OK)
    if noticed and EXIT_PREEMPTED in codes:
        return EXIT_PREEMPTED  # whichever rank exited first: others may have lost their connection to one that left
    # A process ended by a signal has a negative code; shells report 128 + its number.
    return first_code if first_code >= 0 else 128 - first_code


def _node_rank(nodes: int, environment: Mapping[str, str]) -> int:
    text = environment.get("NODE_RANK") or environment.get("SLURM_NODEID") or ("0" if nodes == 1 else "")
    if not text.isdigit() or int(text) >= nodes:
        raise UserError(
            "no-node-rank",
            f"NODE_RANK is {text or 'not set'}, with num_nodes: {nodes}",
            why="each node has to know its own number",
            hint=f"NODE_RANK=0 on the first node, up to {nodes - 1} on the last",
        )
    return int(text)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _prepare(parent: int) -> Callable[[], None]:
    """For a new process: makes the kernel kill it when its launcher dies, and hold back notices until it listens."""

    def ask_the_kernel() -> None:
        blocked_until_heard()
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)  # the launcher died before we could ask

    return ask_the_kernel
