"""What the network gets, as pictures: the samples of a run's first steps, and validation samples of many classes.

Everything about a sample is a function of seed, epoch and position, so these are not examples of the augmentation but
the very inputs that those steps train on: made by the same loader, decoder, crop, device augmentation, mixing and
normalisation, of which only the last is undone to show them. A step mixes the first sample of a batch with the last and
so on: the first few and the last few of a batch are mixed exactly as in the whole batch, and only those are decoded.
It is done on the CPU, in float32; a GPU may get 16-bit numbers, whose rounding is less than a grey level.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stoker.config import Config
from stoker.loader.batch import ImageBatch
from stoker.loader.collate import BatchPlan
from stoker.loader.sampler import excerpt
from stoker.profile.host import HostConfig
from stoker.tasks.contact_sheet import COLUMNS
from stoker.tasks.images.augment.mixing import Recipe
from stoker.tasks.images.augment.pipeline import Colour
from stoker.tasks.images.classify import (
    TrainingData,
    checked_training_plan,
    colours_of_name,
    eval_prepare,
    image_size_of,
    prepare_batch,
    prepare_val_batch,
    train_augment,
)
from stoker.tasks.images.data import open_loader, validation_plan
from stoker.tasks.images.layouts.sample_index import SampleSet
from stoker.train.optimization import present_classes
from stoker.train.ranks import Ranks
from stoker.train.step import Prepared
from stoker.train.transfers import Uploader

CPU = torch.device("cpu")
DEFAULT_COUNT = 2 * COLUMNS
LEAST_WEIGHT = 0.005
"""Targets that would be shown as 0.00."""


@dataclass(frozen=True)
class SourceImage:
    """An image that an input is made of."""

    name: str
    """Path of its file, below the split's folder."""
    share: float
    """1 unless it is mixed with another."""
    position: int
    """Its place in the epoch."""
    mirrored: bool
    replaced: bool
    """Whether the file at this position cannot be read, and another one was taken."""


@dataclass(frozen=True)
class Sample:
    """One input of the network, as a picture again."""

    pixels: NDArray[np.uint8]
    labels: tuple[tuple[str, float], ...]
    """The classes that the loss counts it as, with their weights, the heaviest first; empty if a threshold removed
    all of them."""
    parts: tuple[SourceImage, ...]
    """The image itself, then the one that it is mixed with."""


@dataclass(frozen=True)
class Inputs:
    """Samples that were prepared together, and the range of their numbers as the network gets them."""

    samples: tuple[Sample, ...]
    mean: float
    deviation: float
    lowest: float
    highest: float


@dataclass(frozen=True)
class StepSeen:
    """The first samples of a training step on the first rank."""

    step: int
    recipe: Recipe | None
    inputs: Inputs


@dataclass(frozen=True)
class Preview:
    """What is on the sheet."""

    config: Config
    data: TrainingData
    epoch: int
    training: tuple[StepSeen, ...]
    validation: Inputs | None
    """None without validation data, or without the time to read it."""


def look(
    config: HostConfig,
    data: TrainingData,
    *,
    count: int = DEFAULT_COUNT,
    epoch: int = 0,
    world: int | None = None,
    patience_s: float = float("inf"),
) -> Preview:
    """The first samples of an epoch's first steps, `count` in all, and half as many for validation.

    They are those of the first of `world` ranks; if that is not known, as many as the config has devices.
    Draws no random number from any generator, writes nothing, and builds no network. After `patience_s` nothing more is
    read: what is missing is left out.
    """
    began_s = time.monotonic()
    colours = colours_of_name(config.model)
    classes, num_classes = data.train.classes, config.num_classes or len(data.train.classes)
    ranks = Ranks(rank=0, world=world or config.devices * config.num_nodes)
    size = image_size_of(config, epoch)
    plan = checked_training_plan(config.model_copy(update={"img_size": size}), data, ranks)
    augment = train_augment(config, num_classes, colours, CPU)
    steps_per_epoch = plan.steps.count() // config.gradient_accumulation
    shown = min(count, COLUMNS, config.batch_size)
    training: list[StepSeen] = []
    for number in range(min(-(-count // shown), steps_per_epoch)):
        if training and time.monotonic() - began_s > patience_s:
            break
        step = epoch * steps_per_epoch + number
        positions = plan.steps.positions(number * config.gradient_accumulation)
        recipe = augment.mixer.draw(epoch, step, 0, size, size)
        now = min(shown, count - number * shown)
        chosen = positions[:now] if recipe is None else _with_partners(positions, now)
        batch = _make(config, plan, chosen, epoch)
        prepared = prepare_batch(augment, Uploader(None).copy, 0, batch, epoch, step, 0)
        labels = _labels(config, prepared, classes)[:now]
        kept = 1.0 if recipe is None else recipe.kept
        training.append(StepSeen(step, recipe, _inputs(data.train, batch, chosen, prepared, labels, colours, kept)))
    validation = None
    if data.val is not None and time.monotonic() - began_s <= patience_s:
        chosen = spread_over_classes(data.val, max(1, count // 2))
        batch = _make(config, validation_plan(config, data.val, data.decoding), chosen, 0)
        prepared = prepare_val_batch(eval_prepare(config, colours, CPU), Uploader(None).copy, batch)
        labels = [((classes[label], 1.0),) for label in batch.labels]
        validation = _inputs(data.val, batch, chosen, prepared, labels, colours)
    return Preview(config, data, epoch, tuple(training), validation)


def _with_partners(positions: NDArray[np.int64], count: int) -> NDArray[np.int64]:
    """The first positions of a batch and those that they are mixed with, its last ones."""
    return positions if 2 * count >= len(positions) else np.concatenate([positions[:count], positions[-count:]])


def _make(config: Config, plan: BatchPlan, positions: NDArray[np.int64], epoch: int) -> ImageBatch:
    """The batch of these positions. In this thread: for a few samples, starting workers would take longer."""
    loader = open_loader(config.model_copy(update={"loader": "thread", "pin_memory": False}),
                         replace(plan, steps=excerpt(positions)), workers=0)  # fmt: skip
    try:
        return next(iter(loader.epoch(epoch)))
    finally:
        loader.close()


def _inputs(
    samples: SampleSet,
    batch: ImageBatch,
    positions: NDArray[np.int64],
    prepared: Prepared,
    labels: list[tuple[tuple[str, float], ...]],
    colours: tuple[Colour, Colour],
    kept: float = 1.0,
) -> Inputs:
    """The first samples of a batch, as many as there are labels; `kept` is the share of itself that each keeps."""
    shown = prepared.inputs[: len(labels)]
    pictures = as_pixels(shown, *colours)
    parts = _parts(samples, batch, positions)
    found = []
    for place, picture in enumerate(pictures):
        partner = replace(parts[-1 - place], share=1 - kept)
        mixed = (replace(parts[place], share=kept), partner) if kept != 1 else (parts[place],)
        found.append(Sample(picture, labels[place], mixed))
    numbers = shown.double()
    return Inputs(tuple(found), float(numbers.mean()), float(numbers.std()), float(numbers.min()), float(numbers.max()))


def _parts(samples: SampleSet, batch: ImageBatch, positions: NDArray[np.int64]) -> list[SourceImage]:
    """The images of a batch; `bad` names the replacement of each unreadable one."""
    instead = {bad.index: bad.replaced_by for bad in batch.bad}
    parts = []
    for place, index in enumerate(batch.indices.tolist()):
        taken, tries = index, len(instead)
        while taken in instead and tries:
            taken, tries = instead[taken], tries - 1
        parts.append(
            SourceImage(samples.index.name(taken), 1.0, int(positions[place]), bool(batch.flips[place]), taken != index)
        )
    return parts


def as_pixels(inputs_nchw: Tensor, mean: Colour, std: Colour) -> NDArray[np.uint8]:
    """Inputs of a network as pictures (samples, height, width, 3): undoes the normalisation, and nothing else."""
    shift, scale = torch.tensor(mean) * 255, torch.tensor(std) * 255
    pixels: NDArray[np.uint8] = (
        (inputs_nchw.float().permute(0, 2, 3, 1) * scale + shift).round().clamp(0, 255).to(torch.uint8).numpy()
    )
    return pixels


def spread_over_classes(samples: SampleSet, count: int) -> NDArray[np.int64]:
    """Members of as many classes as possible, evenly over all of them: a data set begins with many of one class."""
    labels = samples.labels(np.arange(len(samples), dtype=np.int64))
    present = np.unique(labels)
    count = min(count, len(labels))
    places = np.linspace(0, len(present) - 1, min(count, len(present))).round().astype(int)
    per_class, more = divmod(count, len(places))
    chosen: list[int] = []
    for number, label in enumerate(present[places]):
        members = np.flatnonzero(labels == label)
        wanted = min(per_class + (number < more), len(members))
        chosen += members[np.linspace(0, len(members) - 1, wanted).round().astype(int)].tolist()
    return np.array(chosen, np.int64)


def _labels(config: Config, prepared: Prepared, classes: tuple[str, ...]) -> list[tuple[tuple[str, float], ...]]:
    """The classes that the loss counts each sample as: one, or two if mixed, with the weights that it uses. The
    shares that smoothing gives to all the others are not listed."""
    rows = weights = prepared.targets
    if config.loss == "bce" and config.bce_target_threshold is not None:
        weights = present_classes(rows, config.bce_target_threshold)
    found = []
    for row, weight in zip(rows.numpy(), weights.numpy(), strict=True):
        heaviest = np.argsort(-row, kind="stable")[: 2 if prepared.mixed else 1]
        background = row.min() if len(row) > len(heaviest) else 0.0
        named = [label for label in heaviest if row[label] > background and weight[label] >= LEAST_WEIGHT]
        found.append(tuple((classes[label], float(weight[label])) for label in named))
    return found
