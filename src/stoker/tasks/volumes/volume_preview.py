"""`stoker preview` for volumes: the patches of a run's first steps as the network gets them, with their labels.

A patch is a function of seed, epoch and position, so these are exactly the inputs that those steps train on: read,
turned, resampled, normalised and changed by the same code, on the CPU in float32.
"""

from __future__ import annotations

import textwrap
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from stoker.config import Config
from stoker.core.console import shown
from stoker.core.redact import redact_text
from stoker.core.units import count
from stoker.loader.sampler import excerpt
from stoker.profile.host import HostConfig
from stoker.tasks.building import loader_options
from stoker.tasks.contact_sheet import (
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
)
from stoker.tasks.volumes.augment import VolumePrepare, build_volume_augment, build_volume_eval
from stoker.tasks.volumes.data import PatchLoader, VolumeData, patch_of, training_plan
from stoker.tasks.volumes.intensity import draw_changes
from stoker.tasks.volumes.patches.patch_collate import PatchBatch, PatchPlan
from stoker.tasks.volumes.pictures import AXES, as_grey, plain, with_classes
from stoker.train.ranks import Ranks
from stoker.train.transfers import Uploader

DEFAULT_COUNT = 6
CHARACTERS = 32
"""Length of a line below a picture."""
_SMALL_ANGLE = 0.5
"""Degrees below which a rotation is rounding."""


@dataclass(frozen=True)
class PatchSeen:
    """One input of the network, cut where it has the most foreground."""

    case: str
    start: tuple[int, ...]
    """Where its box begins in the volume."""
    step: int | None
    """The training step that it belongs to; None for validation."""
    cut: int
    """The plane across z that is shown."""
    image: NDArray[np.uint8]
    label: NDArray[np.int64]
    known: NDArray[np.bool_]
    labelled: float
    """Share of the patch's voxels that have a label."""
    foreground: float
    """Share of the labelled voxels that are of a class other than 0."""
    changes: tuple[str, ...]
    """What was done to it, in words."""
    values: InputRange


@dataclass(frozen=True)
class PatchesSeen:
    """What is on the sheet."""

    config: Config
    data: VolumeData
    epoch: int
    training: tuple[PatchSeen, ...]
    validation: tuple[PatchSeen, ...] | None
    """None without validation data, or without the time to read it."""


def preview(
    config: HostConfig,
    data: VolumeData,
    name: str,
    *,
    count: int | None = None,
    largest: int = LARGEST_SIDE,  # noqa: ARG001 - the text does not say how large the pictures are
    **limits: Any,
) -> Preview:
    """The sheet of a run's first patches, and of validation patches of many volumes."""
    seen = look(config, data, count=count or DEFAULT_COUNT, **limits)
    return Preview(sheet_of(seen, name), partial(describe, seen))


def look(
    config: HostConfig,
    data: VolumeData,
    *,
    count: int,
    epoch: int = 0,
    world: int | None = None,
    patience_s: float = float("inf"),
) -> PatchesSeen:
    """The first patches of an epoch, and half as many of validation; those of the first of `world` ranks.

    Draws no random number from any generator, writes nothing, and builds no network. After `patience_s` nothing more is
    read: what is missing is left out."""
    began_s = time.monotonic()

    def looked(
        plan: PatchPlan, prepare: VolumePrepare, epoch: int, places: Iterable[tuple[int, int | None]]
    ) -> tuple[PatchSeen, ...]:
        """The patches at these positions, each with its training step."""
        seen: list[PatchSeen] = []
        for position, step in places:
            if seen and time.monotonic() - began_s > patience_s:
                break
            seen += _look_at(config, data, plan, position, epoch, prepare, step)
        return tuple(seen)

    plan = training_plan(config, data, Ranks(rank=0, world=world or config.devices * config.num_nodes))
    augment = build_volume_augment(config, *data.statistics(data.train), torch.float32)
    batches = range(min(plan.steps.count(), -(-count // config.batch_size)))
    positions = [int(position) for step in batches for position in plan.steps.positions(step)][:count]
    per_update = config.batch_size * config.gradient_accumulation
    steps = plan.steps.count() // config.gradient_accumulation
    numbered = ((position, epoch * steps + number // per_update) for number, position in enumerate(positions))
    training, validation = looked(plan, augment, epoch, numbered), None
    if data.val is not None and time.monotonic() - began_s <= patience_s:
        prepare = build_volume_eval(config, *data.statistics(data.val), torch.float32)
        # Evenly over all patches of the grid, and so over its volumes.
        shares = (np.arange(wanted := max(1, count // 2)) + 0.5) / wanted
        spread = sorted({int(place) for place in shares * data.val.steps.samples})
        validation = looked(data.val, prepare, 0, ((position, None) for position in spread))
    return PatchesSeen(config, data, epoch, training, validation)


def _look_at(
    config: Config,
    data: VolumeData,
    plan: PatchPlan,
    position: int,
    epoch: int,
    prepare: VolumePrepare,
    step: int | None,
) -> Iterator[PatchSeen]:
    # In this thread: for a few patches, starting workers would take longer.
    alone = config.model_copy(update={"loader": "thread", "pin_memory": False})
    only = replace(plan, steps=excerpt(np.array([position])))
    loader = PatchLoader(only, data.reading, loader_options(alone, workers=0))
    try:
        batch = next(iter(loader.epoch(epoch)))
    finally:
        loader.close()
    if not batch.valid[0]:
        return
    inputs, labels = prepare.prepare(batch, Uploader(None).copy)
    label, known = labels[0].numpy(), labels[0].numpy() != data.rules.outside
    foreground = known & (label != 0)
    # Without foreground, where most of it is labelled.
    cut = int((foreground if foreground.any() else known).sum((1, 2)).argmax())
    yield PatchSeen(
        case=plan.cases[int(batch.cases[0])].id, start=tuple(batch.starts[0].tolist()), step=step, cut=cut,
        image=as_grey(inputs[0, 0, cut].numpy()), label=label[cut], known=known[cut], labelled=float(known.mean()),
        foreground=float(foreground.sum() / max(1, known.sum())), changes=(*placed(batch, 0), *changed(batch, prepare)),
        values=range_of(inputs[0]),
    )  # fmt: skip


def placed(batch: PatchBatch, slot: int) -> tuple[str, ...]:
    """How a patch is placed in its volume, in words; read off the numbers that the device gets."""
    words = []
    order, flips = batch.orders[slot].tolist(), batch.flips[slot].tolist()
    if order != [0, 1, 2]:
        words.append(f"axes {' '.join(AXES[axis] for axis in order)}")
    if any(flips):
        words.append(f"mirrored {' '.join(AXES[axis] for axis in range(3) if flips[axis])}")
    if batch.plain[slot]:
        return tuple(words)
    oriented = np.zeros((3, 3))
    oriented[order, range(3)] = np.where(flips, -1.0, 1.0)
    rotated = oriented.T @ batch.matrices[slot]
    scale = float(np.cbrt(np.linalg.det(rotated)))
    angle = float(np.degrees(np.arccos(np.clip((np.trace(rotated / scale) - 1) / 2, -1, 1))))
    if angle > _SMALL_ANGLE:
        words.append(f"rotated by {angle:.0f}°")
    if abs(scale - 1) > 1e-6:
        words.append(f"{scale:.2f} voxels in one")
    if batch.elastic[slot] > 0:
        words.append(f"deformed by {float(batch.elastic[slot]):.1f} voxels")
    return tuple(words)


def changed(batch: PatchBatch, prepare: VolumePrepare) -> tuple[str, ...]:
    """What happened to the voxels of the first patch, in words; the numbers are those of the first channel, which is
    the one that is shown."""
    changes = draw_changes(batch.keys, prepare.chances, batch.layout.channels, batch.patch)[0]
    words = []
    if changes.noise is not None:
        words.append(f"noise {changes.noise[0]:.2f}")
    if changes.blur is not None:
        words.append("blur " + " ".join(f"{sigma:.1f}" for sigma in changes.blur[0]))
    if changes.brightness is not None:
        words.append(f"brightness × {changes.brightness[0]:.2f}")
    if changes.contrast is not None:
        words.append(f"contrast × {changes.contrast[0]:.2f}")
    if changes.low_resolution is not None:
        words.append(f"{changes.low_resolution[0]:.0%} of the resolution")
    if changes.gamma is not None:
        words.append(f"gamma {changes.gamma[0]:.2f}" + (" of the negative" if changes.inverted else ""))
    if changes.cutout is not None:
        words.append("a box cut out")
    return tuple(words)


def sheet_of(preview: PatchesSeen, name: str) -> Sheet:
    """The preview in words and pictures: each patch as it is, and with its labels."""
    config, data = preview.config, preview.data
    volumes = count(len(data.train.cases), "training volume")
    if data.val is not None:
        volumes += f", {count(len(data.val.cases), 'validation volume')}"
    ignored = "" if data.rules.ignore is None else f", label {data.rules.ignore} is not labelled (hatched)"
    about = (
        f"{config.model} · {redact_text(str(config.data_root))}: {volumes} · "
        f"{count(data.rules.classes, 'class', 'classes')}{ignored} · normalize {config.normalize}"
    )
    training = SheetSection(
        f"Training, epoch {preview.epoch}",
        (" · ".join(training_settings(config)), range_text([one.values for one in preview.training])),
        (SheetRow(_pictures(preview.training)),),
    )
    return Sheet(f"What the network gets: {name}", (about,), (training, _validation(preview)))


def _validation(preview: PatchesSeen) -> SheetSection:
    if preview.data.val is None:
        return SheetSection("No validation", (f"fold: {preview.config.fold} leaves no volumes for it.",))
    if preview.validation is None:
        return not_shown("patches")
    notes = ("every voxel once, unchanged", range_text([one.values for one in preview.validation]))
    return SheetSection("Validation", notes, (SheetRow(_pictures(preview.validation)),))


def training_settings(config: Config) -> list[str]:
    """The settings that change a patch, without those that are off."""
    words = [
        f"{' × '.join(map(str, patch_of(config)))} voxels",
        f"{config.foreground_patches:.0%} drawn around foreground",
    ]
    flips = [f"{axis} {chance:g}" for axis, chance in zip(AXES, config.volume_flips, strict=True) if chance]
    words += [f"mirrored {', '.join(flips)}"] if flips else []
    chances = {
        "turned by 90°": config.volume_turns, "rotated": config.volume_rotation, "scaled": config.volume_scaling,
        "deformed": config.volume_elastic, "noise": config.volume_noise, "blur": config.volume_blur,
        "brightness": config.volume_brightness, "contrast": config.volume_contrast, "gamma": config.volume_gamma,
        "lower resolution": config.volume_low_resolution, "cut-out": config.volume_cutout,
    }  # fmt: skip
    return words + [f"{name} {chance:g}" for name, chance in chances.items() if chance]


def _pictures(seen: Sequence[PatchSeen]) -> tuple[Picture, ...]:
    pictures = []
    for one in seen:
        where = f"{shown(one.case)} at {', '.join(map(str, one.start))}"
        when = [] if one.step is None else [f"step {one.step}"]
        shares = f"{one.foreground:.1%} foreground of {one.labelled:.0%} labelled"
        pictures.append(Picture(plain(one.image), (where,), (" · ".join([*when, f"z = {one.cut}"]),)))
        words = textwrap.wrap(" · ".join(one.changes) or "unchanged", CHARACTERS)
        pictures.append(Picture(with_classes(one.image, one.label, one.known), (shares,), tuple(words)))
    return tuple(pictures)


def describe(preview: PatchesSeen, boxes: Sequence[tuple[int, int, int, int]]) -> dict[str, Any]:
    """What is shown, as a plain record; `boxes` are the places of the pictures on the sheet, two for each patch."""
    places = iter(boxes)
    training = [_record(one, next(places), next(places)) for one in preview.training]
    validation = None
    if preview.validation is not None:
        validation = {"patches": [_record(one, next(places), next(places)) for one in preview.validation]}
    return {
        "epoch": preview.epoch,
        "classes": preview.data.rules.classes,
        "training": {"settings": training_settings(preview.config), "patches": training},
        "validation": validation,
    }


def _record(one: PatchSeen, image: tuple[int, ...], label: tuple[int, ...]) -> dict[str, Any]:
    return {
        "case": one.case, "start": list(one.start), "step": one.step, "z": one.cut, "labelled": one.labelled,
        "foreground": one.foreground, "changes": list(one.changes), "box": list(image), "label_box": list(label),
    }  # fmt: skip
