"""What the loop tells to whoever listens: progress, trackers, the clock's file. The loop prints nothing."""

from __future__ import annotations

from typing import Any, Protocol


class Observer(Protocol):
    """Listens to a run; nothing that it does may delay a step."""

    def epoch_begins(self, epoch: int, steps: int, done: int) -> None: ...

    def step(self, step: int, epoch: int, metrics: dict[str, Any]) -> None:
        """After each step; values may be device tensors, read only when they are shown."""

    def validation_begins(self, steps: int) -> None: ...

    def validation_step(self) -> None: ...

    def epoch_ends(self, step: int, epoch: int, metrics: dict[str, float]) -> None: ...

    def event(self, name: str, step: int, details: dict[str, Any]) -> None:
        """Something happened that is no metric: resumed, saved, a bad step, memory ran out."""


class Silence:
    """Listens to nothing: for ranks that do not speak, and for measuring."""

    def epoch_begins(self, epoch: int, steps: int, done: int) -> None: ...

    def step(self, step: int, epoch: int, metrics: dict[str, Any]) -> None: ...

    def validation_begins(self, steps: int) -> None: ...

    def validation_step(self) -> None: ...

    def epoch_ends(self, step: int, epoch: int, metrics: dict[str, float]) -> None: ...

    def event(self, name: str, step: int, details: dict[str, Any]) -> None: ...
