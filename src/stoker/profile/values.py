"""Values of a line of clock.jsonl, each checked: a file may be damaged, or another version's."""

from __future__ import annotations

from dataclasses import MISSING, fields
from functools import cache
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from stoker.profile.observed import BatchTime
from stoker.profile.step_clock import BATCH_COLUMNS
from stoker.run.json_lines import LARGEST_NUMBER, Record, finite, number

MOST = {"workers": 4096, "prefetch": 4096, "threads_per_worker": 4096, "cpus": 1 << 16, "batch_size": 1 << 24}
"""The most of these that a machine may have. They are simulated one by one: a damaged file must not claim a billion."""
LONGEST_NAME = 1000

Facts = TypeVar("Facts")


def amount(record: Record, name: str) -> float | None:
    """The number under this name; None if it is absent, negative or anything else."""
    value = number(record, name)
    return value if value is not None and value >= 0 else None


def of_kind(value: Any, kind: type[Facts]) -> Facts | None:
    return value if isinstance(value, kind) and len(str(value)) <= LONGEST_NAME * 10 else None


def finite_in(values: Any) -> list[float]:
    known = map(finite, values) if isinstance(values, list) else ()
    return [value for value in known if value is not None and value >= 0]


def batch_time(row: Any) -> BatchTime | None:
    if not isinstance(row, list) or len(row) != len(BATCH_COLUMNS):
        return None
    known = [None if value is None else finite(value) for value in row]
    if any(value is not None and (number is None or number < 0) for value, number in zip(row, known, strict=True)):
        return None
    batch = BatchTime(**dict(zip(BATCH_COLUMNS, row, strict=True)))
    return batch if batch.wall_s and batch.samples else None  # neither is ever missing or zero


def known_facts(kind: type[Facts], values: Any) -> Facts:
    """A record of facts from a line. Names that this version does not know are dropped, and so are values of the wrong
    type. Raises ValueError if one of those is missing that every record has."""
    types = _types_of(kind)  # type: ignore[arg-type]
    given = values if isinstance(values, dict) else {}
    good = {name: value for name, value in given.items() if name in types and _is_a(value, types[name], name)}
    for part in fields(kind):  # type: ignore[arg-type]
        if part.name not in good and part.default is MISSING and part.default_factory is MISSING:
            raise ValueError(f"{part.name} is {str(given.get(part.name, 'missing'))[:100]}")
    return kind(**good)


@cache
def _types_of(kind: type[Any]) -> dict[str, tuple[Any, ...]]:
    """For each field the types that its value may have."""
    hints = {name: hint for name, hint in get_type_hints(kind).items() if get_origin(hint) is not tuple}
    return {name: (hint,) if get_origin(hint) is Literal else get_args(hint) or (hint,) for name, hint in hints.items()}


def _is_a(value: Any, types: tuple[Any, ...], name: str) -> bool:
    if value is None or isinstance(value, (bool, str)):
        literal = any(get_origin(kind) is Literal and value in get_args(kind) for kind in types)
        return literal or (type(value) in types and len(str(value)) <= LONGEST_NAME)
    whole, real = type(value) is int and int in types, float in types
    return (whole or real) and finite(value) is not None and 0 <= value <= MOST.get(name, LARGEST_NUMBER)
