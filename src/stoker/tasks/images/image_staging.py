"""`stage_to` for images: which files of a split are copied while training runs, single images or shards, and in which
order."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from stoker.core.console import Say
from stoker.core.errors import UserError
from stoker.core.redact import redact_text
from stoker.io.cache import CopyPlace, FileVersion
from stoker.io.filling import WantedFile
from stoker.io.prefetch import FIRST_ESTIMATE_BYTES
from stoker.io.stores import ReadFailure, SourceStore, open_store
from stoker.io.subset_file import keep_subset
from stoker.loader.fill_order import Indices, pieces
from stoker.loader.loader import DEFAULT_PREFETCH
from stoker.profile.host import HostConfig
from stoker.tasks.images.data import chosen_record
from stoker.tasks.images.image_loader import ImagePlan
from stoker.tasks.images.layouts.parquet_files import LAYOUT as PARQUET
from stoker.tasks.images.layouts.sample_index import SampleIndex
from stoker.tasks.images.layouts.splits import list_entries, split_place
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
