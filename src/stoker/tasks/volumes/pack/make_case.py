"""The cases of a pack: what is known about them before they are packed, and how a worker process makes them, one at a
time; a case is recorded when all its files are complete."""

from __future__ import annotations

import hashlib
import json
import math
import pickle
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from stoker.core.child import Parent
from stoker.core.console import Advance
from stoker.io.stores import ReadFailure, is_url
from stoker.tasks.packing import RECORDS
from stoker.tasks.volumes.cases.cases import Case, Part
from stoker.tasks.volumes.formats.opening import OpenVolumes, VolumeRef
from stoker.tasks.volumes.formats.packed import stored_bytes, stored_shape
from stoker.tasks.volumes.formats.volume import CroppedVolume, ReadingOptions, Region, Shape, Volume, Voxels, whole
from stoker.tasks.volumes.pack.index import PackedCase, PackedFile, file_names, read_case, write_case
from stoker.tasks.volumes.pack.preprocessing import PreparedVolume, VoxelChanges, new_grid, prepare_image, prepare_label
from stoker.tasks.volumes.pack.write_volume import Layout, Report, checksum, write_volume
from stoker.tasks.volumes.patches.labels import BadLabels, LabelRules, check_pair

# Opening a volume is mostly waiting, for a network file system or an object store.
_THREADS = 8
_REPORT_EVERY_S = 0.2


@dataclass(frozen=True)
class Looked:
    """What is known about a case before it is packed."""

    shape: Shape = (0, 0, 0)
    """Shape after packing."""
    image_bytes: int = 0
    """Bytes of one voxel, in all channels."""
    label_bytes: int = 0
    decoded_bytes: int = 0
    """Decoded size of its largest file, if that can only be decoded whole."""
    reason: str = ""
    """Why it cannot be opened, or prepared as asked."""

    @property
    def voxels(self) -> int:
        return math.prod(self.shape)

    def packed_bytes(self, layout: Layout) -> int:
        """Size of its files, before compression."""
        stored = stored_shape(self.shape, layout.block if layout.kind == "blocks" else 0)
        return math.prod(stored) * (self.image_bytes + self.label_bytes)


@dataclass(frozen=True)
class VolumeSource:
    """The volumes to pack, and what is done to their voxels."""

    cases: tuple[tuple[Part, Case], ...]
    looked: tuple[Looked, ...]
    rules: LabelRules | None
    changes: VoxelChanges
    reading: ReadingOptions
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class VolumePack:
    """Everything that determines a pack, and where it goes."""

    root: Path
    source: VolumeSource
    layout: Layout

    @property
    def options(self) -> dict[str, Any]:
        rules = self.source.rules
        labels = None if rules is None else [rules.classes, rules.ignore]
        return {**self.source.changes.as_dict(), "layout": self.layout.name, "labels": labels}

    def record(self, number: int) -> Path:
        part, case = self.source.cases[number]
        return self.root / RECORDS / "cases" / part / f"{self._names[part][case.id]}.json"

    @cached_property
    def _names(self) -> dict[str, dict[str, str]]:
        """File names by part and id."""
        cases = self.source.cases
        return {
            part: file_names([case.id for one, case in cases if one == part]) for part in {part for part, _ in cases}
        }

    def paths(self, number: int) -> tuple[list[str], str]:
        """Where the images and the label of a case go, below the root."""
        part, case = self.source.cases[number]
        name = self._names[part][case.id]
        images = [
            f"{part}/images/{name}{'' if channel == 0 else f'_{channel:04d}'}{self.layout.suffix}"
            for channel in range(len(case.images))
        ]
        return images, f"{part}/labels/{name}{self.layout.suffix}"


def look(
    cases: Sequence[tuple[Part, Case]],
    rules: LabelRules | None,
    changes: VoxelChanges,
    reading: ReadingOptions,
    progress: Advance,
) -> tuple[Looked, ...]:
    """Opens every case, reading no voxels; one that cannot be opened is empty here, and reported when it is packed."""
    volumes = OpenVolumes(reading)

    def work(case: Case) -> Looked:
        try:
            sources = [volumes.get(ref) for ref in case.images]
            label = None if case.label is None else volumes.get(case.label)
            shape, _ = new_grid(sources[0], changes)
        except ReadFailure as failure:
            return Looked(reason=str(failure))
        kinds = [np.dtype(np.uint8) if changes.dtype == "uint8" else source.dtype for source in sources]
        label_bytes = 0 if label is None else (label.dtype if rules is None else rules.dtype).itemsize
        voxels = math.prod(sources[0].shape)
        zipped = [one for one in sources if one.name.lower().endswith(".gz")]
        decoded = max((voxels * one.dtype.itemsize for one in zipped), default=0)
        return Looked(shape, sum(min(kind.itemsize, 4) for kind in kinds), label_bytes, decoded)

    found = []
    with ThreadPoolExecutor(_THREADS) as pool:
        for one in pool.map(lambda pair: work(pair[1]), cases):
            found.append(one)
            progress(len(found), len(cases))
    return tuple(found)


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
        answer = {"number": number, "id": pack.source.cases[number][1].id}
        try:
            answer["kept"] = make_case(pack, number, verify=task["verify"], report=report)
        except OSError as error:
            answer |= {"error": f"{error.strerror or error}"}
        except ReadFailure as failure:
            answer |= {"reason": str(failure), "wrong_labels": False}
        except BadLabels as wrong:
            answer |= {"reason": f"{wrong}; {wrong.why}" if wrong.why else str(wrong), "wrong_labels": True}
        parent.send(since)
        parent.answer(answer)


def make_case(pack: VolumePack, number: int, *, verify: bool, report: Report) -> bool:
    """Packs one case, unless it is finished, which is returned; raises ReadFailure, BadLabels, OSError."""
    source, (part, case) = pack.source, pack.source.cases[number]
    found = finished_case(pack, number)
    if found is not None and not (verify and _damaged(pack, found)):
        report(sum(math.prod(file.facts.shape) for file in found.files))
        return True
    volumes = OpenVolumes(source.reading)
    channels = tuple(volumes.get(ref) for ref in case.images)
    label = None if case.label is None else volumes.get(case.label)
    check_pair(case.id, channels, label)
    image_paths, label_path = pack.paths(number)

    def write(path: str, prepared: PreparedVolume, *, is_label: bool) -> PackedFile:
        facts = write_volume(pack.root / path, prepared, pack.layout, is_label=is_label, report=report)
        return PackedFile(path, facts)

    # The label first: it is usually the one at fault.
    packed_label = None if label is None else write(label_path, _prepared_label(source, case, label), is_label=True)
    images = tuple(
        write(path, prepare_image(channel, source.changes), is_label=False)
        for path, channel in zip(image_paths, channels, strict=True)
    )
    made = PackedCase(case.id, case.group, part, images, packed_label)
    write_case(pack.record(number), made, _fingerprint(case))
    return False


def _prepared_label(source: VolumeSource, case: Case, label: Volume) -> PreparedVolume:
    rules = source.rules
    (rules or LabelRules(1)).check_kind(case.id, label)
    if rules is None:
        return prepare_label(label, source.changes, label.dtype)
    return prepare_label(_Checked(label, whole(label.shape), case.id, rules), source.changes, rules.dtype)


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
    if found is None or found[1] != _fingerprint(pack.source.cases[number][1]):
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
