"""Packs the cases of a data set with several processes: the same bytes for any number of them, in any order.

A case is made on its own, and recorded when all its files are complete: a killed pack loses only what was in flight.
"""

from __future__ import annotations

import json
import pickle
import shutil
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from stoker.core.child import ChildDied, share_out
from stoker.core.console import Advance
from stoker.core.errors import UserError
from stoker.core.files import write_text
from stoker.core.units import count, size_text
from stoker.io.stores import ReadFailure
from stoker.tasks.volumes.cases.cases import Case, CaseList, Part
from stoker.tasks.volumes.formats.opening import OpenVolumes
from stoker.tasks.volumes.formats.packed import stored_shape
from stoker.tasks.volumes.formats.volume import ReadingOptions, Shape
from stoker.tasks.volumes.pack.blocks import RECORDS, VolumePack, finished_case, make_cases
from stoker.tasks.volumes.pack.index import (
    INDEX,
    PackIndex,
    read_case,
    write_index,
)
from stoker.tasks.volumes.pack.preprocessing import VoxelChanges, new_shape
from stoker.tasks.volumes.pack.writing import Layout, remove
from stoker.tasks.volumes.patches.labels import LabelRules

SHOWN = 20
_CACHE_BYTES = 256_000_000
# Opening a volume is mostly waiting, for a network file system or an object store.
THREADS = 8


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
    progress: Advance | None = None,
) -> VolumePackResult:
    """Packs every case, or what an earlier run left; call it with the destination locked, after `look`."""
    began = time.monotonic()
    claim(pack)
    remove_temporaries(pack.root)
    # Until everything is there again, this is not a pack: a run must not train on half of the volumes.
    (pack.root / INDEX).unlink(missing_ok=True)
    check_space(pack, looked)
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


def read_options(root: Path) -> dict[str, Any] | None:
    """How the pack in a folder was begun; None if there is none."""
    try:
        about = json.loads((root / RECORDS / "pack.json").read_text())
    except (OSError, ValueError):
        return None
    return about["options"] if isinstance(about, dict) and isinstance(about.get("options"), dict) else None


def claim(pack: VolumePack) -> None:
    """Records how a folder is packed; refuses one that was begun differently, or holds something else."""
    before = read_options(pack.root)
    if before is None:
        ours = (INDEX, "train/images", "train/labels", "test/images")
        foreign = [name for name in ours if (pack.root / name).exists()]
        if foreign:
            raise UserError(
                "destination-not-empty",
                f"{pack.root} contains {foreign[0]}, which stoker pack did not write",
                why="it would be overwritten",
                hint="choose another folder",
            )
        write_text(pack.root / RECORDS / "pack.json", json.dumps({"options": pack.options}, indent=1) + "\n")
    elif before != pack.options:
        raise UserError(
            "pack-options-differ",
            f"{pack.root} was packed with {_spell(before)}; this command has {_spell(pack.options)}",
            why="a pack cannot mix volumes of both kinds",
            hint="choose another folder; or --fresh, which packs this one again from its source",
        )


def remove_pack(root: Path) -> None:
    """Removes the files of `stoker pack`, and nothing else; without its records nothing is known to be ours."""
    if read_options(root) is None:
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
    (root / RECORDS / "pack.json").unlink()  # last: until then the rest is known to be ours


def remove_temporaries(root: Path) -> None:
    """Removes unfinished volumes; call with the destination locked."""
    for part in ("train", "test"):
        for folder in (root / part, root / RECORDS / "cases"):
            for path in folder.glob("*/.*.tmp"):
                remove(path)
    remove(root / RECORDS / "trial")


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
        return int(np.prod(self.shape, dtype=object))

    def packed_bytes(self, layout: Layout) -> int:
        """Size of its files, before compression."""
        stored = stored_shape(self.shape, layout.block if layout.kind == "blocks" else 0)
        return int(np.prod(stored, dtype=object)) * (self.image_bytes + self.label_bytes)


def look(
    cases: Sequence[tuple[Part, Case]],
    rules: LabelRules | None,
    preparation: VoxelChanges,
    reading: ReadingOptions,
    progress: Advance | None = None,
) -> list[Looked]:
    """Opens every case, reading no voxels; one that cannot be opened is empty here, and reported when it is packed."""
    volumes = OpenVolumes(reading)

    def work(case: Case) -> Looked:
        try:
            sources = [volumes.get(ref) for ref in case.images]
            label = None if case.label is None else volumes.get(case.label)
            shape = new_shape(sources[0], preparation)
        except ReadFailure as failure:
            return Looked(reason=str(failure))
        kinds = [np.dtype(np.uint8) if preparation.dtype == "uint8" else source.dtype for source in sources]
        label_bytes = 0 if label is None else (label.dtype if rules is None else rules.dtype).itemsize
        voxels = int(np.prod(sources[0].shape, dtype=object))
        zipped = [one for one in sources if one.name.lower().endswith(".gz")]
        decoded = max((voxels * one.dtype.itemsize for one in zipped), default=0)
        return Looked(shape, sum(min(kind.itemsize, 4) for kind in kinds), label_bytes, decoded)

    with ThreadPoolExecutor(THREADS) as pool:
        found = []
        for one in pool.map(lambda pair: work(pair[1]), cases):
            found.append(one)
            if progress is not None:
                progress(len(found), len(cases))
    return found


def check_space(pack: VolumePack, looked: Sequence[Looked]) -> None:
    """Refuses to begin what the disk cannot hold."""
    unfinished = [number for number in range(len(pack.cases)) if finished_case(pack, number) is None]
    needed = sum(looked[number].packed_bytes(pack.layout) for number in unfinished)
    free = shutil.disk_usage(pack.root).free
    if needed > free:
        raise UserError(
            "disk-too-small",
            f"{pack.root} has {size_text(free)} free; the volumes need about {size_text(needed)}",
            why="the disk would be full before the pack is complete",
            hint="use another disk, or smaller voxels: --dtype uint8 --clip 0.5%,99.5%, or --scale 0.5",
        )


def _make(
    pack: VolumePack, sizes: list[int], workers: int, verify: bool, progress: Advance | None
) -> dict[int, dict[str, Any]]:
    total = max(1, sum(sizes) // 1_000_000)
    made: dict[int, dict[str, Any]] = {}
    done = 0

    def on_report(voxels: int) -> None:
        nonlocal done
        done += voxels
        if progress is not None:
            progress(min(done // 1_000_000, total), total)

    def on_answer(answer: dict[str, Any]) -> None:
        if "error" in answer:
            raise UserError(
                "pack-failed",
                f"{answer['id']} could not be packed: {answer['error']}",
                why=f"{len(made)} of {count(len(pack.cases), 'volume')} are finished and kept",
                hint="fix the cause, then run the same command again to continue",
            )
        made[answer["number"]] = answer

    try:
        share_out(
            make_cases,
            pickle.dumps(pack),
            [{"number": number, "verify": verify} for number in range(len(pack.cases))],
            workers=workers,
            on_message=on_report,
            on_answer=on_answer,
        )
    except ChildDied as died:
        raise UserError(
            "pack-worker-died",
            f"the process that packed {pack.cases[died.task['number']][1].id} {died.how}",
            why="the kernel kills processes when memory runs out; finished volumes are kept",
            hint="run the same command again to continue, with fewer --workers to need less memory",
        ) from None
    finally:
        remove_temporaries(pack.root)
    return made


def _check_skipped(pack: VolumePack, skipped: list[dict[str, Any]], allowed: float) -> None:
    """Raises if too many cases cannot be read, or if a label is wrong; the finished ones are kept."""
    wrong = [one for one in skipped if one["wrong_labels"]]
    few = len(skipped) <= max(1, allowed * len(pack.cases)) and len(skipped) < len(pack.cases)
    if few and not wrong:
        return
    listed = [f"{one['id']}: {one['reason']}" for one in skipped[:SHOWN]]
    if len(skipped) > SHOWN:
        listed.append(f"and {len(skipped) - SHOWN} more")
    raise UserError(
        "bad-volumes",
        f"{len(skipped)} of {count(len(pack.cases), 'volume')} cannot be packed\n" + "\n".join(listed),
        why="wrong labels put the whole data set in doubt"
        if wrong
        else f"max_bad_fraction allows {allowed:g}; the others are finished and kept",
        hint="repair these files, then run the same command again",
    )


def _spell(options: Mapping[str, Any]) -> str:
    """Options as a user would type them."""
    given = []
    for name, value in options.items():
        if name == "labels":
            given += [] if value is None else [f"{value[0]} classes and the ignore label {value[1]}"]
        elif value is not None:
            text = ",".join(map(str, value)) if isinstance(value, list) else value
            given.append(f"--{name} {text}")
    return " ".join(given)
