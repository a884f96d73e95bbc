"""`stage_to`: which files are copied while training runs, and the filler that copies them."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from stoker.config import Config
from stoker.core.console import Say, shown
from stoker.core.errors import UserError
from stoker.core.redact import redact_text
from stoker.core.units import count
from stoker.io.cache import CopyPlace, FileVersion, OpenCopy
from stoker.io.filling import Filler, WantedFile
from stoker.io.prefetch import FIRST_ESTIMATE_BYTES
from stoker.io.stores import ReadFailure, SourceStore, is_url, open_store
from stoker.io.subset_file import keep_subset
from stoker.loader.collate import BatchPlan
from stoker.loader.fill_order import Files, ImageFiles, Share, VolumeFiles
from stoker.loader.loader import DEFAULT_PREFETCH
from stoker.profile.host import HostConfig
from stoker.tasks.images.data import chosen_record
from stoker.tasks.images.layouts.listing import split_place
from stoker.tasks.images.layouts.parquet_files import LAYOUT as PARQUET
from stoker.tasks.images.layouts.sample_index import SampleIndex
from stoker.tasks.images.layouts.splits import list_entries
from stoker.tasks.volumes.formats.opening import VolumeRef, suffix_of
from stoker.tasks.volumes.patches.patch_collate import PatchPlan
from stoker.train.ranks import Ranks

# Files with the labels, classes or cases of the files beside them, and the arrays of a pack's index.
BESIDE = (".csv", ".json", ".jsonl", ".npy", ".txt", ".yaml", ".yml")
LISTS = (".yaml", ".yml")
# Time after a run; a copy that needs longer is filled by the next run, or by `stoker stage`.
SETTLING_S = 10.0


@dataclass(frozen=True)
class Staging:
    """The local copy of a run's data, which fills while the run trains."""

    place: CopyPlace
    copy: OpenCopy
    filler: Filler
    files: int
    say: Say

    def follow(self, epoch: int, position: int, waited: bool | None, is_over: bool) -> None:
        """Called with each training batch."""
        self.filler.training_at(epoch, position, waited, is_over=is_over)

    def make_way(self, _epoch: int, _position: int, waited: bool | None, _is_over: bool) -> None:
        """Called with each validation batch."""
        self.filler.make_way(waited)

    def settle(self) -> None:
        """Training has ended; the last files, such as those of its last epoch, may still be on their way."""
        self.filler.settle(SETTLING_S)

    def close(self) -> None:
        """Ends the filling; what was fetched is kept."""
        self.filler.close()
        self.copy.flush()
        if not self.filler.is_complete and self.copy.stopped is None and not self.filler.failed:
            there = f"{min(len(self.copy), self.files):,} of {count(self.files, 'file')}"
            self.say(f"the local copy in {self.copy.folder} has {there}; the next run fetches the rest")
        self.copy.close()


def stage_images(config: HostConfig, train: BatchPlan, val: BatchPlan | None, ranks: Ranks, say: Say) -> Staging | None:
    """Opens the copy of `stage_to` for class folders or shards; None without that key. Raises UserError for a layout
    that can only be staged before training."""
    if config.stage_to is None:
        return None
    indexes = [plan.samples.index for plan in (train, val) if plan is not None]
    root = split_place(config.data_root or "", "")
    if any(index.facts.get("layout") == PARQUET for index in indexes):
        raise _cannot(config, "its images are in parquet files", "an image there is not a range of bytes")
    place = _place(config, root)
    if outside := next((index.root for index in indexes if place.below(index.root) is None), None):
        raise _cannot(config, f"{redact_text(outside)} is outside of it", "the copy has the files of data_root")
    source = open_store(root, config.max_image_bytes)
    expected: dict[str, FileVersion] = {}
    for index in indexes:
        below = place.below(index.root) or ""
        expected |= {f"{below}/{name}".lstrip("/"): found for name, found in _shards(index, source, below).items()}
    place = CopyPlace(place.folder, place.source, expected)
    parts = [ImageFiles(plan, place) for plan in (train, val) if plan is not None]
    lists = [name for name in (config.samples_csv, config.train_csv, config.val_csv) if name is not None]
    beside = _beside(root, [index.root for index in indexes], place, lists, source)
    is_sharded = parts[0].is_sharded
    ahead = 0 if is_sharded else _fetched_ahead(config, train, ranks)
    order = Files(parts[0], parts[1] if len(parts) > 1 else None, beside, _share(ranks), ahead)
    keep_subset(place.open().copy, chosen_record(config, train.samples, None if val is None else val.samples))
    return _open(place, source, order, ranks, say)


def stage_volumes(
    config: HostConfig, train: PatchPlan, val: PatchPlan | None, ranks: Ranks, say: Say
) -> Staging | None:
    """The same for volumes in files: those of a list, a pack, or another layout."""
    if config.stage_to is None:
        return None
    root = split_place(config.data_root or "", "")
    listed = root.lower().endswith(LISTS)
    root = root.rpartition("/")[0] if listed else root
    place, source = _place(config, root), open_store(root)
    plans = [plan for plan in (train, val) if plan is not None]
    refs = [ref for plan in plans for case in plan.cases for ref in (*case.images, case.label) if ref is not None]
    expected: dict[str, FileVersion] = {}
    for ref in refs:
        path = place.below(ref.location)
        if path is None:
            raise _cannot(
                config, f"{redact_text(ref.location)} is outside of it", "the copy has the files of data_root"
            )
        if _is_zarr(ref):
            raise _cannot(config, f"{shown(path)} is a Zarr array", "its chunks are read by a library of their own")
        expected[path] = _expected(ref, source, path)
    place = CopyPlace(place.folder, place.source, expected)
    beside = _beside(root, [], place, [], source)
    order = Files(VolumeFiles(train, place), None if val is None else VolumeFiles(val, place), beside, _share(ranks), 0)
    return _open(place, source, order, ranks, say)


def _open(place: CopyPlace, source: SourceStore, order: Files, ranks: Ranks, say: Say) -> Staging:
    copy = place.open()
    filler = Filler(copy, source, order, say if ranks.is_first else None)
    return Staging(place, copy, filler, order.files, say)


def _place(config: Config, root: str) -> CopyPlace:
    """The copy's folder; refuses one inside the data, or around it."""
    folder = os.path.realpath(os.path.expanduser(config.stage_to or ""))  # noqa: PTH111
    if not is_url(root):
        data = os.path.realpath(root)
        if os.path.commonpath([folder, data]) in (folder, data):
            raise UserError(
                "folder-inside-data",
                f"stage_to is {folder}, and the data is in {data}",
                why="one is inside the other, and the copy would become a part of the data",
                hint="stage_to=FOLDER, outside of the data",
            )
    return CopyPlace(folder, root)


def _shards(index: SampleIndex, source: SourceStore, below: str) -> Mapping[str, FileVersion]:
    """Size and version of the shards of a split."""
    if not index.shards:
        return {}
    entries = None if index.root.startswith("http") else list_entries(index.root)
    known = {} if entries is None else entries.versions
    prefix = f"{below}/" if below else ""
    try:
        return {
            shard: FileVersion(int(known[shard][0]), known[shard][1] or "")
            if shard in known
            else FileVersion(*source.about(prefix + shard))
            for shard in index.shards
        }
    except ReadFailure as failure:
        raise UserError("shard-missing", str(failure), why="the index lists it", hint="copy the shards again") from None


def _expected(ref: VolumeRef, source: SourceStore, path: str) -> FileVersion:
    if ref.version:
        size, _, version = ref.version.partition(" ")
        return FileVersion(int(size), version)
    return FileVersion(*source.about(path))


def _is_zarr(ref: VolumeRef) -> bool:
    return suffix_of(ref.location) in ("", ".zarr") or (ref.packed is not None and ref.packed.kind == "zarr")


def _beside(
    root: str, splits: Sequence[str], place: CopyPlace, lists: Iterable[str], source: SourceStore
) -> list[WantedFile]:
    """The files that describe the data: lists, tables, classes, the index of a pack; the index comes last."""
    folders = {""}
    for split in splits:
        parts = (place.below(split) or "").split("/")
        folders |= {"/".join(parts[:number]) for number in range(1, len(parts) + 1)}
    found: dict[str, WantedFile] = {}
    for folder in sorted(folders):
        if root.startswith("http"):
            break  # a web server does not list
        entries = list_entries(f"{root}/{folder}".rstrip("/"))
        for name in () if entries is None else entries.files:
            path = f"{folder}/{name}".lstrip("/")
            if name.lower().endswith(BESIDE) and path not in place.expected:
                found[path] = WantedFile(path)
    for name in lists:
        if not is_url(name) and not Path(name).is_absolute() and name not in found:
            try:
                source.about(name)
            except ReadFailure:
                continue  # relative to the current folder, and stays there
            found[name] = WantedFile(name)
    return sorted(found.values(), key=lambda one: one.path.endswith("index.json"))


def _fetched_ahead(config: HostConfig, plan: BatchPlan, ranks: Ranks) -> int:
    """Positions, over all ranks, that the readers of training fetch before they are needed."""
    sizes = plan.samples.index.sizes
    mean = FIRST_ESTIMATE_BYTES if sizes is None or not len(sizes) else max(1.0, float(sizes.mean()))
    in_flight = max(1, config.num_workers * (config.prefetch_factor or DEFAULT_PREFETCH)) + 2
    return int(config.lookahead / mean + in_flight * config.batch_size) * ranks.world


def _share(ranks: Ranks) -> Share:
    return Share(ranks.rank, ranks.local_world or ranks.world)


def _cannot(config: Config, seen: str, why: str) -> UserError:
    root, folder = redact_text(config.data_root or ""), config.stage_to
    return UserError(
        "cannot-stage-while-training",
        f"{root} cannot be staged while it is trained on: {seen}",
        why=why,
        hint=f"stoker stage {root} {folder}, then data_root={folder} without stage_to",
    )
