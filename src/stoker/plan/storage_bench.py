"""What the measured speed of storage means: how many accelerators it feeds; as text and as a document."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from stoker.core.console import format_table
from stoker.io.storage_profile import LARGE_READ, SMALL_READ, Round, StorageProfile
from stoker.plan.break_even import ANY_DISK, copy_name, size_text
from stoker.profile.datasheets import load_datasheet, published_rate

BAR = 24
MLPERF = "MLPerf Storage"


@dataclass(frozen=True)
class Appetite:
    """What one accelerator reads while it trains one network."""

    gpu: str
    model: str
    bytes_per_second: float
    why: str
    large: bool = False
    """Whether it reads files of many megabytes, rather than single images."""


# MLPerf Storage: a batch of 400 images takes 0.435 s on an A100 and 0.224 s on an H100; 3D U-Net as it states it.
_A100 = (
    Appetite("A100", "ResNet-50", 400 / 0.435 * SMALL_READ, f"{SMALL_READ:,} bytes an image; {MLPERF}"),
    Appetite("A100", "3D U-Net", 1.6e9, MLPERF, large=True),
)
_H100 = (
    Appetite("H100", "ResNet-50", 400 / 0.224 * SMALL_READ, f"{SMALL_READ:,} bytes an image; {MLPERF}"),
    Appetite("H100", "3D U-Net", 3.2e9, MLPERF, large=True),
)
_KNOWN = {"a100-40": _A100, "a100-80": _A100, "h100": _H100}


def appetites(gpu: str | None) -> tuple[Appetite, ...]:
    """Of the named accelerator, or of an A100 and an H100; raises UsageError if nothing is published about it."""
    if gpu is None:
        return (*_A100, *_H100)
    sheet = load_datasheet(gpu)
    if sheet.name in _KNOWN:
        return _KNOWN[sheet.name]
    rate = published_rate(gpu)
    needed = rate.images_per_second * SMALL_READ
    why = f"{rate.images_per_second:,.0f} images/s of {SMALL_READ:,} bytes; {rate.source}"
    return (Appetite(sheet.title, "ResNet-50", needed, why),)


def fed(profile: StorageProfile, appetite: Appetite) -> float | None:
    """How many of these accelerators cold reads feed; None if they were not measured."""
    reached = profile.large if appetite.large else profile.best
    return None if reached is None else reached.bytes_per_second / appetite.bytes_per_second


def storage_document(profile: StorageProfile, wanted: Sequence[Appetite]) -> dict[str, Any]:
    """The document that `--json` prints."""
    return {
        "source": profile.source,
        "kind": profile.kind,
        "remote": profile.remote,
        "files": profile.files,
        "mean_bytes": profile.mean_bytes,
        "small_read_bytes": profile.small_bytes,
        "cold": [_round(one) for one in profile.cold],
        "warm": None if profile.warm is None else _round(profile.warm),
        "large": None if profile.large is None else _round(profile.large),
        "feeds": [
            {"gpu": one.gpu, "model": one.model, "needs_bytes_per_second": one.bytes_per_second, "why": one.why,
             "accelerators": fed(profile, one)}
            for one in wanted
        ],
        "not_measured": list(profile.missing),
    }  # fmt: skip


def _round(one: Round) -> dict[str, Any]:
    return asdict(one) | {"reads_per_second": one.reads_per_second, "bytes_per_second": one.bytes_per_second}


def storage_text(profile: StorageProfile, wanted: Sequence[Appetite], disk: str = ANY_DISK) -> str:
    """What it feeds, then the figures; `disk` is a local one that a copy could go to."""
    sections = [
        _headline(profile, wanted), [_about(profile), "", *_table(profile)], _feeds(profile, wanted),
        _next(profile, wanted, disk),
        [f"not measured: {text}" for text in profile.missing],
    ]  # fmt: skip
    return "\n\n".join("\n".join(lines) for lines in sections if lines)


def _headline(profile: StorageProfile, wanted: Sequence[Appetite]) -> list[str]:
    first = wanted[0]
    share = fed(profile, first)
    if share is None or profile.best is None:
        return [f"{profile.source}: cannot be measured cold, so what it feeds is not known"]
    has, needs = (rate_text(value) for value in (profile.best.bytes_per_second, first.bytes_per_second))
    return [f"feeds {amount_text(share, first.gpu)} on {first.model}: {has} of small reads, and one takes {needs}"]


def _about(profile: StorageProfile) -> str:
    place = {True: "over a network", False: "on this host", None: "somewhere"}[profile.remote]
    mean = size_text(profile.mean_bytes)
    found = f"{profile.files:,} files of {mean} on average" if profile.files != 1 else f"one file of {mean}"
    return f"{profile.source}: {profile.kind or 'storage'} {place}, {found}"


def _table(profile: StorageProfile) -> list[str]:
    size = f"{profile.small_bytes:,.0f} bytes"
    rows = [(f"{size}, cold", one) for one in profile.cold]
    if profile.warm is not None:
        rows.append((f"{size}, warm", profile.warm))
    if profile.large is not None:
        rows.append((f"{LARGE_READ >> 20} MB, cold", profile.large))
    if not rows:
        return []
    # Memory would dwarf all else.
    most = max((one.bytes_per_second for _, one in rows if one is not profile.warm), default=0.0)
    lines = [
        [
            what, f"{one.at_once:>7}", f"{one.reads_per_second:>8,.0f}", f"{one.bytes_per_second / 1e6:>8,.1f}",
            f"{one.p50_s * 1e3:>7.2f}", f"{one.p99_s * 1e3:>7.2f}",
            "" if one is profile.warm else "#" * max(1, round(BAR * one.bytes_per_second / most)),
        ]
        for what, one in rows
    ]  # fmt: skip
    return format_table(lines, ["a read", "at once", " reads/s", "    MB/s", " p50 ms", " p99 ms", ""]).splitlines()


def _feeds(profile: StorageProfile, wanted: Sequence[Appetite]) -> list[str]:
    lines = []
    for one in wanted:
        share = fed(profile, one)
        if share is not None:
            lines.append(
                f"  {amount_text(share, one.gpu)} on {one.model} ({rate_text(one.bytes_per_second)} each: {one.why})"
            )
    return ["it feeds", *lines] if lines else []


def _next(profile: StorageProfile, wanted: Sequence[Appetite], disk: str) -> list[str]:
    share = fed(profile, wanted[0])
    if share is None or share >= 1 or not profile.remote:
        return []
    return [f"next: stoker stage {profile.source} {disk.rstrip('/')}/{copy_name(profile.source)}"]


def amount_text(share: float, gpu: str) -> str:
    """`0.3 of an A100`, `4.2 A100s`"""
    article = "an" if gpu[0] in "AEHILMNORSX" else "a"
    if share >= 1:
        return f"{share:,.1f} {gpu}s"
    return f"{share:.2f} of {article} {gpu}" if share < 0.1 else f"{share:.1f} of {article} {gpu}"


def rate_text(bytes_per_second: float) -> str:
    """105 MB/s, 1.6 GB/s"""
    if bytes_per_second >= 1e9:
        return f"{bytes_per_second / 1e9:.1f} GB/s"
    return f"{bytes_per_second / 1e6:,.0f} MB/s" if bytes_per_second >= 10e6 else f"{bytes_per_second / 1e6:.1f} MB/s"
