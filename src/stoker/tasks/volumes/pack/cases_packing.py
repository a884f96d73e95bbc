"""`stoker pack` for volumes: from a config to its cases, the layout that suits this machine, and the pack."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from stoker.config import Config
from stoker.core.console import Say, format_table, progress_bar, say_notes, say_warnings
from stoker.core.errors import UserError
from stoker.core.units import size_text
from stoker.io.storage_speed import drop_from_cache
from stoker.profile.memory import read_memory
from stoker.tasks.images.pack.pack_folder import check_destination, claim_destination
from stoker.tasks.volumes.cases.cases import Case, CaseList, Part, open_cases
from stoker.tasks.volumes.formats.volume import ReadingOptions, Shape
from stoker.tasks.volumes.pack.blocks import RECORDS, VolumePack
from stoker.tasks.volumes.pack.layout_trial import USUAL_PATCH, TrialResult, as_rows, try_layouts
from stoker.tasks.volumes.pack.packing import (
    Looked,
    VolumePackResult,
    gather,
    look,
    pack_volumes,
    read_options,
    remove_pack,
)
from stoker.tasks.volumes.pack.preprocessing import VoxelChanges
from stoker.tasks.volumes.pack.writing import LAYOUTS
from stoker.tasks.volumes.patches.labels import LabelRules
from stoker.tasks.volumes.reading_options import reading_options


@dataclass(frozen=True)
class VolumePacking:
    """What the command line asks for."""

    preparation: VoxelChanges
    layout: str | None
    """None for the fastest in a trial."""
    workers: int
    verify: bool = False
    fresh: bool = False


@dataclass(frozen=True)
class VolumeSource:
    """The volumes of a config, opened to be packed."""

    cases: tuple[tuple[Part, Case], ...]
    looked: list[Looked]
    rules: LabelRules | None
    preparation: VoxelChanges
    reading: ReadingOptions
    notes: list[str]

    def try_layouts(self, folder: Path, patch: Shape) -> TrialResult:
        """Which layout is read fastest here; `folder` holds the trial's files, and is removed."""
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


def run_volume_packing(
    config: Config, destination: Path, asked: VolumePacking, say: Say
) -> tuple[VolumePackResult, TrialResult | None]:
    """Packs the volumes of a config; returns the result, and the trial if there was one."""
    assert config.data_root is not None
    check_destination(config.data_root, destination)
    source = open_source(config, asked.preparation)
    root = destination.absolute()
    with claim_destination(root):
        if asked.fresh:
            remove_pack(root)
        name, trial = asked.layout or (read_options(root) or {}).get("layout"), None
        if name not in LAYOUTS:
            trial = source.try_layouts(root / RECORDS / "trial", config.patch_size or USUAL_PATCH)
            name = trial.chosen.name
            say(_words(trial))
        result = source.pack(
            root, name, workers=asked.workers, max_bad_fraction=config.max_bad_fraction, verify=asked.verify
        )
    say_warnings(f"{one['id']} is left out: {one['reason']}" for one in result.index.skipped)
    return result, trial


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


def summary(result: VolumePackResult, folder: Path) -> str:
    """The table of what was packed."""
    row = [
        f"{len(result.index.cases):,}" + (f" ({result.kept:,} kept)" if result.kept else ""),
        str(result.index.options["layout"]),
        size_text(result.bytes),
        f"{len(result.index.skipped):,}",
        f"{result.voxels / result.seconds / 1e6:,.0f}" if result.voxels else "–",
        str(folder),
    ]
    return format_table([row], ["volumes", "layout", "size", "skipped", "Mvoxels/s", "folder"])


def as_document(result: VolumePackResult, trial: TrialResult | None, folder: Path) -> dict[str, object]:
    """The result for `--json`."""
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
