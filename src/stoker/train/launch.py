"""Starts one process for each device of this node, ends with them, and turns signals into 'save and leave'."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

from stoker.errors import EXIT_INTERRUPTED, EXIT_OK, EXIT_PREEMPTED, Interrupted, Preempted, StokerError, UserError

# Signals that mean 'save and leave': they set a flag, and the loop looks at it after each step.

PREEMPTING = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)
"""A scheduler's notice, or a terminal that went away."""


class LeaveValidation(Exception):
    """Somebody asked to leave while the model was being judged: the epoch's end comes after the resume."""


class StopRequest:
    """Whether somebody asked this process to leave, and how."""

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None

    @property
    def wanted(self) -> bool:
        return self.signal is not None

    @property
    def interrupted(self) -> bool:
        return self.signal == signal.SIGINT

    def ending(self, step: int, *, interrupted: bool, saved: bool) -> StokerError:
        """How the run ends, after the checkpoint was written: pre-empted, or interrupted by Ctrl-C."""
        # Where another rank was asked, this one has no signal of its own: it leaves in the same way.
        name = "Ctrl-C" if interrupted else self.signal.name if self.signal is not None else "another rank's signal"
        seen = f"{name}: saved at step {step}" if saved else f"{name}: left at step {step}, which could not be saved"
        hint = "the same command goes on from there" if saved else "the same command goes on from the save before"
        if interrupted:
            return Interrupted("interrupted", seen, hint=hint)
        return Preempted("preempted", seen, hint=hint)

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Takes the signals for the block. A second Ctrl-C interrupts at once."""

        def note(number: int, _frame: FrameType | None) -> None:
            if number == signal.SIGINT and self.interrupted:
                raise KeyboardInterrupt
            self.signal = signal.Signals(number)

        before: dict[int, Any] = {}
        for number in (*PREEMPTING, signal.SIGINT):
            # nohup has the terminal's end ignored, and means it.
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                before[number] = signal.signal(number, note)
        try:
            yield
        finally:
            for taken, handler in before.items():
                signal.signal(taken, handler)


# Starts one process for each device of this node, and ends with them.
#
# The same command is run again in each process, with the variables that torchrun would set; so one program
# runs alone, under this launcher, under torchrun and under srun.

GRACE_S = 120.0
"""How long the others may take to save after one of them ended: the notice that a spot machine gets."""
POLL_S = 0.1
LAUNCHED = "STOKER_LAUNCHED"
_PR_SET_PDEATHSIG = 1
_PASSED_ON = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP, signal.SIGINT)
# Opened here: after a fork beside other threads, the loader's lock may be held by nobody who still lives.
_LIBC = ctypes.CDLL(None)


def launch(command: Sequence[str], devices: int, nodes: int, environment: Mapping[str, str] = os.environ) -> int:
    """Runs the command once for each device; the exit code of the first that failed, or 0."""
    node = _node_rank(nodes, environment)
    address = environment.get("MASTER_ADDR")
    if nodes > 1 and not address:
        raise UserError(
            "no-master-address",
            f"num_nodes is {nodes}, but MASTER_ADDR is not set",
            why="the nodes meet at that address",
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
            # A group of their own: Ctrl-C then reaches them once, through us, and not twice, which means 'at once'.
            processes.append(
                subprocess.Popen(
                    [sys.executable, *command], env=own, process_group=0, preexec_fn=_die_with(os.getpid())
                )
            )
        return _attend(processes)
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.wait()


def launched_here() -> bool:
    """Whether this process was started by `launch`, and not by torchrun or srun."""
    return LAUNCHED in os.environ


def _attend(processes: list[subprocess.Popen[bytes]]) -> int:
    """Passes signals on, waits for all; when one fails the others are asked to leave, then made to."""

    def pass_on(number: int, _frame: FrameType | None) -> None:
        for process in processes:
            if process.poll() is None:
                process.send_signal(number)

    before: dict[int, Any] = {}
    for number in _PASSED_ON:
        # nohup has the terminal's end ignored, and means it.
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
            before[number] = signal.signal(number, pass_on)
    try:
        failed_at: float | None = None
        first_code = EXIT_OK
        # Every one is asked each time: the first that lives must not hide one that died.
        while None in (states := [process.poll() for process in processes]):
            codes = [code for code in states if code not in (None, EXIT_OK)]
            if codes and failed_at is None:
                first_code, failed_at = codes[0] or EXIT_OK, time.monotonic()
                # A rank that left to save has told the others itself; a dead one could not.
                if first_code not in (EXIT_PREEMPTED, EXIT_INTERRUPTED):
                    pass_on(signal.SIGTERM, None)
            if failed_at is not None and time.monotonic() - failed_at > GRACE_S:
                for process in processes:
                    process.kill()
            time.sleep(POLL_S)
        codes = [process.returncode for process in processes if process.returncode != EXIT_OK]
        first_code = first_code or (codes[0] if codes else EXIT_OK)
    finally:
        for taken, handler in before.items():
            signal.signal(taken, handler)
    # A process that a signal ended has a negative code; a shell would say 128 + number.
    return first_code if first_code >= 0 else 128 - first_code


def _node_rank(nodes: int, environment: Mapping[str, str]) -> int:
    text = environment.get("NODE_RANK") or environment.get("SLURM_NODEID") or ("0" if nodes == 1 else "")
    if not text.isdigit() or int(text) >= nodes:
        raise UserError(
            "no-node-rank",
            f"NODE_RANK is {text or 'not set'}, with num_nodes: {nodes}",
            why="each node has to know which one it is",
            hint=f"NODE_RANK=0 on the first node, up to {nodes - 1} on the last",
        )
    return int(text)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _die_with(parent: int) -> Callable[[], None]:
    """To be called in a new process: no orphan outlives a launcher that was killed."""

    def ask_the_kernel() -> None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)  # it was killed before we could ask

    return ask_the_kernel
