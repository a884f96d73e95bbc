"""Figures in words: times, rates and sizes with the digits that a reader needs."""

from __future__ import annotations

FEW = 10
"""A second: below this many, a rate needs a digit after the point."""


def time_text(seconds: float) -> str:
    """18 s, 1.4 s, 67.1 ms"""
    if seconds >= 1:
        return f"{seconds:.1f} s" if seconds < 9.95 else f"{seconds:,.0f} s"
    return f"{seconds * 1e3:.3g} ms" if seconds < 0.9995 else "1.0 s"


def long_time_text(seconds: float) -> str:
    """50 s, 40 minutes, 7 hours"""
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} minutes" if seconds < 100 * 60 else f"{seconds / 3600:.0f} hours"


def rate_text(per_second: float, what: str = "images") -> str:
    """1,214 images/s; a few a second with a digit after the point; seconds a sample, if it takes longer than one."""
    if per_second >= FEW:
        return f"{per_second:,.0f} {what}/s"
    if per_second >= 1:
        return f"{per_second:.1f} samples/s"
    return f"{time_text(1 / per_second)} per sample" if per_second > 0 else f"0 {what}/s"


def bytes_text(count: float) -> str:
    """14 MB, 7.1 GB"""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.1f} {unit}" if count < 10 * size else f"{count / size:,.0f} {unit}"
    return f"{count:.0f} bytes"
