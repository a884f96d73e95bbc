"""What the network gets, as pictures: the samples of a run's first steps, and validation samples of many classes.

Everything about a sample is a function of seed, epoch and position, so these are not examples of the augmentation but
the inputs that those steps train on: made by the same loader, decoder, crop, device augmentation, mixing and
normalisation, of which only the last is undone to show them. A step mixes the first sample of a batch with the last and
so on: the first few and the last few of a batch are mixed exactly as in the whole batch, and only those are decoded.
This runs on the CPU in float32; a GPU may get 16-bit numbers, whose rounding error is less than a grey level.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stoker.config import Config
from stoker.core.redact import redact_text
from stoker.loader.sampler import excerpt
from stoker.profile.host import HostConfig
from stoker.tasks.contact_sheet import (
    COLUMNS,
    LARGEST_SIDE,
    InputRange,
    Picture,
    Preview,
    Sheet,
    SheetRow,
    SheetSection,
    not_shown,
    range_of,
    range_text,
    shown_side,
)
from stoker.tasks.images.augment.pipeline import Colour, Recipe
from stoker.tasks.images.classify import (
    checked_training_plan,
    colours_of_name,
    eval_prepare,
    image_size_of,
    prepare_batch,
    prepare_val_batch,
    train_augment,
)
from stoker.tasks.images.data import (
    TrainingData,
    open_loader,
    training_interpolation,
    validation_interpolation,
    validation_plan,
    validation_view,
)
from stoker.tasks.images.image_loader import ImageBatch, ImagePlan
from stoker.tasks.images.layouts.imagenet import spoken
from stoker.tasks.images.layouts.sample_index import SampleSet
from stoker.tasks.images.models import present_classes
from stoker.train.ranks import Ranks
from stoker.train.step import Prepared
from stoker.train.transfers import Uploader

CPU = torch.device("cpu")
DEFAULT_COUNT = 2 * COLUMNS
LEAST_WEIGHT = 0.005
"""Targets that would be shown as 0.00."""


@dataclass(frozen=True)
class SourceImage:
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
class StepSeen:
    """The first samples of a training step on the first rank, or samples of validation."""

    samples: tuple[Sample, ...]
    values: InputRange
    """The range of their numbers as the network gets them."""
    step: int | None = None
    recipe: Recipe | None = None


@dataclass(frozen=True)
class ImagesSeen:
    config: Config
    data: TrainingData
    epoch: int
    training: tuple[StepSeen, ...]
    validation: StepSeen | None
    """None without validation data, or without the time to read it."""


def preview(
    config: HostConfig,
    data: TrainingData,
    name: str,
    *,
    count: int | None = None,
    largest: int = LARGEST_SIDE,
    **limits: Any,
) -> Preview:
    """The sheet of a run's first steps, and of validation images of many classes."""
    seen = look(config, data, count=count or DEFAULT_COUNT, **limits)
    return Preview(sheet_of(seen, name, largest), partial(describe, seen))


def look(
    config: HostConfig,
    data: TrainingData,
    *,
    count: int = DEFAULT_COUNT,
    epoch: int = 0,
    world: int | None = None,
    patience_s: float = float("inf"),
) -> ImagesSeen:
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
        if recipe is None:
            positions = positions[:now]
        elif 2 * now < len(positions):  # those that they are mixed with are the last ones of the batch
            positions = np.concatenate([positions[:now], positions[-now:]])
        batch = _make(config, plan, positions, epoch)
        prepared = prepare_batch(augment, 0, Uploader(None).copy, batch, epoch, step, 0)
        labels = _labels(config, prepared, classes)[:now]
        samples = _samples(plan, batch, positions, prepared, labels, colours, 1.0 if recipe is None else recipe.kept)
        training.append(StepSeen(samples, range_of(prepared.inputs[:now]), step, recipe))
    validation = None
    if data.val is not None and time.monotonic() - began_s <= patience_s:
        positions = spread_over_classes(data.val, max(1, count // 2))
        val_plan = validation_plan(config, data.val, data.decoding)
        batch = _make(config, val_plan, positions, 0)
        prepared = prepare_val_batch(eval_prepare(config, colours, CPU), Uploader(None).copy, batch)
        labels = [((classes[label], 1.0),) for label in batch.labels]
        samples = _samples(val_plan, batch, positions, prepared, labels, colours)
        validation = StepSeen(samples, range_of(prepared.inputs))
    return ImagesSeen(config, data, epoch, tuple(training), validation)


def _make(config: Config, plan: ImagePlan, positions: NDArray[np.int64], epoch: int) -> ImageBatch:
    """The batch of these positions. In this thread: for a few samples, starting workers would take longer."""
    alone = config.model_copy(update={"loader": "thread", "pin_memory": False})
    loader = open_loader(alone, replace(plan, steps=excerpt(positions)), workers=0)
    try:
        return next(iter(loader.epoch(epoch)))
    finally:
        loader.close()


def _samples(
    plan: ImagePlan,
    batch: ImageBatch,
    positions: NDArray[np.int64],
    prepared: Prepared,
    labels: list[tuple[tuple[str, float], ...]],
    colours: tuple[Colour, Colour],
    kept: float = 1.0,
) -> tuple[Sample, ...]:
    """The first samples of a batch, as many as there are labels; `kept` is the share of itself that each keeps."""
    instead = {bad.index: bad.replaced_by for bad in batch.bad}
    parts = []
    for place, index in enumerate(batch.indices.tolist()):
        taken, tries = index, len(instead)
        while taken in instead and tries:
            taken, tries = instead[taken], tries - 1
        name, mirrored = plan.samples.index.name(taken), bool(batch.flips[place])
        parts.append(SourceImage(name, kept, int(positions[place]), mirrored, taken != index))
    found = []
    for place, picture in enumerate(as_pixels(prepared.inputs[: len(labels)], *colours)):
        partner = (replace(parts[-1 - place], share=1 - kept),) if kept != 1 else ()
        found.append(Sample(picture, labels[place], (parts[place], *partner)))
    return tuple(found)


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


def sheet_of(preview: ImagesSeen, name: str, largest: int) -> Sheet:
    """The preview in words and pictures; `largest` is the side at which pictures will be drawn."""
    config, data = preview.config, preview.data
    counts = f"{len(data.train):,} training images"
    if data.val is not None:
        counts += f", {len(data.val):,} validation images"
    about = [f"{config.model}", f"{redact_text(str(config.data_root))}: {counts}, {len(data.train.classes):,} classes"]
    mean, std = (", ".join(f"{value:.3f}" for value in colour) for colour in colours_of_name(config.model))
    about += [f"decoded by {data.decoding.decoder}", f"normalised with mean {mean} and deviation {std}"]
    size = image_size_of(config, preview.epoch)
    rows = tuple(SheetRow(_pictures(seen), _step_title(seen, preview.epoch)) for seen in preview.training)
    settings = _shown(_training_settings(config, size), size, largest)
    training = SheetSection("Training", (settings, range_text([seen.values for seen in preview.training])), rows)
    sections = training, _validation_section(preview, largest)
    return Sheet(f"What the network gets: {name}", (" · ".join(about),), sections)


def _validation_section(preview: ImagesSeen, largest: int) -> SheetSection:
    config, data, seen = preview.config, preview.data, preview.validation
    if data.val is None:
        return SheetSection("No validation", (f"{redact_text(str(config.data_root))} has no validation images.",))
    if seen is None:
        return not_shown("samples")
    view, classes = validation_view(config, data.decoding), {label for s in seen.samples for label, _ in s.labels}
    crop = f"centre crop after resizing the shorter side to {view.resize} px"
    which = f"images of {len(classes):,} of {len(data.val.classes):,} classes"
    settings = [f"{view.size} px", crop, validation_interpolation(config), which]
    notes = _shown(settings, view.size, largest), range_text([seen.values])
    return SheetSection("Validation", notes, (SheetRow(_pictures(seen)),))


def _training_settings(config: Config, size: int) -> list[str]:
    """The settings that change a training sample, without those that are off."""
    low, high = config.crop_scale
    settings = [f"{size} px", f"crop of {low:.0%} to {high:.0%} of the area", training_interpolation(config)]
    if config.decode_mode != "fast":
        settings.append(f"decode_mode {config.decode_mode}")
    settings.append(f"flip {config.horizontal_flip:g}" if config.horizontal_flip else "no flip")
    if config.auto_augment == "randaugment":
        magnitude = f"magnitude {config.randaugment_magnitude:g} ± {config.randaugment_magnitude_std:g}"
        settings.append(f"randaugment: {config.randaugment_ops} operations of {magnitude}")
    elif config.auto_augment != "none":
        settings.append(config.auto_augment)
    alphas = {"mixup": config.mixup_alpha, "cutmix": config.cutmix_alpha}
    mixing = [f"{name} {alpha:g}" for name, alpha in alphas.items() if alpha]
    if mixing:
        settings.append(" or ".join(mixing) + f" with probability {config.mix_probability:g}")
    if config.repeated_augmentation > 1:
        settings.append(f"each image {config.repeated_augmentation} times (repeated_augmentation)")
    optional = {
        "erasing": config.random_erasing, "label smoothing": config.label_smoothing,
        "binary targets above": (config.bce_target_threshold or 0) if config.loss == "bce" else 0,
    }  # fmt: skip
    return settings + [f"{name} {value:g}" for name, value in optional.items() if value]


def _shown(settings: list[str], size: int, largest: int) -> str:
    side = shown_side(size, largest)
    scaled = f"shown {side // size}× as large" if side > size else f"shown at {side} px" if side < size else ""
    return " · ".join([*settings, scaled] if scaled else settings)


def _step_title(seen: StepSeen, epoch: int) -> str:
    mixed = ""
    if seen.recipe is not None:
        kind = "mixup" if seen.recipe.box is None else "cutmix"
        mixed = f": {kind}, each keeps {seen.recipe.kept:.2f} of itself and gets {1 - seen.recipe.kept:.2f} of another"
    return f"Epoch {epoch}, step {seen.step}{mixed}"


def _pictures(seen: StepSeen) -> tuple[Picture, ...]:
    return tuple(Picture(sample.pixels, caption_of(sample), _small_print(sample)) for sample in seen.samples)


def caption_of(sample: Sample) -> tuple[str, ...]:
    """A line for each class: its name alone if the sample shows nothing else, else with its weight."""
    if not sample.labels:
        return ("no class above the threshold",)
    if len(sample.labels) == 1 and sample.labels[0][1] > 1 - LEAST_WEIGHT:
        return (spoken(sample.labels[0][0]),)
    first, *others = (f"{weight:.2f} {spoken(name)}" for name, weight in sample.labels)
    return first, *(f"+ {text}" for text in others)


def _small_print(sample: Sample) -> tuple[str, ...]:
    """The files that it is made of, like its classes the heaviest first."""
    lines = []
    for part in sorted(sample.parts, key=lambda part: -part.share):
        share = [f"{part.share:.2f}"] if len(sample.parts) > 1 else []
        marks = ["mirrored"] * part.mirrored + ["in place of a bad file"] * part.replaced
        lines.append(" · ".join([*share, *marks, part.name.rpartition("/")[2]]))
    return tuple(lines)


def describe(preview: ImagesSeen, boxes: tuple[tuple[int, int, int, int], ...]) -> dict[str, Any]:
    """What is shown, as a plain record; `boxes` are the places of the pictures on the sheet."""
    config, data, places = preview.config, preview.data, iter(boxes)
    size = image_size_of(config, preview.epoch)
    steps = [
        {
            "step": seen.step,
            "mixed": None if seen.recipe is None else "mixup" if seen.recipe.box is None else "cutmix",
            "kept": None if seen.recipe is None else seen.recipe.kept,
            "samples": [_record(sample, next(places)) for sample in seen.samples],
        }
        for seen in preview.training
    ]
    validation = None
    if preview.validation is not None:
        view = validation_view(config, data.decoding)
        validation = {
            "img_size": view.size, "resize": view.resize, "interpolation": view.interpolation,
            "samples": [_record(sample, next(places)) for sample in preview.validation.samples],
        }  # fmt: skip
    return {
        "epoch": preview.epoch,
        "classes": len(data.train.classes),
        "training": {"img_size": size, "settings": _training_settings(config, size), "steps": steps},
        "validation": validation,
    }


def _record(sample: Sample, box: tuple[int, int, int, int]) -> dict[str, Any]:
    return {
        "labels": [
            {"class": _utf8(label), "words": _utf8(spoken(label)), "weight": weight} for label, weight in sample.labels
        ],
        "images": [asdict(part) | {"name": _utf8(part.name)} for part in sample.parts],
        "box": list(box),
    }


def _utf8(name: str) -> str:
    """A name that may come from a file system with another encoding."""
    return name.encode("utf-8", "replace").decode()
