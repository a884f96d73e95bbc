"""`stoker pack` for volumes: the cases of a config, in the layout that suits this machine, made by several processes;
the same bytes for any number of them, in any order.

A short trial finds the layout that is read fastest: one of the volumes is written in every layout, and read in patches.
What counts depends on the machine. Where the whole pack fits into memory, every epoch but the first reads from there;
where it does not, most patches come from the disk.

A case is made on its own, and recorded when all its files are complete: a killed pack loses only what was in flight.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from stoker.config import Config
from stoker.core.console import Answer, format_table, progress_bar, say, say_notes, say_warnings
from stoker.core.errors import UsageError, UserError, did_you_mean
from stoker.core.files import write_text
from stoker.core.units import count, size_text
from stoker.io.storage_speed import drop_from_cache
from stoker.io.stores import ReadFailure
from stoker.loader.rng import uniforms
from stoker.profile.host import HostConfig, usable_cpus
from stoker.profile.memory import read_memory
from stoker.tasks.packing import (
    RECORDS,
    PackWords,
    check_destination,
    check_options,
    check_space,
    claim_destination,
    list_bad,
    make_parts,
    options_of,
    spelled,
)
from stoker.tasks.volumes.cases.cases import Case, CaseList, Part, open_cases
from stoker.tasks.volumes.data import label_rules, reading_options
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
from stoker.tasks.volumes.pack.index import INDEX, PackIndex, read_case, write_index
from stoker.tasks.volumes.pack.make_case import Looked, VolumePack, VolumeSource, finished_case, look, make_cases
from stoker.tasks.volumes.pack.preprocessing import (
    PreparedVolume,
    VoxelChanges,
    parse_changes,
    prepare_image,
    prepare_label,
)
from stoker.tasks.volumes.pack.write_volume import LAYOUTS, Layout, remove, write_volume

VOLUMES = PackWords("volume", "packed", smaller="voxels: --dtype uint8 --clip 0.5%,99.5%, or --scale 0.5")
_CACHE_BYTES = 256_000_000
# Voxels of a volume in the trial: enough rows and planes for the real distances between them.
TRIAL_VOXELS = 1 << 27
ROUNDS, PATCHES = 5, 12
# Between two layouts this close, the smaller one wins: rounds differ by as much.
ALIKE = 1.15
MOST_CACHED = 0.5
"""Share of the memory that the page cache can be expected to keep for a pack."""
_TRIAL = 103


@dataclass(frozen=True)
class VolumePackResult:
    """The result of packing."""

    index: PackIndex
    kept: int
    """Cases finished by an earlier run."""
    bytes: int
    voxels: int
    """Voxels that were read and written now."""
    seconds: float


def pack(
    config: Config,
    destination: Path,
    *,
    workers: int,
    fresh: bool = False,
    clip: str | None = None,
    median: int | None = None,
    scale: str | None = None,
    spacing: str | None = None,
    dtype: str = "keep",
    layout: str = "auto",
    verify: bool = False,
) -> Answer:
    """Packs the volumes of a config; with `layout` auto, in the layout that a trial finds to be the fastest."""
    changes = parse_changes(clip, median, scale, spacing, dtype)
    if layout != "auto" and layout not in LAYOUTS:
        seen = f"--layout {layout} is not one of auto, {', '.join(LAYOUTS)}"
        raise UsageError("usage", seen, hint=did_you_mean(layout, LAYOUTS) or "auto")
    assert config.data_root is not None
    check_destination(config.data_root, destination)
    source = open_source(config, changes)
    root = destination.absolute()
    with claim_destination(root):
        if fresh:
            remove_pack(root)
        name = (options_of(_about(root)) or {}).get("layout") if layout == "auto" else layout
        trial = None
        if name not in LAYOUTS:
            assert config.patch_size is not None, "the config was checked"
            trial = try_layouts(source, root / RECORDS / "trial", config.patch_size)
            name = trial.chosen.name
            say(trial.text())
        result = pack_volumes(
            VolumePack(root, source, LAYOUTS[name]), workers=workers, max_bad_fraction=config.max_bad_fraction,
            verify=verify,
        )  # fmt: skip
    say_warnings(f"{one['id']} is left out: {one['reason']}" for one in result.index.skipped)
    return _answer(result, trial, destination)


def _answer(result: VolumePackResult, trial: TrialResult | None, folder: Path) -> Answer:
    index = result.index
    row = [
        f"{len(index.cases):,}" + (f" ({result.kept:,} kept)" if result.kept else ""),
        str(index.options["layout"]),
        size_text(result.bytes),
        f"{len(index.skipped):,}",
        f"{result.voxels / result.seconds / 1e6:,.0f}" if result.voxels else "–",
        str(folder),
    ]
    tried = None
    if trial is not None:
        tried = {
            one.layout.name: {
                "memory_ms": round(one.warm_s * 1e3, 4),
                "disk_ms": None if one.cold_s is None else round(one.cold_s * 1e3, 4),
                "bytes": one.bytes,
            }
            for one in trial.tried
        }
    document = {
        "volumes": len(index.cases),
        "kept": result.kept,
        "layout": index.options["layout"],
        "bytes": result.bytes,
        "skipped": list(index.skipped),
        "seconds": round(result.seconds, 3),
        "trial": tried,
        "folder": str(folder),
    }
    return Answer(format_table([row], ["volumes", "layout", "size", "skipped", "Mvoxels/s", "folder"]), document)


def open_source(config: Config, changes: VoxelChanges) -> VolumeSource:
    """Opens every volume of a config, those to train on and those to predict, reading no voxels."""
    assert config.data_root is not None
    listed = open_cases(config.data_root)
    parts: dict[Part, CaseList] = {"train": listed}
    try:
        if not config.data_root.lower().endswith((".yaml", ".yml")):
            parts["test"] = open_cases(config.data_root, "test")
    except UserError as error:
        if error.name != "no-cases":
            raise
    notes = tuple(note for part in parts.values() for note in part.notes)
    say_notes(notes)
    # A list of volumes need not name classes: then the labels are not checked.
    rules = None if config.num_classes is None and listed.rules is None else label_rules(config, listed)
    cases = tuple((name, case) for name, part in parts.items() for case in part.cases)
    reading = reading_options(config, [case for _, case in cases])
    with progress_bar("opening", len(cases), unit="volumes") as advance:
        looked = look(cases, rules, changes, reading, advance)
    return VolumeSource(cases, looked, rules, changes, reading, notes)


class VolumeVariants:
    """For a search: volumes with their voxels as they are, in each layout."""

    names = tuple(LAYOUTS)
    mapped = frozenset(name for name, layout in LAYOUTS.items() if layout.kind != "zarr")
    timed = "a patch with its label, in the trial with one volume"

    def __init__(self, config: HostConfig) -> None:
        self._config = config

    def trial(self, folder: Path) -> dict[str, float]:
        assert self._config.patch_size is not None, "the config was checked"
        found = try_layouts(self._source, folder, self._config.patch_size)
        return {one.layout.name: one.seconds(fits_in_memory=found.fits_in_memory) for one in found.tried}

    def make(self, name: str, root: Path) -> str:
        with claim_destination(root):
            result = pack_volumes(VolumePack(root, self._source, LAYOUTS[name]), workers=usable_cpus())
        if result.index.skipped:
            skipped = count(len(result.index.skipped), "volume")
            seen = f"{skipped} cannot be packed, and without it this is another training"
            raise UserError("pack-incomplete", seen)
        cases = count(len(result.index.cases), "volume")
        return f"{cases}, {result.bytes / 1e6:,.0f} MB, {LAYOUTS[name].words}"

    def remove(self, root: Path) -> None:
        remove_pack(root)

    @cached_property
    def _source(self) -> VolumeSource:
        return open_source(self._config, VoxelChanges())


def pack_volumes(
    pack: VolumePack, *, workers: int, max_bad_fraction: float = 0.0, verify: bool = False
) -> VolumePackResult:
    """Packs every case, or what an earlier run left; call it with the destination claimed."""
    began = time.monotonic()
    root, source, rules = pack.root, pack.source, pack.source.rules
    before = options_of(_about(root))
    check_options(root, before, pack.options, (INDEX, "train/images", "train/labels", "test/images"), VOLUMES, _spelled)
    if before is None:
        write_text(_about(root), json.dumps({"options": pack.options}, indent=1) + "\n")
    remove_temporaries(root)
    # Until everything is there again, this is not a pack: a run must not train on half of the volumes.
    (root / INDEX).unlink(missing_ok=True)
    unfinished = [number for number in range(len(source.cases)) if finished_case(pack, number) is None]
    check_space(root, sum(source.looked[number].packed_bytes(pack.layout) for number in unfinished), VOLUMES)
    # A compressed NIfTI file is decoded whole: unless it fits into the cache, every piece would decode it again.
    room = max(_CACHE_BYTES, *(one.decoded_bytes for one in source.looked))
    pack = replace(pack, source=replace(source, reading=replace(source.reading, cache_bytes=room)))
    sizes = [one.voxels * (len(case.images) + (case.label is not None))
             for one, (_, case) in zip(source.looked, source.cases, strict=True)]  # fmt: skip
    total = max(1, sum(sizes) // 1_000_000)
    made: dict[int, dict[str, Any]] = {}
    try:
        with progress_bar("packing", unit="Mvoxels") as advance:
            make_parts(
                make_cases, pack, [{"number": number, "verify": verify} for number in range(len(sizes))],
                lambda number: source.cases[number][1].id, VOLUMES, workers=workers,
                on_answer=lambda answer: made.update({answer["number"]: answer}),
                progress=lambda voxels: advance(min(voxels // 1_000_000, total), total),
            )  # fmt: skip
    finally:
        remove_temporaries(root)
    skipped = [made[number] for number in sorted(made) if "reason" in made[number]]
    _check_skipped(len(sizes), skipped, max_bad_fraction)
    finished = [read_case(pack.record(number)) for number in sorted(made) if "reason" not in made[number]]
    cases = tuple(found[0] for found in finished if found is not None)
    assert len(cases) + len(skipped) == len(sizes), "a case is packed or listed as skipped"
    index = PackIndex(
        cases,
        None if rules is None else rules.classes,
        None if rules is None else rules.ignore,
        source.notes,
        tuple({"id": one["id"], "reason": one["reason"]} for one in skipped),
        pack.options,
    )
    write_index(root, index)
    kept = [number for number, answer in made.items() if answer.get("kept")]
    return VolumePackResult(
        index=index,
        kept=len(kept),
        bytes=sum(file.facts.bytes for case in cases for file in case.files),
        voxels=sum(sizes) - sum(sizes[number] for number in kept),
        seconds=time.monotonic() - began,
    )


def _about(root: Path) -> Path:
    return root / RECORDS / "pack.json"


def _spelled(options: Mapping[str, Any]) -> str:
    labels = options.get("labels")
    others = spelled({name: value for name, value in options.items() if name != "labels"})
    return others if labels is None else f"{others} {labels[0]} classes and the ignore label {labels[1]}"


def remove_pack(root: Path) -> None:
    """Removes the files of `stoker pack`, and nothing else; without its records nothing is known to be ours."""
    if options_of(_about(root)) is None:
        return
    # The index first: leftovers of a crash must not look like a complete pack.
    (root / INDEX).unlink(missing_ok=True)
    records = root / RECORDS / "cases"
    for record in sorted(records.rglob("*.json")) if records.is_dir() else []:
        found = read_case(record)
        for file in found[0].files if found is not None else ():
            remove(root / file.path)
    remove_temporaries(root)
    for part in ("train", "test"):
        for folder in (root / part / "images", root / part / "labels", root / part):
            if folder.is_dir() and not any(folder.iterdir()):
                folder.rmdir()
    remove(records)
    _about(root).unlink()  # last: until then the rest is known to be ours


def remove_temporaries(root: Path) -> None:
    """Removes unfinished volumes; call with the destination locked."""
    for part in ("train", "test"):
        for folder in (root / part, root / RECORDS / "cases"):
            for path in folder.glob("*/.*.tmp"):
                remove(path)
    remove(root / RECORDS / "trial")


def _check_skipped(cases: int, skipped: list[dict[str, Any]], allowed: float) -> None:
    """Raises if too many cases cannot be read, or if a label is wrong; the finished ones are kept."""
    wrong = [one for one in skipped if one["wrong_labels"]]
    few = len(skipped) <= max(1, allowed * cases) and len(skipped) < cases
    if few and not wrong:
        return
    listed = list_bad([(one["id"], one["reason"]) for one in skipped])
    raise UserError(
        "bad-volumes",
        f"{len(skipped)} of {count(cases, 'volume')} cannot be packed\n{listed}",
        why="wrong labels put the whole data set in doubt"
        if wrong
        else f"max_bad_fraction allows {allowed:g}; the others are finished and kept",
        hint="repair these files, then run the same command again",
    )


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
        """The table of all layouts, and what was measured."""
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
    """The fastest layout where the pack will be read from; among those that are about as fast, the smallest."""
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
        plain += int(np.prod(shape, dtype=object)) * np.dtype(facts.dtype).itemsize
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
