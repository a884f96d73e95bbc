"""Copies of images: which files `stoker stage` needs, and in which order `stage_to` fetches those of a split.

Paths stay as they are at the source, so training finds the copy's layout by the same rules. A subset chosen again from
the copy is the same subset: classes and images are taken by the smallest hashes, and those are all in it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from stoker.config import Config
from stoker.core.console import Advance, Say, some
from stoker.core.errors import UserError, did_you_mean
from stoker.core.redact import redact_text
from stoker.core.units import count
from stoker.io.cache import CopyPlace, FileVersion
from stoker.io.filling import WantedFile
from stoker.io.local_copy import keep_subset
from stoker.io.prefetch import FIRST_ESTIMATE_BYTES
from stoker.io.stores import ReadFailure, SourceStore, is_url, open_store
from stoker.loader.fill_order import Indices, pieces
from stoker.loader.loader import DEFAULT_PREFETCH
from stoker.profile.host import HostConfig
from stoker.tasks.base import Selection
from stoker.tasks.images.data import chosen_record, open_split
from stoker.tasks.images.image_loader import ImagePlan
from stoker.tasks.images.layouts.imagenet_labels import DEVKITS
from stoker.tasks.images.layouts.listing import split_place
from stoker.tasks.images.layouts.parquet_files import LAYOUT as PARQUET
from stoker.tasks.images.layouts.sample_index import SampleIndex, SampleSet, all_samples
from stoker.tasks.images.layouts.splits import find_split, list_entries
from stoker.tasks.images.layouts.subset import choose_subset
from stoker.tasks.staging import Staging, cannot_stage, copy_place, files_beside, open_staging
from stoker.train.ranks import Ranks


def stage_images(config: HostConfig, train: ImagePlan, val: ImagePlan | None, ranks: Ranks, say: Say) -> Staging | None:
    """Opens the copy of `stage_to` for class folders or shards; None without that key. Raises UserError for a layout
    that can only be staged before training."""
    if config.stage_to is None:
        return None
    indexes = [plan.samples.index for plan in (train, val) if plan is not None]
    root = split_place(config.data_root or "", "")
    if any(index.facts.get("layout") == PARQUET for index in indexes):
        raise cannot_stage(config, "its images are in parquet files", "an image there is not a range of bytes")
    place = copy_place(config, root)
    if outside := next((index.root for index in indexes if place.below(index.root) is None), None):
        raise cannot_stage(config, f"{redact_text(outside)} is outside of it", "the copy has the files of data_root")
    source = open_store(root, config.max_image_bytes)
    expected: dict[str, FileVersion] = {}
    for index in indexes:
        below = place.below(index.root) or ""
        expected |= {f"{below}/{name}".lstrip("/"): found for name, found in _shards(index, source, below).items()}
    place = CopyPlace(place.folder, place.source, expected)
    files = ImageFiles(train, place)
    lists = [name for name in (config.samples_csv, config.train_csv, config.val_csv) if name is not None]
    beside = files_beside(root, [index.root for index in indexes], place, lists, source)
    keep_subset(place.open().copy, chosen_record(config, train.samples, None if val is None else val.samples))
    return open_staging(
        place, source, files, None if val is None else ImageFiles(val, place), beside, ranks, say,
        fetched_ahead=0 if files.is_sharded else _fetched_ahead(config, train, ranks),
    )  # fmt: skip


class ImageFiles:
    """A split of images: each a file, or in shards."""

    def __init__(self, plan: ImagePlan, place: CopyPlace) -> None:
        self._samples, self._sampler, self.steps = plan.samples, plan.sampler, plan.steps
        self._index = plan.samples.index
        below = place.below(self._index.root)
        assert below is not None, "the samples are below the root of the data"
        self._below = f"{below}/" if below else ""
        self._expected = place.expected
        self.positions = len(plan.samples) * plan.sampler.repeats
        self.is_sharded = self._index.shard_of is not None

    def __len__(self) -> int:
        return len(self._samples)

    def files(self) -> Iterator[WantedFile]:
        for members in pieces(0, len(self._samples), 1):
            yield from self._of(self._samples.indices(members))

    def at(self, epoch: int, positions: Indices) -> Iterator[WantedFile]:
        members, _ = self._sampler.at(epoch, positions)
        if self.is_sharded:
            yield from self._of(self._samples.indices(members))
            return
        last = -1
        for position, index in zip(positions.tolist(), self._samples.indices(members).tolist(), strict=True):
            if index != last:  # repeats of a sample are neighbours
                yield self._file(index)._replace(position=position)
            last = index

    def _of(self, indices: Indices) -> Iterator[WantedFile]:
        if self._index.shard_of is None:
            yield from (self._file(index) for index in indices.tolist())
            return
        shards, first = np.unique(self._index.shard_of[indices], return_index=True)
        for shard in shards[np.argsort(first)].tolist():
            path = self._below + self._index.shards[shard]
            yield WantedFile(path, *self._expected[path])

    def _file(self, index: int) -> WantedFile:
        sizes = self._index.sizes
        return WantedFile(self._below + self._index.name(index), None if sizes is None else int(sizes[index]))


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


def _fetched_ahead(config: HostConfig, plan: ImagePlan, ranks: Ranks) -> int:
    """Positions, over all ranks, that the readers of training fetch before they are needed."""
    sizes = plan.samples.index.sizes
    mean = FIRST_ESTIMATE_BYTES if sizes is None or not len(sizes) else max(1.0, float(sizes.mean()))
    in_flight = max(1, config.num_workers * (config.prefetch_factor or DEFAULT_PREFETCH)) + 2
    return int(config.lookahead / mean + in_flight * config.batch_size) * ranks.world


def needed_files(
    config: Config, class_list: tuple[str, ...] | None, progress: Advance | None, say: Say | None
) -> tuple[str, Selection]:
    """The root that a config reads from, and the parts of it that it needs."""
    root = config.data_root
    assert root is not None
    has_lists = config.train_csv or config.samples_csv or config.val_csv
    is_split = bool(has_lists) or config.val_fraction is not None or find_split(root, "train") is not None
    train = _open(config, "train" if is_split else "", class_list, None, progress, say)
    parts = [train]
    if is_split and (has_lists or config.val_fraction or find_split(root, "val") is not None):
        parts.append(_open(config, "val", None, train.classes, progress, say))
    base = split_place(root, "")
    chosen = _Chosen(base)
    for samples in parts:
        chosen.add(samples)
    if not is_url(base) and "layout" not in train.index.facts and not train.index.shards:
        chosen.keep_folders(train)
    record = chosen_record(config, train, parts[1] if len(parts) > 1 else None)
    if record is None and class_list is not None:
        wider = config.model_copy(update={"subset_classes": len(class_list)})
        record = chosen_record(wider, train, parts[1] if len(parts) > 1 else None)
    return root, chosen.selection(record)


def _open(
    config: Config,
    split: str,
    class_list: tuple[str, ...] | None,
    classes: tuple[str, ...] | None,
    progress: Advance | None,
    say: Say | None,
) -> SampleSet:
    index, among = open_split(config, split, progress=progress, say=say)
    per_class = config.subset_val_per_class if split == "val" else config.subset_train_per_class
    if config.val_fraction is not None and split:
        # The copy is divided again when it is trained on, so each class has to be whole.
        among, per_class = None, None
    if class_list is not None:
        classes = _known(index, class_list)
    if config.subset_classes is None and per_class is None and classes is None:
        return all_samples(index)
    subset = choose_subset(
        index, classes=config.subset_classes, per_class=per_class, seed=config.subset_seed, names=classes, among=among
    )
    return SampleSet(index, subset.classes, subset.indices, subset.labels)


def _known(index: SampleIndex, names: tuple[str, ...]) -> tuple[str, ...]:
    known = set(index.classes)
    if strangers := [name for name in names if name not in known]:
        raise UserError(
            "class-unknown",
            f"{redact_text(index.root)} has no {count(len(strangers), 'class', 'classes')} {some(strangers)}",
            hint=did_you_mean(strangers[0], index.classes) or "a line of the list is the name of a class folder",
        )
    wanted = set(names)
    return tuple(name for name in index.classes if name in wanted)


class _Chosen:
    """Collects the files of the splits."""

    def __init__(self, base: str) -> None:
        self._base = base
        self._paths: set[str] = set()
        self._folders: set[str] = set()
        self._support = {""} | {folder for folder in DEVKITS if folder}
        self._empty: list[str] = []

    def add(self, samples: SampleSet) -> None:
        index, below = samples.index, self._below(samples.index)
        folder = below.rstrip("/")
        # Every folder from the root to the split: lists and labels may be in any of them.
        self._support |= {folder, *("/".join(folder.split("/")[:depth]) for depth in range(folder.count("/") + 1))}
        if index.shards:
            self._paths |= {below + shard for shard in index.shards}
            self._folders.add(folder)
            return
        members = np.arange(len(samples), dtype=np.int64)
        # A list is tried out on a few of its rows, wherever they are, so all of them have to be there.
        indices = np.arange(len(index)) if index.facts.get("layout") == "list" else samples.indices(members)
        for sample in indices.tolist():
            path = below + index.name(sample)
            self._paths.add(path)
            self._folders.add(path.rpartition("/")[0])

    def keep_folders(self, samples: SampleSet) -> None:
        below = self._below(samples.index)
        self._empty += [below + name for name in samples.classes]

    def selection(self, record: dict[str, Any] | None) -> Selection:
        return Selection(
            tuple(sorted(self._folders)),
            frozenset(self._paths),
            frozenset(self._support),
            empty_folders=tuple(self._empty),
            record=record,
        )

    def _below(self, index: SampleIndex) -> str:
        place = index.root.rstrip("/")
        if place == self._base:
            return ""
        assert place.startswith(f"{self._base}/"), (place, self._base)
        return place[len(self._base) + 1 :] + "/"
