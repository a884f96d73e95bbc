"""The volumes of a segmentation: from a config to cases, their split, the plans of both parts, and a loader."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from stoker.config import Config
from stoker.core.console import Advance, Say, some
from stoker.core.errors import ConfigError, UserError
from stoker.core.units import count, size_text
from stoker.io.cache import cache_place
from stoker.io.storage_speed import storage_at
from stoker.io.stores import is_url
from stoker.loader.batch import Quarantine
from stoker.loader.loader import BatchLoader, Follow, LoaderOptions, LoaderSpeed, choose_engine, measure_loader
from stoker.loader.sampler import Steps
from stoker.profile.host import HostConfig
from stoker.profile.observed import StorageFacts
from stoker.tasks.building import limited, loader_options, no_data
from stoker.tasks.checks import EpochLength
from stoker.tasks.volumes.augment import transform_range
from stoker.tasks.volumes.cases.cases import Case, CaseList, open_cases
from stoker.tasks.volumes.cases.split import SplitRule, divide
from stoker.tasks.volumes.cases.survey import (
    Normalization,
    Statistics,
    Survey,
    statistics_of,
    survey,
)
from stoker.tasks.volumes.formats.opening import OpenVolumes, suffix_of
from stoker.tasks.volumes.formats.volume import ReadingOptions, Shape
from stoker.tasks.volumes.patches.label_index import build_label_index
from stoker.tasks.volumes.patches.labels import LabelRules
from stoker.tasks.volumes.patches.patch_collate import PatchBatch, PatchMaker, PatchPlan, PatchReader, RowLayout
from stoker.tasks.volumes.patches.patches import (
    UNCHANGED,
    GridPatches,
    Patches,
    RandomPatches,
    Small,
    TransformRange,
    check_patch_fits,
    training_steps,
)
from stoker.train.checkpoint.changes import Listing, Listings, listing_of
from stoker.train.ranks import Ranks

DEFAULT_STEPS_PER_EPOCH = 250
"""Updates of an epoch if the config does not say: nnU-Net's number. Random patches have no 'pass over the data'."""
# More than any host reads in a second with one worker.
MOST_PATCHES_PER_WORKER_SECOND = 20_000
# Training and validation have separate workers, and both stay alive between epochs.
_LOADERS = 2
ALONE = Ranks()


@dataclass(frozen=True)
class VolumeData:
    """The volumes of a run: what is read where, but not yet how it is divided among steps and ranks."""

    train: PatchPlan
    val: PatchPlan | None
    rules: LabelRules
    reading: ReadingOptions
    normalize: Normalization
    samples: int
    """Patches of an epoch, over all ranks."""

    @property
    def channels(self) -> int:
        """Images of a case that the network takes together."""
        return self.train.layout.channels

    def statistics(self, plan: PatchPlan) -> tuple[Statistics, Statistics]:
        """What is subtracted from, and what divides, the voxels of a plan's cases; measured once and remembered."""
        return statistics_of(plan.cases, self._volumes, self.normalize)

    def storage(self) -> StorageFacts:
        """What is known about the source without reading from it."""
        places = [ref.location for case in self.train.cases for ref in case.refs]
        sizes = [_bytes_of(place) for place in places]
        patch = self.train.patches.patch
        known = StorageFacts(
            dataset_bytes=None if None in sizes else sum(size or 0 for size in sizes),
            # A patch that is neither rotated nor scaled; in the files it may be smaller, or a part of larger chunks.
            bytes_per_sample=float(replace(self.train.layout, most_voxels=int(np.prod(patch))).row_bytes),
            packed=False,
        )
        return storage_at(places[0], known)

    def names(self, cases: Sequence[int]) -> list[str]:
        """The ids of training cases, from their numbers in the plan."""
        return [self.train.cases[case].id for case in cases]

    @cached_property
    def _volumes(self) -> OpenVolumes:
        return OpenVolumes(self.reading)


def open_data(config: Config, say: Say, progress: Advance | None = None) -> VolumeData:
    """Training and validation volumes: listed, opened, divided, their labels indexed; `fold: all` has no validation."""
    listed = list_cases(config, say)
    rules = label_rules(config, listed)
    devices, workers = (one if isinstance(one, int) else 1 for one in (config.devices, config.num_workers))
    reading = reading_options(config, listed.cases, ranks=devices, workers=workers, say=say)
    surveyed = survey_cases(config, listed, OpenVolumes(reading), say, progress)
    parts = divide(surveyed.cases, surveyed.shapes, split_rule(config))
    rule = patch_rule(config)
    train = plan_training(parts.train, surveyed, rules, rule, training_steps(1, 1), progress=progress, say=say)
    val = None
    if parts.val and config.limit_val_batches != 0:
        _refuse_unlabelled(parts.val, "validate", "there is nothing to compare a prediction with")
        _check_labels(parts.val, surveyed.volumes, rules, say, progress)
        val = plan_validation(parts.val, surveyed, rules, rule)
    samples = updates_per_epoch(config) * config.gradient_accumulation * config.batch_size * config.num_nodes * devices
    data = VolumeData(train, val, rules, reading, config.normalize, samples)
    for plan in (train, val):
        if plan is not None:
            data.statistics(plan)  # the first time takes a while: do it now, not when the workers are waiting
    return data


def reading_options(
    config: Config,
    cases: Sequence[Case] = (),
    *,
    ranks: int = 1,
    workers: int = 0,
    say: Say = lambda _line: None,
) -> ReadingOptions:
    """The options of each process of a rank; `ranks` counts those of this node, `workers` those of one loader.

    Threads share the cache of their process. Worker processes cannot, so each gets its part of `volume_cache`."""
    engine = choose_engine(config.loader, workers, volumes=True)
    processes = 1 + (_LOADERS * workers if engine == "process" else 0)
    share = config.volume_cache // (max(1, ranks) * processes)
    if processes > 1:
        say(
            f"volume_cache: {size_text(config.volume_cache)} of this node are divided among "
            f"{count(max(1, ranks) * processes, 'process', 'processes')}, {size_text(share)} each; "
            "loader=thread has one cache for all workers of a rank"
        )
    # Chunks are kept by tensorstore, decoded pages and files by us: two caches only if the data needs both. Files of
    # .npy and .nii are mapped, and need none.
    suffixes = {suffix_of(ref.location) for case in cases for ref in case.refs} - {".npy", ".nii"}
    caches = {"pages" if suffix.startswith((".tif", ".nii")) else "chunks" for suffix in suffixes}
    return ReadingOptions(
        cache_bytes=share // max(1, len(caches)),
        missing_chunks="fill" if config.missing_chunks == "fill" else "error",
        copy=cache_place(config.cache_dir, config.cache_size),
    )


@dataclass(frozen=True)
class PatchRule:
    """The shape and sampling of patches."""

    patch: Shape
    seed: int = 0
    small: Small = "refuse"
    """A volume smaller than the patch is padded with zeros that are never trained on, or refused."""
    foreground: float = 1 / 3
    """Share of training patches that are drawn for a voxel of a class other than 0."""
    transforms: TransformRange = UNCHANGED


def plan_training(
    cases: Sequence[Case],
    surveyed: Survey,
    rules: LabelRules,
    rule: PatchRule,
    steps: Steps,
    *,
    progress: Advance | None = None,
    say: Say = lambda _line: None,
) -> PatchPlan:
    """Random patches of these cases; `progress` counts the cases whose labels have been indexed.

    Cases without a labelled voxel, or whose labels cannot be read, are left out, and reported to `say`."""
    _refuse_unlabelled(cases, "train", "there is nothing to learn from an image alone")
    labels = build_label_index(cases, surveyed.volumes, rules, progress=progress, say=say)
    used = np.flatnonzero(labels.counts.sum(axis=1)).tolist()
    if not used:
        raise UserError(
            "no-labelled-voxel",
            f"none of the {len(cases)} volumes to train on has a labelled voxel: "
            f"{', '.join(case.id for case in cases[:5])}",
            why="every voxel has the ignore label",
            hint="check the ignore label, and that train_labels has the labels",
        )
    for name, reason in labels.bad.items():
        say(f"warning: {name} is left out, its labels cannot be read: {reason}")
    left_out = [case.id for number, case in enumerate(cases) if number not in set(used) and case.id not in labels.bad]
    if left_out:
        say(f"{count(len(left_out), 'volume')} without a labelled voxel left out: {some(left_out)}")
    chosen = tuple(cases[number] for number in used)
    shapes = _shapes(chosen, surveyed, rule)
    patches = RandomPatches(rule.patch, shapes, labels.chosen(used), rule.seed, rule.foreground, rule.transforms)
    return plan_patches(chosen, patches, steps, surveyed.image_dtype(chosen), rules)


def plan_validation(cases: Sequence[Case], surveyed: Survey, rules: LabelRules, rule: PatchRule) -> PatchPlan:
    """A grid of patches over these cases, one in a step."""
    patches = GridPatches(rule.patch, _shapes(cases, surveyed, rule))
    steps = Steps(len(patches), 1, drop_last=False)
    return plan_patches(cases, patches, steps, surveyed.image_dtype(cases), rules)


def plan_patches(
    cases: Sequence[Case], patches: Patches, steps: Steps, image_dtype: np.dtype[Any], rules: LabelRules
) -> PatchPlan:
    """The plan of a split whose images have the same channels and type of voxels."""
    by_channels = {len(case.images): case.id for case in cases}
    if len(by_channels) != 1:
        (few, one), (many, other) = sorted(by_channels.items())[:2]
        raise UserError(
            "channels-differ",
            f"case {one} has {count(few, 'channel')}, case {other} has {many}",
            why="a network has a fixed number of input channels",
            hint="list the same channels for every case",
        )
    layout = RowLayout(next(iter(by_channels)), image_dtype.name, rules.dtype.name, patches.most_voxels)
    return PatchPlan(tuple(cases), patches, steps, layout, rules)


def _shapes(cases: Sequence[Case], surveyed: Survey, rule: PatchRule) -> tuple[Shape, ...]:
    shapes = tuple(surveyed.facts[case.id].shape if case.box is None else case.box.shape for case in cases)
    check_patch_fits(rule.patch, shapes, [case.id for case in cases], rule.small)
    return shapes


def listings(data: VolumeData) -> Listings:
    """Which cases the data has, in order."""
    parts = {"train": data.train, "val": data.val}
    return {part: None if one is None else _listing(one) for part, one in parts.items()}


def _listing(plan: PatchPlan) -> Listing:
    """The ids of the cases, and for each its channels, its box, and the number of voxels of each class, if known."""
    labels = (
        plan.patches.labels.counts.tolist() if isinstance(plan.patches, RandomPatches) else [None] * len(plan.cases)
    )
    about = [[len(case.images), case.box, counts] for case, counts in zip(plan.cases, labels, strict=True)]
    marks = [xxhash.xxh3_64_intdigest(json.dumps(one).encode()) >> 1 for one in about]
    return listing_of([case.id for case in plan.cases], marks)


def _refuse_unlabelled(cases: Sequence[Case], verb: str, why: str) -> None:
    if without := [case.id for case in cases if case.label is None]:
        raise UserError(
            "labels-missing",
            f"{count(len(without), 'case')} to {verb} on without a label: {some(without)}",
            why=why,
            hint="add the labels, or leave these cases out",
        )


def _check_labels(
    cases: Sequence[Case], volumes: OpenVolumes, rules: LabelRules, say: Say, progress: Advance | None
) -> None:
    """Reads the labels of validation cases once, like those of training: wrong ones are refused now, not after an
    epoch."""
    labels = build_label_index(cases, volumes, rules, progress=progress, say=say)
    for name, reason in labels.bad.items():
        say(f"warning: the labels of {name}, a validation volume, cannot be read: {reason}")
    empty = [case.id for case, found in zip(cases, labels.counts.sum(axis=1), strict=True) if not found]
    if empty := [name for name in empty if name not in labels.bad]:
        say(f"{count(len(empty), 'validation volume')} without a labelled voxel, not scored: {some(empty)}")


def list_cases(config: Config, say: Say) -> CaseList:
    """The cases of `data_root` that are for training; remarks about them are printed."""
    if config.data_root is None:
        raise no_data(config)
    listed = open_cases(config.data_root)
    for note in listed.notes:
        say(f"note: {note}")
    return listed


def label_rules(config: Config, listed: CaseList) -> LabelRules:
    """The classes and the ignore label: the config's where it names them, else those of the data's layout."""
    known = listed.rules
    if config.num_classes is not None:
        classes = config.num_classes
    elif known is not None:
        classes = known.classes
    else:
        raise ConfigError(
            "num_classes is not set, and the list of volumes does not name the classes",
            name="classes-unknown",
            why="which values are classes, and which is 'unlabelled', cannot be read off the voxels",
            hint="num_classes=2, and ignore_label=2 if that value means unlabelled",
        )
    return LabelRules(classes, known.ignore if known and config.ignore_label is None else config.ignore_label)


def survey_cases(
    config: Config, listed: CaseList, volumes: OpenVolumes, say: Say, progress: Advance | None = None
) -> Survey:
    """The description of every case; those that cannot be read are named and left out."""
    surveyed = survey(listed.cases, volumes, max_bad_fraction=config.max_bad_fraction, progress=progress)
    for name, reason in surveyed.bad.items():
        say(f"warning: {name} is left out, it cannot be read: {reason}")
    return surveyed


def split_rule(config: Config) -> SplitRule:
    return SplitRule(config.split_by, config.folds, config.fold, config.split_margin, config.subset_seed)


def patch_of(config: Config) -> Shape:
    assert config.patch_size is not None, "the config was checked"
    return config.patch_size


def patch_rule(config: Config) -> PatchRule:
    return PatchRule(
        patch_of(config), config.seed, config.small_volumes, config.foreground_patches, transform_range(config)
    )


def updates_per_epoch(config: Config, *_size: int | None) -> int:
    """Updates in an epoch, however many samples and ranks there are."""
    updates = config.steps_per_epoch or DEFAULT_STEPS_PER_EPOCH
    if config.limit_train_batches is None:
        return updates
    batches = updates * config.gradient_accumulation
    return max(1, limited(batches, config.limit_train_batches) // config.gradient_accumulation)


def epoch_length(config: HostConfig, data: VolumeData | None) -> EpochLength:
    """Steps of an epoch: random patches fill any number of updates, and validation is as long as its volumes."""
    updates = updates_per_epoch(config)
    if data is None or data.val is None:
        return EpochLength(updates)
    together = (config.val_batch_size or config.batch_size) * config.devices * config.num_nodes
    patches = data.val.steps.samples
    return EpochLength(updates, patches, -(-patches // together))


def training_plan(config: Config, data: VolumeData, ranks: Ranks = ALONE) -> PatchPlan:
    """What the training batches of this rank hold."""
    steps = training_steps(
        updates_per_epoch(config), config.batch_size,
        accumulate=config.gradient_accumulation, world=ranks.world, rank=ranks.rank,
    )  # fmt: skip
    return replace(data.train, steps=steps)


def validation_plan(config: Config, data: VolumeData, ranks: Ranks = ALONE) -> PatchPlan | None:
    """What the validation batches of this rank hold: every patch of the grid once, or the same ones of
    `limit_val_batches` in every epoch, spread over all volumes."""
    if data.val is None or config.limit_val_batches == 0:
        return None
    batch = config.val_batch_size or config.batch_size
    limit, total = config.limit_val_batches, data.val.steps.samples
    used = total
    if limit is not None:
        batches = -(-total // (batch * ranks.world))
        used = min(total, limited(batches, limit) * batch * ranks.world)
    steps = replace(data.val.steps, samples=used, batch_size=batch, world=ranks.world, rank=ranks.rank)
    assert isinstance(data.val.patches, GridPatches), "validation patches are a grid"
    return replace(data.val, patches=replace(data.val.patches, used=None if used == total else used), steps=steps)


class PatchLoader(BatchLoader[PatchBatch]):
    """The loader of a split of volumes."""

    def __init__(
        self,
        plan: PatchPlan,
        reading: ReadingOptions,
        options: LoaderOptions,
        say: Say = lambda _line: None,
        follow: Follow | None = None,
    ) -> None:
        self.plan = plan
        options = replace(options, engine=choose_engine(options.engine, options.workers, volumes=True))
        quarantine = Quarantine(options.quarantine_file, options.max_bad_fraction, len(plan.cases))
        opens = partial(_open_maker, plan, reading, options.lookahead // options.readers)
        super().__init__(plan, opens, quarantine, options, say, follow)


def _open_maker(plan: PatchPlan, reading: ReadingOptions, lookahead: int) -> PatchMaker:
    return PatchMaker(plan, PatchReader(OpenVolumes(reading), plan.layout.row_bytes, lookahead))


def measure_speed(config: Config, data: VolumeData, *, workers: int, seconds: float) -> LoaderSpeed:
    """How fast the loader makes training batches for a consumer that takes no time."""
    # Long enough that no epoch ends within the measurement, however fast the host.
    wanted = max(workers + 4, int(seconds * MOST_PATCHES_PER_WORKER_SECOND * max(1, workers)) // config.batch_size)
    endless = {"steps_per_epoch": wanted, "limit_train_batches": None, "gradient_accumulation": 1}
    plan = training_plan(config.model_copy(update=endless), data)
    options = loader_options(config, workers)
    return measure_loader(lambda: PatchLoader(plan, data.reading, options), workers, seconds)


def _bytes_of(place: str) -> int | None:
    try:
        return None if is_url(place) or Path(place).is_dir() else Path(place).stat().st_size
    except OSError:
        return None


def open_training_loader(config: HostConfig, data: VolumeData) -> PatchLoader:
    """The loader of one process, without a model to feed."""
    return PatchLoader(training_plan(config, data), data.reading, loader_options(config, config.num_workers))
