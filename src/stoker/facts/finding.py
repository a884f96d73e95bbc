"""What a check or a plan found: what is wrong, what to do, and what that would bring."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Interval:
    """A prediction: where the truth lies with 80 % probability, and what is expected."""

    low: float
    expected: float
    high: float

    def as_dict(self) -> dict[str, float]:
        return asdict(self)


@dataclass(frozen=True)
class Finding:
    """One thing that a user should know."""

    id: str
    """A name that stays: `storage-bound`, `too-few-workers`."""
    message: str
    """What was seen, with the numbers."""
    fix: str | None = None
    """What to type or to set: a command, a config line, an argument of DataLoader."""
    speedup: Interval | None = None
    """By how much the fix would make training faster; None where nothing was measured that says so."""
    refuses: bool = False
    """Whether a run must not start like this."""

    def as_dict(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "message": self.message,
            "fix": self.fix,
            "speedup": None if self.speedup is None else self.speedup.as_dict(),
            "refuses": self.refuses,
        }
