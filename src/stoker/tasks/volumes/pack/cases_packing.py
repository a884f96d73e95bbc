"""`stoker pack` for volumes: the cases of a config, in the layout that suits this machine, made by several processes;
the same bytes for any number of them, in any order.

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

from stoker.config import Config
from stoker.core.console import Advance, Answer, format_table, progress_bar, say, say_notes, say_warnings
from stoker.core.errors import UsageError, UserError, did_you_mean
from stoker.core.files import write_text
from stoker.core.units import count, size_text
from stoker.io.storage_speed import drop_from_cache
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
from stoker.tasks.volumes.data import reading_options
from stoker.tasks.volumes.formats.volume import ReadingOptions, Shape
from stoker.tasks.volumes.pack.index import INDEX, PackIndex, read_case, write_index
from stoker.tasks.volumes.pack.layout_trial import TrialResult, as_rows, try_layouts
from stoker.tasks.volumes.pack.make_case import VolumePack, finished_case, make_cases
from stoker.tasks.volumes.pack.preprocessing import VoxelChanges, parse_changes
from stoker.tasks.volumes.pack.sizes import Looked, look
from stoker.tasks.volumes.pack.write_volume import LAYOUTS, remove
from stoker.tasks.volumes.patches.labels import LabelRules

VOLUMES = PackWords("volume", "packed", smaller="voxels: --dtype uint8 --clip 0.5%,99.5%, or --scale 0.5")
_CACHE_BYTES = 256_000_000


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
            trial = source.try_layouts(root / RECORDS / "trial", config.patch_size)
            name = trial.chosen.name
            say(_words(trial))
        result = source.pack(root, name, workers=workers, max_bad_fraction=config.max_bad_fraction, verify=verify)
    say_warnings(f"{one['id']} is left out: {one['reason']}" for one in result.index.skipped)
    return Answer(_table(result, destination), _document(result, trial, destination))


@dataclass(frozen=True)
class VolumeSource:
    """The volumes of a config, opened to be packed."""

    cases: tuple[tuple[Part, Case], ...]
    looked: list[Looked]
    rules: LabelRules | None
    preparation: VoxelChanges
    reading: ReadingOptions
    notes: list[str]

    def try_layouts(self, folder: Path, patch: Shape | None) -> TrialResult:
        """Which layout is read fastest here; `folder` holds the trial's files, and is removed."""
        assert patch is not None, "the config was checked"
        memory = read_memory()
        with progress_bar("trying layouts") as advance:
            return try_layouts(
                self.cases, self.looked, self.rules, self.preparation, self.reading, folder, patch=patch,
                memory_bytes=None if memory is None else memory.limit_bytes, drop=drop_from_cache, progress=advance,
            )  # fmt: skip

    def pack(
        self, root: Path, layout: str, *, workers: int, max_bad_fraction: float = 0.0, verify: bool = False
    ) -> VolumePackResult:
        """Packs them, or what an earlier run left; call it with the destination claimed."""
        pack = VolumePack(root, self.cases, self.rules, self.preparation, LAYOUTS[layout], self.reading)
        with progress_bar("packing", unit="Mvoxels") as advance:
            return pack_volumes(
                pack, self.looked, workers=workers, max_bad_fraction=max_bad_fraction, notes=self.notes,
                verify=verify, progress=advance,
            )  # fmt: skip


def open_source(config: Config, preparation: VoxelChanges) -> VolumeSource:
    """Opens every volume of a config, reading no voxels."""
    assert config.data_root is not None
    parts = _parts(config.data_root)
    notes = [note for listed in parts.values() for note in listed.notes]
    say_notes(notes)
    rules = _rules(config, parts["train"])
    cases = gather(parts)
    reading = reading_options(config, [case for _, case in cases])
    with progress_bar("opening", len(cases), unit="volumes") as advance:
        looked = look(cases, rules, preparation, reading, advance)
    return VolumeSource(cases, looked, rules, preparation, reading, notes)


def _parts(data_root: str) -> dict[Part, CaseList]:
    """The cases to train on, and those to predict, if the layout has such."""
    parts: dict[Part, CaseList] = {"train": open_cases(data_root)}
    try:
        if not data_root.lower().endswith((".yaml", ".yml")):
            parts["test"] = open_cases(data_root, "test")
    except UserError as error:
        if error.name != "no-cases":
            raise
    return parts


def _rules(config: Config, listed: CaseList) -> LabelRules | None:
    """The classes that labels are checked against: the layout's, unless the config says otherwise."""
    if config.num_classes is None:
        if listed.rules is None or config.ignore_label is None:
            return listed.rules
        return LabelRules(listed.rules.classes, config.ignore_label)
    ignore = config.ignore_label
    if ignore is None and listed.rules is not None:
        ignore = listed.rules.ignore
    return LabelRules(config.num_classes, ignore)


def _words(trial: TrialResult) -> str:
    header, rows = as_rows(trial)
    where = "memory, where the pack fits" if trial.fits_in_memory else "the disk: the pack is larger than the memory"
    size = " x ".join(map(str, trial.patch))
    return f"{format_table(rows, header)}\ntime of a patch of {size} with its label; what counts is {where}"


def _table(result: VolumePackResult, folder: Path) -> str:
    """What was packed, in a row."""
    row = [
        f"{len(result.index.cases):,}" + (f" ({result.kept:,} kept)" if result.kept else ""),
        str(result.index.options["layout"]),
        size_text(result.bytes),
        f"{len(result.index.skipped):,}",
        f"{result.voxels / result.seconds / 1e6:,.0f}" if result.voxels else "–",
        str(folder),
    ]
    return format_table([row], ["volumes", "layout", "size", "skipped", "Mvoxels/s", "folder"])


def _document(result: VolumePackResult, trial: TrialResult | None, folder: Path) -> dict[str, object]:
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
    return {
        "volumes": len(result.index.cases),
        "kept": result.kept,
        "layout": result.index.options["layout"],
        "bytes": result.bytes,
        "skipped": list(result.index.skipped),
        "seconds": round(result.seconds, 3),
        "trial": tried,
        "folder": str(folder),
    }


class VolumeVariants:
    """For a search: volumes with their voxels as they are, in each layout."""

    names = tuple(LAYOUTS)
    mapped = frozenset(name for name, layout in LAYOUTS.items() if layout.kind != "zarr")
    timed = "a patch with its label, in the trial with one volume"

    def __init__(self, config: HostConfig) -> None:
        self._config = config

    def trial(self, folder: Path) -> dict[str, float]:
        found = self._source.try_layouts(folder, self._config.patch_size)
        return {one.layout.name: one.seconds(fits_in_memory=found.fits_in_memory) for one in found.tried}

    def make(self, name: str, root: Path) -> str:
        with claim_destination(root):
            result = self._source.pack(root, name, workers=usable_cpus())
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


def gather(parts: Mapping[Part, CaseList]) -> tuple[tuple[Part, Case], ...]:
    """The cases of all parts, in the order of the pack."""
    return tuple((part, case) for part, listed in parts.items() for case in listed.cases)


def pack_volumes(
    pack: VolumePack,
    looked: Sequence[Looked],
    *,
    workers: int,
    max_bad_fraction: float,
    notes: Sequence[str] = (),
    verify: bool = False,
    progress: Advance = lambda _done, _total: None,
) -> VolumePackResult:
    """Packs every case, or what an earlier run left; call it with the destination locked, after `look`."""
    began = time.monotonic()
    _claim(pack)
    remove_temporaries(pack.root)
    # Until everything is there again, this is not a pack: a run must not train on half of the volumes.
    (pack.root / INDEX).unlink(missing_ok=True)
    unfinished = [number for number in range(len(pack.cases)) if finished_case(pack, number) is None]
    check_space(pack.root, sum(looked[number].packed_bytes(pack.layout) for number in unfinished), VOLUMES)
    # A compressed NIfTI file is decoded whole: unless it fits into the cache, every piece would decode it again.
    room = max(_CACHE_BYTES, *(one.decoded_bytes for one in looked))
    pack = replace(pack, reading=replace(pack.reading, cache_bytes=room))
    sizes = [one.voxels * (len(case.images) + (case.label is not None))
             for one, (_, case) in zip(looked, pack.cases, strict=True)]  # fmt: skip
    made = _make(pack, sizes, workers, verify, progress)
    skipped = [made[number] for number in sorted(made) if "reason" in made[number]]
    _check_skipped(pack, skipped, max_bad_fraction)
    finished = [read_case(pack.record(number)) for number in sorted(made) if "reason" not in made[number]]
    cases = tuple(found[0] for found in finished if found is not None)
    assert len(cases) + len(skipped) == len(pack.cases), "a case is packed or listed as skipped"
    rules = pack.rules
    index = PackIndex(
        cases,
        None if rules is None else rules.classes,
        None if rules is None else rules.ignore,
        tuple(notes),
        tuple({"id": one["id"], "reason": one["reason"]} for one in skipped),
        pack.options,
    )
    write_index(pack.root, index)
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


def _claim(pack: VolumePack) -> None:
    """Records how a folder is packed; refuses one that was begun differently, or holds something else."""
    before = options_of(_about(pack.root))
    names = (INDEX, "train/images", "train/labels", "test/images")
    check_options(pack.root, before, pack.options, names, VOLUMES, _spelled)
    if before is None:
        write_text(_about(pack.root), json.dumps({"options": pack.options}, indent=1) + "\n")


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


def _make(
    pack: VolumePack, sizes: list[int], workers: int, verify: bool, progress: Advance
) -> dict[int, dict[str, Any]]:
    total = max(1, sum(sizes) // 1_000_000)
    made: dict[int, dict[str, Any]] = {}
    tasks = [{"number": number, "verify": verify} for number in range(len(pack.cases))]
    try:
        make_parts(
            make_cases, pack, tasks, lambda number: pack.cases[number][1].id, VOLUMES, workers=workers,
            on_answer=lambda answer: made.update({answer["number"]: answer}),
            progress=lambda voxels: progress(min(voxels // 1_000_000, total), total),
        )  # fmt: skip
    finally:
        remove_temporaries(pack.root)
    return made


def _check_skipped(pack: VolumePack, skipped: list[dict[str, Any]], allowed: float) -> None:
    """Raises if too many cases cannot be read, or if a label is wrong; the finished ones are kept."""
    wrong = [one for one in skipped if one["wrong_labels"]]
    few = len(skipped) <= max(1, allowed * len(pack.cases)) and len(skipped) < len(pack.cases)
    if few and not wrong:
        return
    listed = list_bad([(one["id"], one["reason"]) for one in skipped])
    raise UserError(
        "bad-volumes",
        f"{len(skipped)} of {count(len(pack.cases), 'volume')} cannot be packed\n{listed}",
        why="wrong labels put the whole data set in doubt"
        if wrong
        else f"max_bad_fraction allows {allowed:g}; the others are finished and kept",
        hint="repair these files, then run the same command again",
    )
