"""Numbers in words: sizes, rates, durations, shares, counts and metrics, with the digits that a reader needs."""

from __future__ import annotations

from typing import Any

from stoker.core.finding import Estimate

_PERCENTAGES = ("dice", "iou", "surface_dice")


def size_text(size_bytes: float) -> str:
    """147 GB, 23.8 GB, 320 MB, 5.5 kB, 12 bytes"""
    for unit, factor in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size_bytes >= factor:
            return f"{_digits(size_bytes / factor, 100)} {unit}"
    return f"{size_bytes:.0f} bytes"


def duration_text(seconds: float) -> str:
    """67.1 ms, 1.4 s, 18 s, 83 min, 7.5 h, 3.2 days"""
    if seconds < 0.9995:
        return f"{seconds * 1e3:.3g} ms"
    for unit, factor in (("days", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= 2 * factor:
            return f"{_digits(seconds / factor, 10)} {unit}"
    return f"{_digits(seconds, 10)} s"


def clock(seconds: float) -> str:
    """07:37, or 1:15:00 from one hour on."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02d}:{second:02d}" if hours else f"{minute:02d}:{second:02d}"


def number_text(number: float) -> str:
    """1,214, 12.3 or 0.35: three digits, where a number is small."""
    return f"{number:,.0f}" if number >= 99.95 else f"{number:.3g}"


def rate_text(per_second: float, unit: str = "images") -> str:
    """1,214 images/s, 0.35 patches/s"""
    return f"{number_text(per_second)} {unit}/s"


def iterations_text(per_second: float | None) -> str:
    """Steps per second, or seconds per step if that is the larger number."""
    if not per_second:
        return "?it/s"
    return f"{per_second:.2f}it/s" if per_second >= 1 else f"{1 / per_second:.2f}s/it"


def speedup_text(gain: Estimate) -> str:
    """2.1x (1.8-2.3)"""
    return f"{gain.expected:.1f}x ({gain.low:.1f}-{gain.high:.1f})"


def metric_text(name: str, value: Any) -> str:
    """A metric for display: scores and shares in percent, rates without digits that flicker."""
    if isinstance(value, str):
        return value
    number = float(value)
    last = name.rsplit("/", 1)[-1]
    if last.startswith("acc") or last in _PERCENTAGES:
        return f"{number:.1f}%"
    if last == "wait" or last.endswith("_share"):
        return f"{number:.0%}"
    if last.endswith("seconds"):
        return f"{number:.1f} s"
    if last.endswith("per_second") or abs(number) >= 1000:
        return f"{number:,.0f}"
    return f"{number:.4g}"


def count(number: int, one: str, many: str | None = None) -> str:
    return f"{number:,} {one if number == 1 else many or one + 's'}"


def _digits(number: float, whole: float) -> str:
    """With one digit after the point below `whole`, unless it is a zero, and none from there on."""
    return f"{number:.1f}".removesuffix(".0") if round(number, 1) < whole else f"{number:,.0f}"
