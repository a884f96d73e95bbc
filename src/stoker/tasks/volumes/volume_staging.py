"""Copies of volumes: which files `stoker stage` needs, and in which order `stage_to` copies those of cases while it
trains."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from stoker.config import Config
from stoker.core.console import Advance, Say, shown, some
from stoker.core.errors import UserError
from stoker.core.redact import redact_text
from stoker.core.units import count
from stoker.io.cache import CopyPlace
from stoker.io.stores import FileVersion, is_url, open_store
from stoker.loader.filling import Indices, WantedFile
from stoker.profile.host import HostConfig
from stoker.tasks.base import Selection, refuse_classes
from stoker.tasks.images.layouts.splits import split_place
from stoker.tasks.staging import Staging, cannot_stage, copy_place, files_beside, open_staging
from stoker.tasks.volumes.cases.cases import open_cases
from stoker.tasks.volumes.data import VolumeData, training_plan, validation_plan
from stoker.tasks.volumes.formats.opening import local_path, suffix_of
from stoker.tasks.volumes.patches.patch_collate import PatchPlan
from stoker.train.ranks import Ranks

LISTS = (".yaml", ".yml")
_NOT_TRAINED_ON = ("test_images/", "imagesTs/")


def stage_volumes(config: HostConfig, data: VolumeData, ranks: Ranks, say: Say) -> Staging | None:
    """Opens the copy of `stage_to` for volumes in files: those of a list, a pack, or another layout; None without that
    key. Raises UserError for arrays that can only be staged before training."""
    if config.stage_to is None:
        return None
    train, val = training_plan(config, data, ranks), validation_plan(config, data, ranks)
    root = split_place(config.data_root or "", "")
    listed = root.lower().endswith(LISTS)
    root = root.rpartition("/")[0] if listed else root
    place, source = copy_place(config, root), open_store(root)
    cases = train.cases if val is None else (*train.cases, *val.cases)
    expected: dict[str, FileVersion] = {}
    for ref in (ref for case in cases for ref in case.refs):
        path = place.below(ref.location)
        if path is None:
            raise cannot_stage(
                config, f"{redact_text(ref.location)} is outside of it", "the copy has the files of data_root"
            )
        if suffix_of(ref.location) in ("", ".zarr") or (ref.packed is not None and ref.packed.kind == "zarr"):
            raise cannot_stage(
                config, f"{shown(path)} is a Zarr array", "its chunks are read by a library of their own"
            )
        if ref.version:
            size, _, version = ref.version.partition(" ")
            expected[path] = FileVersion(int(size), version)
        else:
            expected[path] = source.about(path)
    place = CopyPlace(place.folder, place.source, expected)
    beside = files_beside(root, [], place, [], source)
    validation = None if val is None else VolumeFiles(val, place)
    return open_staging(place, source, VolumeFiles(train, place), validation, beside, ranks, say)


def needed_files(
    config: Config,
    class_list: tuple[str, ...] | None,
    progress: Advance | None,  # noqa: ARG001
    say: Say | None,  # noqa: ARG001
) -> tuple[str, Selection]:
    """The root that a config reads from, and the parts of it that it needs."""
    refuse_classes(config, class_list, "volumes")
    root = config.data_root
    assert root is not None
    listed = open_cases(root)  # reports errors before anything is copied
    if not root.endswith(LISTS):
        return root, Selection(left_out=_NOT_TRAINED_ON)
    folder = root.rpartition("/")[0] or "."
    if not is_url(folder):
        folder = str(Path(folder).expanduser().resolve())
    refs = [ref.location for case in listed.cases for ref in case.refs]
    outside = [ref for ref in refs if not local_path(ref).startswith(f"{folder}/")]
    if outside:
        raise UserError(
            "volumes-elsewhere",
            f"{count(len(outside), 'volume')} of {root} outside its folder: {some(outside)}",
            why="a copy keeps the paths below the folder of the list",
            hint="put the volumes below the folder of the list, or stage their folders one by one",
        )
    paths = tuple(sorted({local_path(ref)[len(folder) + 1 :] for ref in refs}))
    return folder, Selection(below=(root.rpartition("/")[2], *paths))


def root_in_copy(config: Config, folder: str) -> str:
    """What `data_root` is in a copy: a list keeps its name."""
    root = config.data_root or ""
    return f"{folder}/{root.rpartition('/')[2]}" if root.endswith(LISTS) else folder


class VolumeFiles:
    """A split of volumes: the images and labels of its cases."""

    def __init__(self, plan: PatchPlan, place: CopyPlace) -> None:
        self._patches, self.steps, self.positions = plan.patches, plan.steps, plan.steps.samples
        self._cases: list[list[WantedFile]] = []
        for case in plan.cases:
            paths = [place.below(ref.location) or "" for ref in case.refs]
            self._cases.append([WantedFile(path, *place.expected[path]) for path in paths])

    def __len__(self) -> int:
        return self.positions

    def files(self) -> Iterator[WantedFile]:
        for case in self._cases:
            yield from case

    def at(self, epoch: int, positions: Indices) -> Iterator[WantedFile]:
        # Every case comes up within two turns; each of its later patches reads the same files.
        cases = self._patches.cases(epoch, positions).tolist()
        for case in dict.fromkeys(cases):
            yield from self._cases[case]
