"""The economics of storage: what it gives, what training needs, and when a copy on a local disk pays off; as words, as
a document, and as the command to type."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from stoker.core.console import format_table
from stoker.core.units import duration_text, size_text
from stoker.io.storage_profile import LARGE_READ, SMALL_READ, StorageProfile
from stoker.io.storage_speed import Round
from stoker.profile.datasheets import load_datasheet, published_rate
from stoker.profile.mounts import LocalDisk
from stoker.profile.observed import Observed

ANY_DISK = "/local/disk"
ANY_CONFIG = "CONFIG"
"""Placeholders for a disk and a config that we do not know."""
WORTH_COPYING = 1.02
"""Below it, an epoch from the copy is not noticeably shorter."""
USABLE = 0.9
"""Share of the free space that a copy or a cache may take: a full disk hurts everybody who uses it."""
LEAST_PART = 0.05
"""Share of the data from which a cache of a part is worth the space."""


@dataclass(frozen=True)
class BreakEven:
    """What a copy costs once, and what it saves in every epoch."""

    bytes: float
    copy_s: float
    epoch_s: float
    """An epoch from the source, as now."""
    local_epoch_s: float

    @property
    def epochs(self) -> float | None:
        """After how many the copy has paid for itself; None if it never does."""
        if self.epoch_s < WORTH_COPYING * self.local_epoch_s:
            return None
        return self.copy_s / (self.epoch_s - self.local_epoch_s)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {"epochs": self.epochs}


def break_even(
    size_bytes: float, source: float, *, local: float | None = None, needed: float | None = None
) -> BreakEven | None:
    """When a copy pays off, given the bytes a second of the source, of the local disk, and of the consumer; None if the
    source's are not known.

    Without `local` the local disk is never the slowest part, without `needed` the consumer is not.
    """
    if source <= 0 or size_bytes <= 0:
        return None
    consumer = needed or math.inf
    nearby = min(local or math.inf, consumer)
    epoch_s = size_bytes / min(source, consumer)
    return BreakEven(size_bytes, size_bytes / source, epoch_s, 0.0 if nearby == math.inf else size_bytes / nearby)


def break_even_text(found: BreakEven) -> str:
    """`copying 147 GB first takes 83 min and pays off after 1.2 epochs`"""
    copying = f"copying {size_text(found.bytes)} first takes {duration_text(found.copy_s)}"
    if found.epochs is None:
        return f"{copying} and saves nothing: the source already delivers what is needed"
    return f"{copying} and pays off after {found.epochs:.1f} epochs"


def dataset_bytes(observed: Observed) -> float | None:
    """The size of the data that a loop reads; None if it is not known."""
    storage, loader = observed.storage, observed.loader
    if storage is None or storage.dataset_bytes is not None:
        return None if storage is None else storage.dataset_bytes
    if loader is None or loader.samples is None or storage.bytes_per_sample is None:
        return None
    return loader.samples * storage.bytes_per_sample


def break_even_of(observed: Observed, speedup: float) -> BreakEven | None:
    """When a copy pays off that would speed up this loop so much. Copying is taken to be as fast as many readers were,
    if that was measured, else as fast as the loop itself reads."""
    storage, pace, size = observed.storage, observed.images_per_second, dataset_bytes(observed)
    if storage is None or not storage.bytes_per_sample or not size or not pace:
        return None
    epoch_s = size / storage.bytes_per_sample / pace
    copying = max(storage.parallel_bytes_per_second or 0.0, pace * storage.bytes_per_sample)
    return BreakEven(size, size / copying, epoch_s, epoch_s / speedup)


@dataclass(frozen=True)
class StagingFix:
    """How to bring the data nearer."""

    fix: str
    """What to type."""
    about: str
    """Which disk, and how much is free there; may be empty."""
    share: float
    """The share of the data that is read from the local disk afterwards."""


def staging_fix(
    source: str, *, is_config: bool, root: str | None, size_bytes: float | None, disk: LocalDisk | None
) -> StagingFix:
    """The command that copies the data, if it fits; otherwise a cache for a part of it, or what is missing.

    `source` is a config file, perhaps with KEY=VALUE, or the folder that somebody's script reads.
    """
    disk = disk or LocalDisk(ANY_DISK, None)
    target = f"{disk.folder.rstrip('/')}/{copy_name(root or source)}"
    free = "" if disk.free_bytes is None else f"{disk.folder} has {size_text(disk.free_bytes)} free"
    if size_bytes is None or disk.free_bytes is None or size_bytes <= USABLE * disk.free_bytes:
        target = shlex.quote(target)
        if is_config:
            return StagingFix(f"stoker stage {source} --to {target}", free, 1.0)
        return StagingFix(f"stoker stage {shlex.quote(source)} {target}, then let the script read {target}", free, 1.0)
    about = f"{size_text(size_bytes)} do not fit: {free}"
    usable = USABLE * disk.free_bytes
    share = usable / size_bytes
    if is_config and share >= LEAST_PART:
        cache = shlex.quote(f"{disk.folder.rstrip('/')}/stoker-cache")
        return StagingFix(
            f"cache_dir={cache} cache_size={size_text(usable).replace(' ', '')}: keeps {share:.0%} of the data nearby",
            about,
            share,
        )
    return StagingFix(f"a local disk with room for {size_text(size_bytes)}, or a smaller, packed copy", about, 0.0)


def copy_name(source: str) -> str:
    """A name for the copy, from the last part of a folder, URL or config file."""
    if source == ANY_CONFIG:
        return "data"
    config = re.match(r"(?:\S*/)?([^/\s]+)\.ya?ml(?:\s|$)", source)
    return config[1] if config else source.rstrip("/").rpartition("/")[2] or "data"


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
    """What the named accelerator reads, or an A100 and an H100; raises UsageError if nothing is published about it."""
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


@dataclass(frozen=True)
class Payback:
    source_bytes_per_second: float
    readers: int
    local_bytes_per_second: float | None
    consumer: Appetite
    found: BreakEven

    def as_dict(self) -> dict[str, Any]:
        return {
            "source_bytes_per_second": self.source_bytes_per_second,
            "local_bytes_per_second": self.local_bytes_per_second,
            "consumer": f"{self.consumer.gpu}, {self.consumer.model}",
            "consumer_bytes_per_second": self.consumer.bytes_per_second,
        } | self.found.as_dict()


def payback_of(size_bytes: float, source: float, readers: int, local: float | None) -> Payback | None:
    """When a copy pays off, from bytes a second of the source and of the local disk.

    Training from the source is compared with an A100 on ResNet-50, as we do not know what will read it.
    """
    consumer = _A100[0]
    found = break_even(size_bytes, source, local=local, needed=consumer.bytes_per_second)
    return None if found is None else Payback(source, readers, local, consumer, found)


def payback_text(payback: Payback) -> str:
    """The line that is printed before copying starts."""
    local = payback.local_bytes_per_second
    disk = "" if local is None else f", the local disk {size_text(local)}/s to one"
    text = (
        f"the source delivers {size_text(payback.source_bytes_per_second)}/s to {payback.readers} readers{disk}: "
        f"copying takes about {duration_text(payback.found.copy_s)}"
    )
    consumer, epochs = payback.consumer, payback.found.epochs
    text += f". An {consumer.gpu} on {consumer.model} takes {size_text(consumer.bytes_per_second)}/s"
    if epochs is None:
        return f"{text}, which the source already delivers: the copy pays off only with more of them"
    return f"{text}: for it the copy pays off after {epochs:.1f} epochs"


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
    has, needs = (size_text(value) for value in (profile.best.bytes_per_second, first.bytes_per_second))
    return [f"feeds {amount_text(share, first.gpu)} on {first.model}: {has}/s of small reads, and one takes {needs}/s"]


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
                f"  {amount_text(share, one.gpu)} on {one.model} ({size_text(one.bytes_per_second)}/s each: {one.why})"
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
