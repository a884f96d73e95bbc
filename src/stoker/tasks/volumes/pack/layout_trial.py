"""A short trial of the layouts of a pack: one of the volumes is written in each of them, and read in patches.

What counts depends on the machine. Where the whole pack fits into memory, every epoch but the first reads from there;
where it does not, most patches come from the disk.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from stoker.core.console import format_table, progress_bar
from stoker.core.errors import UserError
from stoker.io.storage_speed import drop_from_cache
from stoker.io.stores import ReadFailure
from stoker.loader.rng import uniforms
from stoker.profile.memory import read_memory
from stoker.tasks.volumes.cases.cases import Case
from stoker.tasks.volumes.formats.opening import OpenVolumes, VolumeRef, open_volume
from stoker.tasks.volumes.formats.packed import stored_shape
from stoker.tasks.volumes.formats.volume import (
    CroppedVolume,
    ReadingOptions,
    Region,
    Shape,
    Volume,
    as_shape,
    box_at,
    sizes_text,
)
from stoker.tasks.volumes.pack.make_case import Looked, VolumeSource
from stoker.tasks.volumes.pack.preprocessing import PreparedVolume, prepare_image, prepare_label
from stoker.tasks.volumes.pack.write_volume import LAYOUTS, Layout, remove, write_volume

# Voxels of a volume in the trial: enough rows and planes for the real distances between them.
TRIAL_VOXELS = 1 << 27
ROUNDS, PATCHES = 5, 12
# Between two layouts this close, the smaller one wins: rounds differ by as much.
ALIKE = 1.15
MOST_CACHED = 0.5
"""Share of the memory that the page cache can be expected to keep for a pack."""
_TRIAL = 103


@dataclass(frozen=True)
class Tried:
    """What the trial measured for one layout."""

    layout: Layout
    warm_s: float
    """Time for a patch with its label, from memory."""
    cold_s: float | None
    """The same from the disk; None if the page cache could not be emptied."""
    bytes: int
    """Expected size of the whole pack."""

    def seconds(self, *, fits_in_memory: bool) -> float:
        """Time for a patch from where the pack will be read."""
        return self.warm_s if fits_in_memory or self.cold_s is None else self.cold_s


@dataclass(frozen=True)
class TrialResult:
    tried: tuple[Tried, ...]
    chosen: Layout
    patch: Shape
    fits_in_memory: bool

    def text(self) -> str:
        rows = [
            [
                one.layout.name,
                f"{one.warm_s * 1e3:.2f} ms",
                "–" if one.cold_s is None else f"{one.cold_s * 1e3:.1f} ms",
                f"{one.bytes / 1e9:,.2f} GB",
                "chosen" if one.layout == self.chosen else "",
            ]
            for one in self.tried
        ]
        table = format_table(rows, ["layout", "from memory", "from disk", "size", ""])
        fits = self.fits_in_memory
        where = "memory, where the pack fits" if fits else "the disk: the pack is larger than the memory"
        return f"{table}\ntime of a patch of {sizes_text(self.patch)} with its label; what counts is {where}"


def try_layouts(source: VolumeSource, folder: Path, patch: Shape) -> TrialResult:
    """Writes a typical volume in every layout below `folder`, which is removed afterwards, and reads patches of it. A
    patch larger than the volume is cut to it."""
    case = source.cases[_typical(source.looked)][1]
    try:
        with progress_bar("trying layouts") as advance:
            prepared = _prepared(case, source)
            patch = as_shape(map(min, patch, prepared[0][0].shape))
            written: dict[str, tuple[list[VolumeRef], float]] = {}
            for done, layout in enumerate(LAYOUTS.values()):
                refs = []
                for place, (volume, is_label) in enumerate(prepared):
                    path = folder / layout.name / f"{place}{layout.suffix}"
                    refs.append(VolumeRef(str(path), packed=write_volume(path, volume, layout, is_label=is_label)))
                written[layout.name] = refs, _share(refs)
                advance(done + 1, len(LAYOUTS) + ROUNDS + 1)
            # A data set is larger than the cache of decoded chunks, which would hold all of this volume.
            uncached = replace(source.reading, cache_bytes=0)
            cold = {name: _cold(refs, patch, uncached) for name, (refs, _) in written.items()}
            warm: dict[str, list[float]] = {name: [] for name in written}
            volumes = {name: [open_volume(ref, uncached) for ref in refs] for name, (refs, _) in written.items()}
            for round_ in range(ROUNDS):
                for name in written:
                    warm[name].append(_read(volumes[name], patch, round_, PATCHES))
                advance(len(LAYOUTS) + round_ + 1, len(LAYOUTS) + ROUNDS)
    except ReadFailure as failure:
        raise UserError(
            "trial-failed",
            f"{case.id} cannot be read: {failure}",
            why="the layout of a pack is chosen by a trial with a typical volume",
            hint="repair this file, or choose without a trial: --layout raw",
        ) from None
    finally:
        remove(folder)
    tried = tuple(
        Tried(layout, min(warm[layout.name]), cold[layout.name],
              round(sum(one.packed_bytes(layout) for one in source.looked) * written[layout.name][1]))
        for layout in LAYOUTS.values()
    )  # fmt: skip
    memory = read_memory()
    limit = None if memory is None else memory.limit_bytes
    fits = limit is not None and min(one.bytes for one in tried) <= MOST_CACHED * limit
    return TrialResult(tried, choose(tried, fits_in_memory=fits), patch, fits)


def choose(tried: Sequence[Tried], *, fits_in_memory: bool) -> Layout:
    """The fastest layout for where the pack will be read; among those that are about as fast, the smallest."""
    seconds = {one.layout.name: one.seconds(fits_in_memory=fits_in_memory) for one in tried}
    close = [one for one in tried if seconds[one.layout.name] <= ALIKE * min(seconds.values())]
    return min(close, key=lambda one: (one.bytes, seconds[one.layout.name])).layout


def _typical(looked: Sequence[Looked]) -> int:
    """The case in the middle by size, of those that can be read."""
    numbers = sorted((number for number, one in enumerate(looked) if one.voxels), key=lambda n: (looked[n].voxels, n))
    if not numbers:
        raise UserError(
            "bad-volumes",
            f"none of {len(looked)} volumes can be packed; the first: {looked[0].reason}",
            hint="repair these files, or change the options",
        )
    return numbers[len(numbers) // 2]


def _prepared(case: Case, source: VolumeSource) -> list[tuple[PreparedVolume, bool]]:
    """The case's volumes as they will be packed, and whether each is the label; of a large one, a slab of whole
    planes."""
    volumes, rules = OpenVolumes(source.reading), source.rules
    found = []
    for ref in case.refs:
        volume = volumes.get(ref)
        depth = max(1, TRIAL_VOXELS // (volume.shape[1] * volume.shape[2]))
        if depth < volume.shape[0]:
            volume = CroppedVolume(volume, Region((0, 0, 0), (depth, volume.shape[1], volume.shape[2])))
        if ref is case.label:
            kind = volume.dtype if rules is None else rules.dtype
            found.append((prepare_label(volume, source.changes, kind), True))
        else:
            found.append((prepare_image(volume, source.changes), False))
    return found


def _share(refs: Sequence[VolumeRef]) -> float:
    """Bytes of the files in relation to their voxels."""
    stored = plain = 0
    for ref in refs:
        facts = ref.packed
        assert facts is not None
        shape = stored_shape(facts.shape, facts.block if facts.kind == "blocks" else 0)
        plain += math.prod(shape) * np.dtype(facts.dtype).itemsize
        stored += facts.bytes
    return stored / max(1, plain)


def _cold(refs: Sequence[VolumeRef], patch: Shape, reading: ReadingOptions) -> float | None:
    """Seconds for a patch of files that are not in memory."""
    for ref in refs:
        path = Path(ref.location)
        files = [one for one in path.rglob("*") if one.is_file()] if path.is_dir() else [path]
        if not all(drop_from_cache(str(one)) for one in files):
            return None
    # Few patches: they are spread over the volume, and must not read pages that an earlier one has cached.
    return _read([open_volume(ref, reading) for ref in refs], patch, ROUNDS, 3)


def _read(volumes: Sequence[Volume], patch: Shape, round_: int, patches: int) -> float:
    """Seconds for a patch at a random place, with its label."""
    shares = uniforms(np.arange(patches, dtype=np.uint64) + np.uint64(round_ * PATCHES), _TRIAL, 3)
    shape: Any = volumes[0].shape
    outs = [np.empty(patch, volume.dtype) for volume in volumes]
    for out in outs:
        out[...] = 0  # memory that was never touched costs page faults
    began = time.perf_counter()
    for share in shares.tolist():
        start = as_shape(int(one * (size - length + 1)) for one, size, length in zip(share, shape, patch, strict=True))
        for volume, out in zip(volumes, outs, strict=True):
            volume.read(box_at(start, patch), out)
    return (time.perf_counter() - began) / patches
