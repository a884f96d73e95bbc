"""What stoker tells a user: what we saw, why it matters, what to type next; and the same as plain data for `--json`.

Errors, problems of a config, the doctor's and the plan's findings and the checks of `verify` are all this one record.
"""

from __future__ import annotations

import math
from dataclasses import KW_ONLY, asdict, dataclass, field
from typing import Any, Literal

Status = Literal["passed", "advice", "failed", "unknown"]
"""passed: looked at and fine; advice: it runs, but could be better; failed: must not stay like this; unknown: it could
not be checked, and `fix` says what would allow it."""


@dataclass(frozen=True)
class Estimate:
    """A predicted figure: the expected value, and the range that contains the true one with 80 % probability."""

    low: float
    expected: float
    high: float


@dataclass(frozen=True)
class Finding:
    """One thing that a user should know."""

    seen: str
    """What we saw, with the numbers."""
    fix: str | None = None
    """What to type or to set: a command, a config line, an argument of DataLoader."""
    speedup: Estimate | None = None
    """By how much the fix would speed up training; None if no measurement says so."""
    _: KW_ONLY
    name: str = ""
    """Stable: `storage-bound`, `config-invalid`. A check leaves it out: its declaration has it."""
    status: Status = "advice"
    why: str | None = None
    where: str | None = None
    """`file.yaml:12`, for something that is written down."""
    keys: tuple[str, ...] = ()
    """Config keys that it is about."""
    details: tuple[str, ...] = ()
    """Further lines for the terminal, such as a table."""
    facts: dict[str, Any] = field(default_factory=dict)
    """The numbers, for programs."""


_FIELDS = {"id": "name", "message": "seen", "hint": "fix"}
"""Documents of different commands call the same part differently, and programs rely on that."""


def as_json(finding: Finding, *keys: str) -> dict[str, Any]:
    """The finding under these keys of a document; parts that it lacks are null."""
    parts = asdict(finding) | {"refuses": finding.status == "failed"}
    return {key: _plain(parts[_FIELDS.get(key, key)]) for key in keys}


def _plain(value: Any) -> Any:
    """The value for JSON, which has neither NaN nor infinity."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if isinstance(value, str | int | bool | None) else str(value)
