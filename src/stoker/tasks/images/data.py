"""The images of a classification: from a config to the samples of a split, a loader over them, and its speed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import xxhash
from numpy.typing import NDArray

from stoker.config import Config, config_values
from stoker.core.console import Advance, Say
from stoker.core.errors import UserError
from stoker.core.files import write_text
from stoker.core.redact import redact_text
from stoker.io.cache import CopyPlace, cache_place
from stoker.io.storage_speed import measure_local_disk, measure_storage, storage_at
from stoker.io.stores import Buffer, ReadFailure, Store, StoreDown, is_url
from stoker.loader.loader import Follow, LoaderSpeed, measure_loader
from stoker.loader.sampler import EpochSampler, Steps
from stoker.profile.host import HostConfig
from stoker.profile.mounts import find_local_disk
from stoker.profile.observed import StorageFacts
from stoker.run.folder import RunFolder
from stoker.tasks.base import metric_of
from stoker.tasks.building import limited, loader_options, no_data, updates_per_epoch
from stoker.tasks.images.decode.calibration import CalibrationResult, choose_decoder
from stoker.tasks.images.decode.crops import CentreCrop, CropRange, Decoding, Interpolation, RandomCrop, View
from stoker.tasks.images.image_loader import ImageLoader, ImagePlan
from stoker.tasks.images.layouts.opening import check_same_classes, open_index
from stoker.tasks.images.layouts.parquet_files import is_parquet, open_sample_store
from stoker.tasks.images.layouts.sample_index import SampleIndex, SampleSet, all_samples, repeated
from stoker.tasks.images.layouts.sample_lists import open_list
from stoker.tasks.images.layouts.splits import find_split
from stoker.tasks.images.layouts.subset import choose_subset, split_samples, subset_record
from stoker.train.checkpoint.changes import Contents, Listing, Listings, looked_at
from stoker.train.ranks import Ranks

Split = Literal["train", "val"]
CALIBRATION_FILES = 48
# More than any host decodes in a second with one worker.
MOST_IMAGES_PER_WORKER_SECOND = 20_000
ALONE = Ranks()
# Share of the storage trial's time for writing to a local disk and reading it back, if the data is remote.
LOCAL_SHARE = 0.2
# Requests at once for the few samples whose contents are compared.
READERS = 16


@dataclass(frozen=True)
class TrainingData:
    """The samples of a run, and their decoder."""

    train: SampleSet
    val: SampleSet | None
    decoding: Decoding

    @property
    def samples(self) -> int:
        """Images to train on."""
        return len(self.train)

    def storage(self) -> StorageFacts:
        """What is known about the source without reading from it."""
        return describe_storage(self.train)

    def names(self, samples: Sequence[int]) -> list[str]:
        """The files of training samples, from their indices in the data set."""
        return [self.train.index.name(sample) for sample in samples]


def open_data(config: Config, say: Say, progress: Advance | None = None) -> TrainingData:
    """Training and validation samples; data without a validation split has none."""
    train = open_samples(config, "train", progress=progress, say=say)
    if len(train.classes) < 2:
        raise UserError(
            "one-class",
            f"{config.data_root}/train has only one class, {train.classes[0]}",
            why="classification needs at least two",
        )
    try:
        val = open_samples(config, "val", classes=train.classes, progress=progress, say=say)
        check_same_classes(train.index, val.index)
    except UserError as error:
        if error.name != "split-not-found":
            raise
        if config.early_stopping is not None:
            raise UserError(
                "early-stopping-without-validation",
                f"early_stopping is {config.early_stopping}, but {error.seen}",
                why=f"it watches {metric_of(config_values(config)).key}, which would never be measured",
                hint="early_stopping=null, or add validation images",
            ) from None
        say(f"no validation: {error.seen}")
        val = None
    if config.num_classes is not None and config.num_classes < len(train.classes):
        raise UserError(
            "num-classes", f"num_classes is {config.num_classes}, but the data has {len(train.classes)} classes"
        )
    decoding, _ = choose_decoding(config, train.index)
    return TrainingData(train, val, decoding)


def listings(data: TrainingData) -> Listings:
    parts = {"train": data.train, "val": data.val}
    return {part: None if one is None else listing_of_samples(one) for part, one in parts.items()}


def contents(config: HostConfig, data: TrainingData) -> Contents:
    if config.stage_to is not None:
        return {}  # it reads its local copy, and that has its own manifest
    parts = {"train": data.train, "val": data.val}
    return {part: None if one is None else contents_of_samples(config, one) for part, one in parts.items()}


def record_choice(config: HostConfig, data: TrainingData, folder: RunFolder, say: Say) -> None:
    chosen = chosen_record(config, data.train, data.val)
    if chosen is not None:
        say(f"classes: {', '.join(chosen['classes'])}")
        write_text(folder.subset_file, json.dumps(chosen, indent=1) + "\n")


def open_training_loader(config: HostConfig, data: TrainingData) -> ImageLoader:
    return open_loader(config, training_plan(config, data.train, data.decoding), workers=config.num_workers)


def open_samples(
    config: Config,
    split: Split | Literal[""],
    *,
    classes: tuple[str, ...] | None = None,
    progress: Advance | None = None,
    say: Say | None = None,
) -> SampleSet:
    """The samples of a split that the config selects; for validation, pass the classes of training."""
    index, among = open_split(config, split, progress=progress, say=say)
    return selected(config, split, index, classes, among)


def selected(
    config: Config,
    split: str,
    index: SampleIndex,
    classes: tuple[str, ...] | None,
    among: NDArray[np.int64] | None = None,
) -> SampleSet:
    """The samples of an index that the config's subset keys select."""
    per_class = config.subset_val_per_class if split == "val" else config.subset_train_per_class
    if config.subset_classes is None and per_class is None and classes is None and among is None:
        return all_samples(index)
    return choose_subset(
        index, classes=config.subset_classes, per_class=per_class, seed=config.subset_seed, names=classes, among=among
    )


def open_split(
    config: Config,
    split: str,
    *,
    index_dir: Path | None = None,
    progress: Advance | None = None,
    say: Say | None = None,
) -> tuple[SampleIndex, NDArray[np.int64] | None]:
    """The index that holds a split, and which of its samples belong to it; None for all. `split=""` is the root itself.

    `index_dir` takes precedence over the config's."""
    root = config.data_root
    if root is None:
        raise no_data(config)
    options: Any = {"index_dir": index_dir or (Path(config.index_dir) if config.index_dir else None), "say": say}
    fraction = None if split == "" else config.val_fraction
    csv = config.train_csv if fraction else {"train": config.train_csv, "val": config.val_csv}.get(split)
    if csv is not None:
        index = open_list(csv, root, "", **options)
    elif config.samples_csv is not None:
        index = open_list(config.samples_csv, root, "" if fraction else split, **options)
        if fraction and index.facts["has_splits"]:
            raise _two_validation_sets(fraction, config.samples_csv)
        if split == "val" and not fraction and not index.facts["has_splits"]:
            raise UserError(
                "split-not-found",
                f"{config.samples_csv} has no column `split`, and val_fraction is not set",
                hint="val_fraction=0.1 sets a tenth of each class aside",
            )
    elif fraction is None:
        index = open_index(root, split, progress=progress, **options)
    else:
        own = find_split(root, "val")
        if own is not None and own.name != "test":  # which is for later, where val_fraction is set
            raise _two_validation_sets(fraction, root)
        index = open_index(root, "train" if find_split(root, "train") else "", progress=progress, **options)
    _check_nothing_writes_into(config, index)
    if fraction is None:
        return index, None
    train, val = split_samples(index, fraction, config.subset_seed)
    if split == "val" and say is not None:
        say(f"validation: {len(val):,} of {len(index):,} images, {fraction:.0%} of each class (val_fraction)")
    return index, val if split == "val" else train


def _two_validation_sets(fraction: float, place: str) -> UserError:
    return UserError(
        "two-validation-sets",
        f"val_fraction is {fraction}, but {redact_text(place)} has a validation split of its own",
        why="a result would not say on which of them it was measured",
        hint="leave out val_fraction, or set data_root to the folder of training images",
    )


def _check_nothing_writes_into(config: Config, index: SampleIndex) -> None:
    """Refuses our own folders among the images: the next listing, and other tools, would take them for classes."""
    if is_url(index.root) or index.shards or "layout" in index.facts:
        return
    place = Path(index.root).resolve()
    for key in ("index_dir", "cache_dir", "stage_to", "runs_dir"):
        folder = getattr(config, key)
        if folder is None or is_url(folder):
            continue
        inside = Path(folder).expanduser().resolve()
        if inside == place or place in inside.parents:
            raise UserError(
                "folder-inside-data",
                f"{key} is {inside}, which is inside the images of {place}",
                why="a folder there is a class to every program that reads class folders",
                hint=f"{key}=FOLDER, outside of the data",
            )


def chosen_record(config: Config, train: SampleSet, val: SampleSet | None) -> dict[str, Any] | None:
    """Which classes and how many images a subset holds, for `subset.json`; None if the config selects no subset."""
    keys = (config.subset_classes, config.subset_train_per_class, config.subset_val_per_class)
    if all(key is None for key in keys):
        return None
    return subset_record(train, val, config.subset_seed)


def listing_of_samples(samples: SampleSet) -> Listing:
    """Names and classes of the samples, in the order of their members."""
    index = samples.index
    if samples.chosen is None:
        return Listing(index.name_bytes, index.name_ends, index.labels.astype(np.int64))
    members = np.arange(len(samples), dtype=np.int64)
    lengths, kept = np.diff(index.name_ends, prepend=0), np.zeros(len(index), bool)
    kept[samples.chosen] = True  # ascending, as in the index
    name_bytes = np.asarray(index.name_bytes)[np.repeat(kept, lengths)]
    return Listing(name_bytes, np.cumsum(lengths[kept]), samples.labels(members))


def contents_of_samples(config: Config, samples: SampleSet) -> dict[str, Any] | None:
    """The contents of the samples that a resumed run compares (`Contents`); None if the store does not respond."""
    store = open_sample_store(samples.index, copy=cache_place(config.cache_dir, config.cache_size))
    members = samples.indices(np.array(looked_at(len(samples)), np.int64))

    def read(index: int) -> str:
        try:
            return xxhash.xxh3_64_hexdigest(read_sample(store, samples.index, index))
        except ReadFailure:
            return ""

    try:
        with ThreadPoolExecutor(READERS) as pool:
            hashes = list(pool.map(read, members.tolist()))
    except StoreDown:
        return None  # a cache may have all that training needs
    return {"packed": samples.index.shard_of is not None, "hashes": hashes}


def choose_decoding(config: Config, index: SampleIndex) -> tuple[Decoding, CalibrationResult | None]:
    """The decoder named in the config, or the fastest one on the data's own files, with its measurements."""
    decoding, measured = choose_decoder(
        config.decoder,
        lambda: files_for_measuring(config, index),
        config.img_size,
        max_pixels=config.max_image_pixels,
        mode=config.decode_mode,
    )
    return decoding_with(config, decoding.decoder), measured


def decoding_with(config: Config, decoder: str = "pillow") -> Decoding:
    """How a config's images are decoded by this decoder; at full size every one gives Pillow's pixels."""
    return Decoding(
        decoder, config.max_image_pixels, config.max_decoded_bytes, upright=config.decode_mode != "faithful"
    )


def training_plan(config: Config, samples: SampleSet, decoding: Decoding, ranks: Ranks = ALONE) -> ImagePlan:
    """What the training batches of this rank hold; a shorter epoch leaves out the end of its samples."""
    view = RandomCrop(
        size=config.img_size,
        bounds=CropRange(config.crop_scale, config.crop_aspect),
        decoding=decoding,
        mode=config.decode_mode,
        interpolation=training_interpolation(config),
    )
    sampler = EpochSampler(len(samples), config.seed, shuffle=True, repeats=config.repeated_augmentation)
    used = len(samples)
    if config.steps_per_epoch is not None or config.limit_train_batches is not None:
        update = config.batch_size * ranks.world * config.gradient_accumulation
        used = min(used, updates_per_epoch(config, used, ranks.world) * update)
    steps = Steps(used, config.batch_size, ranks.world, ranks.rank, drop_last=True)
    return ImagePlan(samples, sampler, steps, view, config.seed, config.horizontal_flip)


def validation_plan(config: Config, samples: SampleSet, decoding: Decoding, ranks: Ranks = ALONE) -> ImagePlan:
    """What the validation batches of this rank hold: every sample once, in order, nothing random.

    With `limit_val_batches`, a part of them: spread over all classes, which follow one another, and the same part in
    every epoch, because validation is always that of epoch 0.
    """
    view: View = validation_view(config, decoding)
    batch = config.val_batch_size or config.batch_size
    sampler = EpochSampler(len(samples), config.subset_seed, shuffle=config.limit_val_batches is not None)
    used = validation_samples(config, len(samples), ranks.world)
    steps = Steps(used, batch, ranks.world, ranks.rank, drop_last=False)
    return ImagePlan(samples, sampler, steps, view, config.seed, horizontal_flip=0.0)


def validation_samples(config: Config, samples: int, world: int) -> int:
    """How many of the validation samples are used: all, or those of `limit_val_batches`."""
    if config.limit_val_batches is None:
        return samples
    together = (config.val_batch_size or config.batch_size) * world
    return min(samples, limited(-(-samples // together), config.limit_val_batches) * together)


def validation_view(config: Config, decoding: Decoding) -> CentreCrop:
    """How a validation image is resized and cropped."""
    size = config.val_img_size or config.img_size
    interpolation = validation_interpolation(config)
    # As torchvision and timm compute it: the crop keeps `crop_ratio` of the resized shorter side.
    return CentreCrop(size, int(np.floor(size / config.crop_ratio)), decoding, interpolation)


def training_interpolation(config: Config) -> Interpolation:
    """How training crops are interpolated: bilinear unless the config says otherwise, as in torchvision."""
    return config.interpolation or "bilinear"


def validation_interpolation(config: Config) -> Interpolation:
    """How validation images are interpolated: bicubic unless the config says otherwise, as in timm."""
    return config.interpolation or "bicubic"


def open_loader(
    config: Config,
    plan: ImagePlan,
    *,
    workers: int,
    held: int = 1,
    quarantine_file: Path | None = None,
    copy: CopyPlace | None = None,
    follow: Follow | None = None,
    say: Say = lambda _line: None,
) -> ImageLoader:
    """A loader over a plan, with the config's settings for how batches are made; for a consumer that holds `held`
    batches when it asks for the next."""
    return ImageLoader(plan, loader_options(config, workers, held, quarantine_file, copy), say, follow)


def measure_speed(config: Config, data: TrainingData, *, workers: int, seconds: float) -> LoaderSpeed:
    """How fast the loader makes training batches for a consumer that takes no time."""
    # Long enough that no epoch ends within the measurement, however fast the host.
    least = config.batch_size * (workers + 4) * 3
    wanted = max(least, int(seconds * MOST_IMAGES_PER_WORKER_SECOND * max(1, workers)))
    endless = config.model_copy(update={"steps_per_epoch": None, "limit_train_batches": None})
    plan = training_plan(endless, repeated(data.train, wanted), data.decoding)
    return measure_loader(partial(open_loader, config, plan, workers=workers), workers, seconds)


def describe_storage(samples: SampleSet) -> StorageFacts:
    """What is known about the source without reading from it."""
    index = samples.index
    sizes = index.sizes
    total = None if sizes is None else int(sizes.sum() if samples.chosen is None else sizes[samples.chosen].sum())
    known = StorageFacts(
        dataset_bytes=total,
        bytes_per_sample=None if total is None or not len(samples) else total / len(samples),
        packed=index.shard_of is not None,
        root=redact_text(index.root),
    )
    return storage_at(index.root, known)


def measure_storage_of(
    samples: SampleSet, store: Store, seconds: float, missing: Say = lambda _text: None
) -> StorageFacts:
    """The same, and how fast the source is, from reading some of the samples for about `seconds`; reports to `missing`
    what could not be measured."""
    facts = describe_storage(samples)
    if is_parquet(samples.index):
        missing("the storage's speed: images in parquet files cannot be read alone")
        return facts
    return measure_storage(store, samples, facts, seconds, missing)


def read_sample(store: Store, index: SampleIndex, sample: int) -> Buffer:
    """A sample's bytes; raises ReadFailure."""
    place = index.location(sample)
    return store.read(place.path, place.offset, place.size, whole=index.shard_of is None)


def files_for_measuring(config: Config, index: SampleIndex) -> list[bytes]:
    """The contents of files spread over the index, to measure on the user's own data."""
    store = open_sample_store(index, max_object_bytes=config.max_image_bytes)
    files = []
    for sample in np.linspace(0, len(index) - 1, min(CALIBRATION_FILES, len(index))).astype(int):
        try:
            files.append(bytes(read_sample(store, index, int(sample))))
        except ReadFailure:
            continue  # reported when training reads it
    return files


def prepare_data(config: Config, say: Say) -> None:
    """Lists, calibrates and indexes once: processes that open the data afterwards find what was saved."""
    choose_decoding(config, open_samples(config, "train", say=say).index)


def storage_trial(config: Config, seconds: float) -> tuple[StorageFacts, list[str]]:
    """Latency and throughput of the storage that the training images are on and, if it is remote, of a local disk."""
    samples, missing = open_samples(config, "train"), list[str]()
    store = open_sample_store(samples.index, max_object_bytes=config.max_image_bytes)
    facts = measure_storage_of(samples, store, (1 - LOCAL_SHARE) * seconds, missing.append)
    if not (facts.remote and facts.bytes_per_sample):
        return facts, missing
    disk = find_local_disk()
    folder = config.cache_dir or (None if disk is None else disk.folder)
    place, seconds = None if folder is None else Path(folder), LOCAL_SHARE * seconds / 2
    speed = measure_local_disk(place, facts.bytes_per_sample, seconds)
    facts = replace(facts, local_bytes_per_second=speed)
    if disk is not None:
        facts = replace(facts, local_folder=disk.folder, local_free_bytes=disk.free_bytes)
    return facts, missing
