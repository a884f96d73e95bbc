"""How a config key is declared, and byte sizes and times as people write them: `62GB`, `1h30m`."""

from __future__ import annotations

import math
import re
from decimal import Decimal
from typing import Annotated, Any, get_args

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    ValidationInfo,
    WithJsonSchema,
    field_validator,
)

_BYTE_SPELLINGS = {
    "PB": 10**15, "PiB": 2**50, "TB": 10**12, "TiB": 2**40, "GB": 10**9, "GiB": 2**30, "MB": 10**6, "MiB": 2**20,
    "KB": 10**3, "KiB": 2**10, "B": 1,
}  # fmt: skip
"""For writing back: the largest unit that divides exactly wins, decimal before binary."""
BYTE_UNITS = {unit.upper(): factor for unit, factor in _BYTE_SPELLINGS.items()}

TIME_UNITS = {
    "ms": 1e-3,
    "s": 1.0, "sec": 1.0, "second": 1.0, "seconds": 1.0,
    "m": 60.0, "min": 60.0, "minute": 60.0, "minutes": 60.0,
    "h": 3600.0, "hr": 3600.0, "hour": 3600.0, "hours": 3600.0,
    "d": 86400.0, "day": 86400.0, "days": 86400.0,
}  # fmt: skip

_BYTES = re.compile(r"([0-9]*\.?[0-9]+(?:[eE][0-9]+)?)\s*([A-Za-z]+)")
_TIME = re.compile(r"(?:\s*[0-9]*\.?[0-9]+\s*[A-Za-z]+)+\s*")
_TIME_PART = re.compile(r"([0-9]*\.?[0-9]+)\s*([A-Za-z]+)")


def parse_bytes(value: Any) -> int:
    """The number of bytes in `62GB`, `512 MiB`, `0`; a bare number is refused, since its unit would be a guess."""
    if isinstance(value, str):
        value = value.strip()
    if value in (0, "0") and not isinstance(value, bool):
        return 0
    if isinstance(value, (int, float)) or (isinstance(value, str) and re.fullmatch(r"[0-9.]+", value)):
        raise ValueError(f"{value} has no unit; write {value}MB, {value}GB or {value}GiB")
    match = _BYTES.fullmatch(value) if isinstance(value, str) else None
    factor = BYTE_UNITS.get(match[2].upper()) if match else None
    if match is None or factor is None:
        raise ValueError(f"{value!r} is not a size; write it like 62GB or 512MiB")
    size = float(match[1]) * factor
    if not math.isfinite(size):
        raise ValueError(f"{value!r} is not a finite size")
    # Whole numbers are kept exact: a float loses single bytes above 9 PB.
    return int(match[1]) * factor if match[1].isdigit() else round(size)


def format_bytes_exactly(size: int) -> str:
    """The shortest spelling that parses back to the same number."""
    if size == 0:
        return "0"
    unit, factor = next((unit, factor) for unit, factor in _BYTE_SPELLINGS.items() if size % factor == 0)
    return f"{size // factor}{unit}"


def parse_seconds(value: Any) -> float:
    """The seconds in `18 h`, `90s`, `1h30m`; a bare number is refused, since its unit would be a guess."""
    if isinstance(value, str):
        value = value.strip()
    if value in (0, "0") and not isinstance(value, bool):
        return 0.0
    if isinstance(value, (int, float)) or (isinstance(value, str) and re.fullmatch(r"[0-9.]+", value)):
        raise ValueError(f"{value} has no unit; write {value}s, {value}min or {value}h")
    if not isinstance(value, str) or not _TIME.fullmatch(value):
        raise ValueError(f"{value!r} is not a time; write it like 90s, 30min or 18h")
    seconds = 0.0
    for number, unit in _TIME_PART.findall(value):
        if unit.lower() not in TIME_UNITS:
            raise ValueError(f"{unit!r} in {value!r} is not a unit of time; use ms, s, min, h or d")
        seconds += float(number) * TIME_UNITS[unit.lower()]
    return seconds


def format_seconds_exactly(seconds: float) -> str:
    """A spelling that parses back to the same number."""
    if seconds == 0:
        return "0"
    for unit, factor in (("d", 86400), ("h", 3600), ("min", 60), ("s", 1)):
        if seconds % factor == 0:
            return f"{int(seconds // factor)}{unit}"
    # The shortest digits that read back as the same float, without an exponent (1e-05s would not parse).
    return f"{Decimal(repr(seconds)):f}s"


Bytes = Annotated[
    int,
    BeforeValidator(parse_bytes),
    PlainSerializer(format_bytes_exactly, when_used="json-unless-none"),
    WithJsonSchema({"type": ["string", "integer"], "examples": ["62GB", "512MiB"]}),
]
"""A number of bytes, written like `62GB`."""

Seconds = Annotated[
    float,
    BeforeValidator(parse_seconds),
    PlainSerializer(format_seconds_exactly, when_used="json-unless-none"),
    WithJsonSchema({"type": ["string", "number"], "examples": ["30min", "18h"]}),
]
"""A time in seconds, written like `18 h`."""


class KeyGroup(BaseModel):
    """Keys on one topic; the groups form one flat namespace (stoker.config.schema)."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        use_attribute_docstrings=True,
        # Every comparison with NaN is False: a NaN learning rate would pass all bounds.
        allow_inf_nan=False,
        protected_namespaces=(),
    )

    @field_validator("*", mode="before")
    @classmethod
    def _refuse_bool_as_number(cls, value: Any, info: ValidationInfo) -> Any:
        """`batch_size: true` is a mistake, not the number 1."""
        assert info.field_name is not None
        items = value if isinstance(value, list) else [value]
        expected = cls.model_fields[info.field_name].annotation
        if bool not in (expected, *get_args(expected)) and any(isinstance(i, bool) for i in items):
            raise ValueError(f"{str(items[0]).lower() if len(items) == 1 else items}: booleans are not accepted here")
        return value


def key(default: Any, *, unit: str | None = None, **constraints: Any) -> Any:
    """Declares a config key: default, unit, bounds (ge, gt, le, lt, …); the docstring below it is its reference."""
    extra: Any = {"unit": unit} if unit else None
    return Field(default, json_schema_extra=extra, **constraints)
