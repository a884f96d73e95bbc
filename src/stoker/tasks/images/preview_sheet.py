"""The sheet of a preview: what its pictures are called, which settings made them, and where it is kept."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from stoker.config import Config
from stoker.core.console import Say
from stoker.core.files import write_bytes
from stoker.core.redact import redact_text
from stoker.profile.host import HostConfig
from stoker.tasks.contact_sheet import Picture, Sheet, SheetRow, SheetSection, draw_sheet, shown_side
from stoker.tasks.images.classify import TrainingData, colours_of_name, image_size_of
from stoker.tasks.images.data import training_interpolation, validation_interpolation, validation_view
from stoker.tasks.images.layouts.imagenet import spoken
from stoker.tasks.images.preview import LEAST_WEIGHT, Inputs, Preview, Sample, StepSeen, look

RUN_PATIENCE_S = 1.0
RUN_LARGEST_SIDE = 160
RUN_MOST_BYTES = 250_000


def sheet_of(preview: Preview, name: str, largest: int) -> Sheet:
    """The preview in words and pictures; `largest` is the side at which pictures will be drawn."""
    config, data = preview.config, preview.data
    counts = f"{len(data.train):,} training images"
    if data.val is not None:
        counts += f", {len(data.val):,} validation images"
    about = [f"{config.model}", f"{redact_text(str(config.data_root))}: {counts}, {len(data.train.classes):,} classes"]
    mean, std = (", ".join(f"{value:.3f}" for value in colour) for colour in colours_of_name(config.model))
    about += [f"decoded by {data.decoding.decoder}", f"normalised with mean {mean} and deviation {std}"]
    size = image_size_of(config, preview.epoch)
    rows = tuple(
        SheetRow(tuple(map(_picture, seen.inputs.samples)), _step_title(seen, preview.epoch))
        for seen in preview.training
    )
    training = SheetSection(
        "Training",
        (_shown(_training_settings(config, size), size, largest), _range([seen.inputs for seen in preview.training])),
        rows,
    )
    return Sheet(
        f"What the network gets: {name}", (" · ".join(about),), (training, _validation_section(preview, largest))
    )


def _validation_section(preview: Preview, largest: int) -> SheetSection:
    config, data, seen = preview.config, preview.data, preview.validation
    if data.val is None:
        return SheetSection("No validation", (f"{redact_text(str(config.data_root))} has no validation images.",))
    if seen is None:
        return SheetSection("Validation", ("Not shown: reading the training samples took too long already.",))
    view, classes = validation_view(config, data.decoding), {label for s in seen.samples for label, _ in s.labels}
    crop = f"centre crop after resizing the shorter side to {view.resize} px"
    which = f"images of {len(classes):,} of {len(data.val.classes):,} classes"
    settings = [f"{view.size} px", crop, validation_interpolation(config), which]
    notes = _shown(settings, view.size, largest), _range([seen])
    return SheetSection("Validation", notes, (SheetRow(tuple(map(_picture, seen.samples))),))


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


def _range(inputs: list[Inputs]) -> str:
    """The values that the network gets: a wrong normalisation cannot be seen once it is undone."""
    mean, deviation = (float(np.mean([getattr(i, name) for i in inputs])) for name in ("mean", "deviation"))
    lowest, highest = min(i.lowest for i in inputs), max(i.highest for i in inputs)
    return f"values of these inputs: mean {mean:.2f}, deviation {deviation:.2f}, from {lowest:.2f} to {highest:.2f}"


def _step_title(seen: StepSeen, epoch: int) -> str:
    mixed = ""
    if seen.recipe is not None:
        kind = "mixup" if seen.recipe.box is None else "cutmix"
        mixed = f": {kind}, each keeps {seen.recipe.kept:.2f} of itself and gets {1 - seen.recipe.kept:.2f} of another"
    return f"Epoch {epoch}, step {seen.step}{mixed}"


def _picture(sample: Sample) -> Picture:
    return Picture(sample.pixels, caption_of(sample), _small_print(sample))


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


def describe(preview: Preview, boxes: tuple[tuple[int, int, int, int], ...]) -> dict[str, Any]:
    """What is shown, as a plain record; `boxes` are the places of the pictures on the sheet."""
    config, data, places = preview.config, preview.data, iter(boxes)
    size = image_size_of(config, preview.epoch)
    steps = [
        {
            "step": seen.step,
            "mixed": None if seen.recipe is None else "mixup" if seen.recipe.box is None else "cutmix",
            "kept": None if seen.recipe is None else seen.recipe.kept,
            "samples": [_record(sample, next(places)) for sample in seen.inputs.samples],
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


def keep_with_run(file: Path, config: HostConfig, data: TrainingData, world: int, say: Say) -> None:
    """Writes the preview of a run that begins into its folder, where `stoker report` finds it.

    Before the first step and by the code of `stoker preview`, not from a batch of the loop: nothing is added to the
    loop, and nothing there changes. The training samples are those that the first steps read anyway, a moment later
    and then from the page cache. It takes a few tenths of a second, and if storage is slow, stops after the first
    samples. A picture is not worth a run: any error is reported, and the run begins without it.
    """
    try:
        preview = look(config, data, world=world, patience_s=RUN_PATIENCE_S)
        drawn = draw_sheet(sheet_of(preview, file.absolute().parent.name, RUN_LARGEST_SIDE), RUN_LARGEST_SIDE)
        write_bytes(file, drawn.as_jpeg(RUN_MOST_BYTES))
    except Exception as error:
        say(f"note: no {file.name}: {str(error) or type(error).__name__}")
