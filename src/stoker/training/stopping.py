"""Signals that mean 'save and leave': they set a flag, and the loop looks at it after each step."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from stoker.errors import Interrupted, Preempted, StokerError

PREEMPTING = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)


class StopRequest:
    """Whether somebody asked this process to leave, and how."""

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None

    @property
    def wanted(self) -> bool:
        return self.signal is not None

    def ending(self, step: int) -> StokerError:
        """How the run ends, after the checkpoint is written: pre-empted, or interrupted by Ctrl-C."""
        # Where another rank was asked, this one has no signal of its own: it is pre-empted with it.
        name = self.signal.name if self.signal is not None else "another rank's signal"
        if self.signal == signal.SIGINT:
            return Interrupted(
                "interrupted", f"Ctrl-C: saved at step {step}", hint="the same command goes on from there"
            )
        return Preempted("preempted", f"{name}: saved at step {step}", hint="the same command goes on from there")

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Takes the signals for the block. A second Ctrl-C interrupts at once."""

        def note(number: int, _frame: FrameType | None) -> None:
            if number == signal.SIGINT and self.signal == signal.SIGINT:
                raise KeyboardInterrupt
            self.signal = signal.Signals(number)

        before: dict[int, Any] = {number: signal.signal(number, note) for number in (*PREEMPTING, signal.SIGINT)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
