"""Copies of images: which files `stoker stage` needs, and in which order `stage_to` fetches those of a split.

Paths stay as they are at the source, so training finds the copy's layout by the same rules. A subset chosen again from
the copy is the same subset: classes and images are taken by the smallest hashes, and those are all in it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from stoker.config import Config
from stoker.core.console import Advance, Say, some
from stoker.core.errors import UserError, did_you_mean
from stoker.core.redact import redact_text
from stoker.core.units import count
from stoker.io.cache import CopyPlace
from stoker.io.local_copy import keep_subset
from stoker.io.prefetch import FIRST_ESTIMATE_BYTES
from stoker.io.stores import FileVersion, ReadFailure, SourceStore, is_url, open_store
from stoker.loader.filling import Indices, WantedFile, pieces
from stoker.loader.loader import DEFAULT_PREFETCH
from stoker.profile.host import HostConfig
from stoker.tasks.base import Selection
from stoker.tasks.images.classify import checked_training_plan, validation_of
from stoker.tasks.images.data import TrainingData, chosen_record, open_split, selected
from stoker.tasks.images.image_loader import ImagePlan
from stoker.tasks.images.layouts.imagenet import DEVKITS
from stoker.tasks.images.layouts.parquet_files import is_parquet
from stoker.tasks.images.layouts.sample_index import SampleIndex, SampleSet
from stoker.tasks.images.layouts.splits import find_split, list_entries, split_place
from stoker.tasks.staging import Staging, cannot_stage, copy_place, files_beside, open_staging
from stoker.train.ranks import Ranks


def stage_images(config: HostConfig, data: TrainingData, ranks: Ranks, say: Say) -> Staging | None:
    """Opens the copy of `stage_to` for class folders or shards; None without that key. Raises UserError for a layout
    that can only be staged before training."""
    if config.stage_to is None:
        return None
    train, val = checked_training_plan(config, data, ranks), validation_of(config, data, ranks)
    indexes = [plan.samples.index for plan in (train, val) if plan is not None]
    root = split_place(config.data_root or "", "")
    if any(map(is_parquet, indexes)):
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
            else source.about(prefix + shard)
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
    root = config.data_root
    assert root is not None
    has_lists = config.train_csv or config.samples_csv or config.val_csv
    is_split = bool(has_lists) or config.val_fraction is not None or find_split(root, "train") is not None
    train = _open(config, "train" if is_split else "", class_list, None, progress, say)
    val = None
    if is_split and (has_lists or config.val_fraction or find_split(root, "val") is not None):
        val = _open(config, "val", None, train.classes, progress, say)
    base = split_place(root, "")
    paths, folders, support = set[str](), set[str](), {"", *DEVKITS}
    for samples in (train, val):
        if samples is None:
            continue
        index, below = samples.index, _below(samples.index, base)
        folder = below.rstrip("/")
        # Every folder from the root to the split: lists and labels may be in any of them.
        support |= {folder, *("/".join(folder.split("/")[:depth]) for depth in range(folder.count("/") + 1))}
        if index.shards:
            paths |= {below + shard for shard in index.shards}
            folders.add(folder)
            continue
        members = np.arange(len(samples), dtype=np.int64)
        # A list is tried out on a few of its rows, wherever they are, so all of them have to be there.
        indices = np.arange(len(index)) if index.facts.get("layout") == "list" else samples.indices(members)
        for sample in indices.tolist():
            path = below + index.name(sample)
            paths.add(path)
            folders.add(path.rpartition("/")[0])
    has_class_folders = not is_url(base) and "layout" not in train.index.facts and not train.index.shards
    empty = tuple(_below(train.index, base) + name for name in train.classes) if has_class_folders else ()
    record = chosen_record(config, train, val)
    if record is None and class_list is not None:
        record = chosen_record(config.model_copy(update={"subset_classes": len(class_list)}), train, val)
    return root, Selection(
        tuple(sorted(folders)), frozenset(paths), frozenset(support), empty_folders=empty, record=record
    )


def _below(index: SampleIndex, base: str) -> str:
    place = index.root.rstrip("/")
    if place == base:
        return ""
    assert place.startswith(f"{base}/"), (place, base)
    return place[len(base) + 1 :] + "/"


def _open(
    config: Config,
    split: str,
    class_list: tuple[str, ...] | None,
    classes: tuple[str, ...] | None,
    progress: Advance | None,
    say: Say | None,
) -> SampleSet:
    index, _ = open_split(config, split, progress=progress, say=say)
    if config.val_fraction is not None and split:
        # The copy is divided again when it is trained on, so each class has to be whole.
        config = config.model_copy(update={"subset_train_per_class": None, "subset_val_per_class": None})
    return selected(config, split, index, classes if class_list is None else _known(index, class_list))


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
