"""`stoker pack` for volumes: the cases of a config, in the layout that suits this machine, made by several processes;
the same bytes for any number of them, in any order.

A case is made on its own, and recorded when all its files are complete: a killed pack loses only what was in flight.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from stoker.config import Config
from stoker.core.console import Answer, format_table, progress_bar, say, say_notes, say_warnings
from stoker.core.errors import UsageError, UserError, did_you_mean
from stoker.core.files import write_text
from stoker.core.units import count, size_text
from stoker.profile.host import HostConfig, usable_cpus
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
from stoker.tasks.volumes.cases.cases import CaseList, Part, open_cases
from stoker.tasks.volumes.data import label_rules, reading_options
from stoker.tasks.volumes.pack.index import INDEX, PackIndex, read_case, write_index
from stoker.tasks.volumes.pack.layout_trial import TrialResult, try_layouts
from stoker.tasks.volumes.pack.make_case import VolumePack, VolumeSource, finished_case, look, make_cases
from stoker.tasks.volumes.pack.preprocessing import VoxelChanges, parse_changes
from stoker.tasks.volumes.pack.write_volume import LAYOUTS, remove

VOLUMES = PackWords("volume", "packed", smaller="voxels: --dtype uint8 --clip 0.5%,99.5%, or --scale 0.5")
_CACHE_BYTES = 256_000_000


@dataclass(frozen=True)
class VolumePackResult:
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
    layout: str = "auto",
    verify: bool = False,
    **changes: Any,
) -> Answer:
    """Packs the volumes of a config; with `layout` auto, in the layout that a trial finds to be the fastest. The other
    options are those of `parse_changes`."""
    parsed = parse_changes(**changes)
    if layout != "auto" and layout not in LAYOUTS:
        seen = f"--layout {layout} is not one of auto, {', '.join(LAYOUTS)}"
        raise UsageError("usage", seen, hint=did_you_mean(layout, LAYOUTS) or "auto")
    assert config.data_root is not None
    check_destination(config.data_root, destination)
    source = open_source(config, parsed)
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
