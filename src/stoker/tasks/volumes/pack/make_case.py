"""Makes the cases of a pack, in a worker process: one at a time, and recorded when all its files are complete."""

from __future__ import annotations

import hashlib
import json
import pickle
import time
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from stoker.core.child import Parent
from stoker.io.stores import ReadFailure, is_url
from stoker.tasks.packing import RECORDS
from stoker.tasks.volumes.cases.cases import Case, Part
from stoker.tasks.volumes.formats.opening import OpenVolumes, VolumeRef
from stoker.tasks.volumes.formats.packed import stored_bytes
from stoker.tasks.volumes.formats.volume import CroppedVolume, ReadingOptions, Region, Volume, Voxels, whole
from stoker.tasks.volumes.pack.index import PackedCase, PackedFile, file_names, read_case, write_case
from stoker.tasks.volumes.pack.preprocessing import PreparedVolume, VoxelChanges, prepare_image, prepare_label
from stoker.tasks.volumes.pack.write_volume import Layout, Report, checksum, write_volume
from stoker.tasks.volumes.patches.labels import BadLabels, LabelRules, check_pair

_REPORT_EVERY_S = 0.2


@dataclass(frozen=True)
class VolumePack:
    """Everything that determines a pack, and where it goes."""

    root: Path
    cases: tuple[tuple[Part, Case], ...]
    rules: LabelRules | None
    preparation: VoxelChanges
    layout: Layout
    reading: ReadingOptions

    @property
    def options(self) -> dict[str, Any]:
        labels = None if self.rules is None else [self.rules.classes, self.rules.ignore]
        return {**self.preparation.as_dict(), "layout": self.layout.name, "labels": labels}

    def record(self, number: int) -> Path:
        part, case = self.cases[number]
        return self.root / RECORDS / "cases" / part / f"{self.names[part][case.id]}.json"

    @cached_property
    def names(self) -> dict[str, dict[str, str]]:
        """File names by part and id."""
        parts = {part for part, _ in self.cases}
        return {part: file_names([case.id for one, case in self.cases if one == part]) for part in parts}

    def paths(self, number: int) -> tuple[list[str], str]:
        """Where the images and the label of a case go, below the root."""
        part, case = self.cases[number]
        name = self.names[part][case.id]
        images = [
            f"{part}/images/{name}{'' if channel == 0 else f'_{channel:04d}'}{self.layout.suffix}"
            for channel in range(len(case.images))
        ]
        return images, f"{part}/labels/{name}{self.layout.suffix}"


def make_cases(argument: bytes, parent: Parent) -> None:
    """Makes the cases that the parent asks for."""
    pack: VolumePack = pickle.loads(argument)  # noqa: S301 - our own parent made it
    for task in parent.messages():
        last_s, since = time.monotonic(), 0

        def report(voxels: int) -> None:
            nonlocal last_s, since
            since += voxels
            if time.monotonic() - last_s >= _REPORT_EVERY_S:
                parent.send(since)
                last_s, since = time.monotonic(), 0

        number = task["number"]
        answer = {"number": number, "id": pack.cases[number][1].id}
        try:
            answer |= make_case(pack, number, verify=task["verify"], report=report)
        except OSError as error:
            answer |= {"error": f"{error.strerror or error}"}
        except ReadFailure as failure:
            answer |= {"reason": str(failure), "wrong_labels": False}
        except BadLabels as wrong:
            answer |= {"reason": f"{wrong}; {wrong.why}" if wrong.why else str(wrong), "wrong_labels": True}
        parent.send(since)
        parent.answer(answer)


def make_case(
    pack: VolumePack, number: int, *, verify: bool = False, report: Report = lambda _voxels: None
) -> dict[str, Any]:
    """Packs one case, unless it is finished; raises ReadFailure, BadLabels, OSError."""
    part, case = pack.cases[number]
    found = finished_case(pack, number)
    if found is not None and not (verify and _damaged(pack, found)):
        report(sum(int(np.prod(file.facts.shape, dtype=object)) for file in found.files))
        return {"kept": True}
    volumes = OpenVolumes(pack.reading)
    sources = tuple(volumes.get(ref) for ref in case.images)
    label = None if case.label is None else volumes.get(case.label)
    check_pair(case.id, sources, label)
    image_paths, label_path = pack.paths(number)
    if label is not None:
        # The label first: it is usually the one at fault.
        wanted = _label_of(pack, case, label)
        facts = write_volume(pack.root / label_path, wanted, pack.layout, is_label=True, report=report)
        packed_label = PackedFile(label_path, facts)
    images = []
    for path, source in zip(image_paths, sources, strict=True):
        prepared = prepare_image(source, pack.preparation)
        facts = write_volume(pack.root / path, prepared, pack.layout, is_label=False, report=report)
        images.append(PackedFile(path, facts))
    made = PackedCase(case.id, case.group, part, tuple(images), None if label is None else packed_label)
    write_case(pack.record(number), made, _fingerprint(case))
    return {"kept": False}


def _label_of(pack: VolumePack, case: Case, label: Volume) -> PreparedVolume:
    rules = pack.rules
    if rules is None:
        LabelRules(1).check_kind(case.id, label)
        return prepare_label(label, pack.preparation, label.dtype)
    rules.check_kind(case.id, label)
    return prepare_label(_Checked(label, whole(label.shape), case.id, rules), pack.preparation, rules.dtype)


@dataclass(frozen=True)
class _Checked(CroppedVolume):
    """A label volume whose values are checked as they are read, before they are narrowed."""

    case: str
    rules: LabelRules

    def read(self, region: Region, out: Voxels | None = None) -> Voxels:
        voxels = super().read(region, out)
        self.rules.check_values(self.case, self.name, voxels)
        return voxels


def finished_case(pack: VolumePack, number: int) -> PackedCase | None:
    """A case that an earlier run has finished, from the same source; only sizes are checked."""
    found = read_case(pack.record(number))
    if found is None or found[1] != _fingerprint(pack.cases[number][1]):
        return None
    try:
        is_whole = all(stored_bytes(str(pack.root / file.path)) == file.facts.bytes for file in found[0].files)
    except ReadFailure:
        return None
    return found[0] if is_whole else None


def _damaged(pack: VolumePack, case: PackedCase) -> bool:
    try:
        return any(checksum(pack.root / file.path, file.facts) != file.facts.xxh3 for file in case.files)
    except ReadFailure:
        return True


def _fingerprint(case: Case) -> str:
    """Changes if a file of the source does; the same wherever the source is mounted."""
    parts: list[Any] = [case.id, case.group]
    for ref in case.refs:
        parts.append([_state(ref), ref.level, None if ref.packed is None else ref.packed.xxh3])
    return hashlib.blake2b(json.dumps(parts).encode(), digest_size=16).hexdigest()


def _state(ref: VolumeRef) -> list[Any]:
    path = Path(ref.location)
    if is_url(ref.location) or not path.exists():
        return [ref.location]
    if path.is_dir():
        # A Zarr array: it has many chunks, so only its metadata is checked.
        described = [path / name for name in ("zarr.json", ".zarray", ".zgroup")]
        return [path.name, [[one.stat().st_size, one.stat().st_mtime_ns] for one in described if one.exists()]]
    state = path.stat()
    return [path.name, state.st_size, state.st_mtime_ns]
