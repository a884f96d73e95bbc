"""The tasks, each as what training calls of it: one row here, and its own module."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from stoker.config import Config
from stoker.core.console import Say
from stoker.core.files import write_text
from stoker.loader.loader import BatchLoader, ImageLoader
from stoker.loader.loader_speed import LoaderSpeed
from stoker.profile.host import HostConfig
from stoker.profile.observed import StorageFacts
from stoker.run.folder import RunFolder
from stoker.tasks.images import classify
from stoker.tasks.images import data as image_data
from stoker.tasks.images.classify import TrainingData
from stoker.tasks.images.data import chosen_record
from stoker.tasks.images.preview_sheet import keep_with_run
from stoker.tasks.staging import Staging
from stoker.tasks.volumes import data as volume_data
from stoker.tasks.volumes import preview_sheet as volume_preview
from stoker.tasks.volumes import segment
from stoker.tasks.volumes.data import VolumeData
from stoker.tasks.volumes.patches.plans import PatchLoader
from stoker.train.checkpoint.data_changes import Contents, Listings
from stoker.train.checkpoint.folder import FoundCheckpoint
from stoker.train.loop import Run
from stoker.train.ranks import Ranks


class RunData(Protocol):
    """What training needs to know about a task's data."""

    @property
    def samples(self) -> int:
        """Samples to train on; for random patches, those of an epoch."""

    def storage(self) -> StorageFacts: ...

    def names(self, samples: Sequence[int]) -> list[str]:
        """What samples are called, from their numbers in the data set."""
        ...


@dataclass(frozen=True)
class Task:
    """What `stoker train` calls, in this order. `Data` is whatever the task's own functions make of it."""

    open_data: Callable[..., Any]
    """(config, say, progress) -> data; raises UserError if it cannot be trained on."""
    chosen: Callable[[HostConfig, Any, RunFolder, Say], None]
    """Says and records which part of the data a config has chosen."""
    listings: Callable[[Any], Listings]
    """Which samples the data has, in order."""
    contents: Callable[[HostConfig, Any], Contents]
    """A hash of some of them, to notice data that was made again under the same names."""
    as_it_began: Callable[[FoundCheckpoint, HostConfig, Any, Say], Any]
    """The data as a resumed run read it before."""
    open_staging: Callable[[HostConfig, Any, Ranks, Say], Staging | None]
    """The local copy that training fills, if the config names one."""
    build_run: Callable[..., Run]
    describe_run: Callable[[Config, Run, Any], str]
    keep_preview: Callable[[RunFolder, HostConfig, Any, int, Say], None]
    """Draws what the network gets, into the run's folder."""
    open_training_loader: Callable[[HostConfig, Any], BatchLoader[Any]]
    """The loader of one process, without a model to feed."""
    measure_speed: Callable[..., LoaderSpeed]
    """(config, data, workers=, seconds=) -> how fast it is for a consumer that takes no time."""
    unit: str
    """What a sample is called."""


def task_for(config: Config) -> Task:
    """The task of a config."""
    return TASKS[config.task]


def _record_subset(config: HostConfig, data: TrainingData, folder: RunFolder, say: Say) -> None:
    chosen = chosen_record(config, data.train, data.val)
    if chosen is not None:
        say(f"classes: {', '.join(chosen['classes'])}")
        write_text(folder.subset_file, json.dumps(chosen, indent=1) + "\n")


def _keep_sheet(folder: RunFolder, config: HostConfig, data: TrainingData, world: int, say: Say) -> None:
    keep_with_run(folder.preview_file, config, data, world, say)


def _keep_patches(folder: RunFolder, config: HostConfig, data: VolumeData, world: int, say: Say) -> None:
    volume_preview.keep_with_run(folder.preview_file, config, data, world, say)


def _images_of(data: TrainingData) -> Listings:
    parts = {"train": data.train, "val": data.val}
    return {part: None if one is None else image_data.listing_of_samples(one) for part, one in parts.items()}


def _contents_of(config: HostConfig, data: TrainingData) -> Contents:
    if config.stage_to is not None:
        return {}  # it reads its local copy, and that has its own manifest
    parts = {"train": data.train, "val": data.val}
    return {part: None if one is None else image_data.contents_of_samples(config, one) for part, one in parts.items()}


def _unknown_contents(_config: HostConfig, _data: VolumeData) -> Contents:
    return {}


def _cases_of(data: VolumeData) -> Listings:
    parts = {"train": data.train, "val": data.val}
    return {part: None if one is None else volume_data.listing_of_cases(one) for part, one in parts.items()}


def _image_loader(config: HostConfig, data: TrainingData) -> ImageLoader:
    plan = image_data.training_plan(config, data.train, data.decoding)
    return image_data.open_loader(config, plan, workers=config.num_workers)


def _image_speed(config: HostConfig, data: TrainingData, *, workers: int, seconds: float) -> LoaderSpeed:
    return image_data.measure_speed(config, data.train, data.decoding, workers=workers, seconds=seconds)


def _patch_loader(config: HostConfig, data: VolumeData) -> PatchLoader:
    plan = volume_data.training_plan(config, data)
    return volume_data.open_loader(config, plan, data.reading, workers=config.num_workers)


def _nothing(*_arguments: Any) -> None:
    """For parts that a task does not have."""


def _same_volumes(_found: FoundCheckpoint, _config: HostConfig, data: VolumeData, _say: Say) -> VolumeData:
    """Voxels are the same whichever library reads them."""
    return data


TASKS = {
    "classify": Task(
        classify.open_data, _record_subset, _images_of, _contents_of, classify.with_decoder_of, classify.open_staging,
        classify.build_run, classify.describe_run, _keep_sheet, _image_loader, _image_speed, "images",
    ),
    "segment3d": Task(
        volume_data.open_data, _nothing, _cases_of, _unknown_contents, _same_volumes, segment.open_staging,
        segment.build_run, segment.describe_run, _keep_patches, _patch_loader, volume_data.measure_speed, "patches",
    ),
}  # fmt: skip
