"""Signals that mean 'save and leave': they set a flag, and the loop looks at it after each step."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from stoker.errors import Interrupted, Preempted, StokerError

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
