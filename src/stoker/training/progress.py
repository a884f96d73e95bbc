"""How far a run is: a few integers, from which order, crops and learning rate follow."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass
class Progress:
    """Where a run stands, between two steps."""

    epoch: int = 0
    position: int = 0
    """Samples of this epoch that have been trained on, over all ranks."""
    step: int = 0
    """Updates since the beginning, skipped ones included: the learning rate is a function of it."""
    bad_steps: int = 0
    """Skipped steps in a row."""
    micro_batch: int | None = None
    """What fits into memory, once that was found out."""
    best: float | None = None
    """Best `val/acc1` so far."""
    finished: bool = False
    origin: str | None = None
    """The checkpoint of `--resume` that the run began from, as `identity` names it."""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)
