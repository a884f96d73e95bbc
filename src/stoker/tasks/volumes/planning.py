"""What a plan needs to know about a run over volumes, its data and its step, and what only such a plan has: other batch
and patch sizes, what reading takes, and the prediction of a volume."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch

from stoker.config import Config
from stoker.core.console import Advance, format_table
from stoker.core.errors import StokerError
from stoker.core.finding import Finding
from stoker.core.units import count, duration_text, number_text, size_text
from stoker.loader.rng import sample_keys
from stoker.tasks import building
from stoker.tasks.plan_facts import DataFacts, PlanPart, StepCosts
from stoker.tasks.volumes.augment import memory_format_of, transform_range
from stoker.tasks.volumes.data import label_rules, list_cases, patch_of, reading_options, survey_cases
from stoker.tasks.volumes.formats.opening import OpenVolumes
from stoker.tasks.volumes.formats.volume import Shape, as_shape, sizes_text
from stoker.tasks.volumes.losses import build_volume_loss
from stoker.tasks.volumes.networks import build_volume_model, divisor_of, fitting_patches
from stoker.tasks.volumes.patches.labels import LabelRules
from stoker.tasks.volumes.patches.patch_collate import RowLayout
from stoker.tasks.volumes.patches.patches import draw_transforms
from stoker.tasks.volumes.predict.windows import SlidingWindow, prediction_size
from stoker.train.compute import compute_dtype
from stoker.train.step import TraceableStep, plain_batch

ASSUMED_CLASSES = 2
ASSUMED_VOLUME: Shape = (320, 320, 320)
"""Size of a volume of the Vesuvius surface competition."""
DRAWN = 500
"""Transforms over which the bytes that a patch reads are averaged."""
BATCHES = (1, 2, 4)
"""Shown beside the config's own."""
SLOW_CONV3D = "2.9"
"""Convolutions of volumes in mixed precision are up to four times slower in this version (pytorch issue 166122)."""


@dataclass(frozen=True, kw_only=True)
class VolumeFacts(DataFacts):
    """Facts about volumes, and patches of them."""

    channels: int
    rules: LabelRules
    cases: int | None
    largest: Shape
    """The volume that a prediction is planned for."""
    decoded_bytes: int | None = None
    """Bytes of all volumes that have to be decoded, with their labels; None if nothing was opened."""


def volume_facts(config: Config, _samples: int | None = None, progress: Advance | None = None) -> VolumeFacts:
    """Opens the config's volumes if they can be reached from here; otherwise says what was assumed. Patches have no
    number: they are drawn at random."""
    try:
        if config.data_root is None:
            return _assumed(config, "no data_root")
        listed = list_cases(config, lambda _line: None)
        volumes = OpenVolumes(reading_options(config))
        surveyed = survey_cases(config, listed, volumes, lambda _line: None, progress)
        rules = label_rules(config, listed)
    except StokerError as error:
        return _assumed(config, error.seen.splitlines()[0])
    channels = len(surveyed.cases[0].images)
    dtype = surveyed.image_dtype(surveyed.cases)
    voxels = {name: shape[0] * shape[1] * shape[2] for name, shape in surveyed.shapes.items()}
    # Volumes in mapped files are read as they are: nothing is decoded, so there is nothing to keep.
    decoded = sum(
        voxels[case.id]
        for case in surveyed.cases
        if not all(ref.packed is not None and ref.packed.kind != "zarr" for ref in case.images)
    )
    return VolumeFacts(
        **_sizes(config, channels, dtype, rules), channels=channels, rules=rules, cases=len(surveyed.cases),
        largest=surveyed.shapes[max(voxels, key=lambda name: voxels[name])],
        decoded_bytes=decoded * (channels * dtype.itemsize + rules.dtype.itemsize),
    )  # fmt: skip


def _assumed(config: Config, reason: str) -> VolumeFacts:
    rules = LabelRules(config.num_classes or ASSUMED_CLASSES, config.ignore_label)
    said = f"data: 1 channel of uint8 voxels, {count(rules.classes, 'class', 'classes')} ({reason})"
    return VolumeFacts(
        **_sizes(config, 1, np.dtype(np.uint8), rules), channels=1, rules=rules, cases=None, largest=ASSUMED_VOLUME,
        assumptions=(said, f"prediction: of a volume of {sizes_text(ASSUMED_VOLUME)} voxels, as in Vesuvius"),
    )  # fmt: skip


def _sizes(config: Config, channels: int, dtype: np.dtype[Any], rules: LabelRules) -> dict[str, Any]:
    """What a batch reserves for a patch with its label, and what is read for it on average: a rotated or enlarged one
    needs its surroundings."""
    patch, bounds = patch_of(config), transform_range(config)
    val = RowLayout(channels, dtype.name, rules.dtype.name, patch[0] * patch[1] * patch[2])
    keys = sample_keys(0, 0, np.arange(DRAWN), np.zeros(DRAWN, np.int64))
    voxels = [float(np.prod(one.region(patch, (0, 0, 0)).shape)) for one in draw_transforms(keys, bounds, patch)]
    return {
        "row_bytes": replace(val, most_voxels=bounds.most_voxels(patch)).row_bytes, "val_row_bytes": val.row_bytes,
        "sample_bytes": float(np.mean(voxels)) * (channels * dtype.itemsize + rules.dtype.itemsize),
    }  # fmt: skip


def traceable_step(config: Config, facts: VolumeFacts | None = None) -> TraceableStep:
    """The step that `segment.build_run` would train with, for a plan to trace; does not open the data. Without facts,
    for assumed ones: another channel hardly changes what a network keeps.

    The augmentation is left out: it works on bytes, and is done before the model's activations begin.
    """
    facts = facts or _assumed(config, "not opened")
    patch, channels, classes = patch_of(config), facts.channels, facts.rules.classes
    checkpointing = config.model_copy(update={"gradient_checkpointing": True})
    # Which label is ignored does not change what is computed.
    loss = build_volume_loss(config.volume_loss, classes, ignore=classes)
    # A plan is for a GPU, wherever it is made.
    dtype = compute_dtype(config.precision)
    return building.traceable_step(
        # While a step is traced, the default device is meta: nothing is allocated.
        config, partial(build_volume_model, config, channels, classes), loss,
        plain_batch((channels, *patch), target=patch, dtype=dtype, memory_format=memory_format_of(config)),
        checkpointed=None if config.gradient_checkpointing else traceable_step(checkpointing, facts),
    )  # fmt: skip


@dataclass(frozen=True)
class PatchRow:
    """A step with another batch or patch size."""

    patch: Shape
    batch: int
    live_bytes: int
    """Live tensors at the peak."""
    vram_bytes: int
    """What the allocator reserves for them, and the rest of what nvidia-smi would show."""
    fits: bool | None
    patches_per_second: float | None


@dataclass(frozen=True)
class PredictionBudget:
    """What predicting one volume takes."""

    volume: Shape
    windows: int
    seconds: float | None
    vram_bytes: int | None
    disk_bytes: int


@dataclass(frozen=True)
class VolumePlan:
    """What only a run over volumes has."""

    rows: tuple[PatchRow, ...]
    """What other batch and patch sizes would take; the config's own is among them."""
    patch_bytes: int
    """Image and label of a patch as they are stored, uncompressed."""
    read_bytes: float
    """Mean of what is read for a patch, with the surroundings that rotated and scaled ones need."""
    read_bytes_per_second: float | None
    """What the accelerators of all nodes can take."""
    worker_bytes: int
    """Memory of one worker and the batches that it has in flight."""
    cache_bytes: int
    """Decoded chunks of compressed volumes, of one node."""
    prediction: PredictionBudget


def volume_part(config: Config, facts: VolumeFacts, costs: StepCosts) -> PlanPart:
    """The part of a plan that is about volumes; traces a few more steps, which takes seconds each."""
    assert facts.sample_bytes is not None
    pace = costs.samples_per_second
    found = VolumePlan(
        rows=tuple(_rows(config, costs)),
        patch_bytes=facts.val_row_bytes,
        read_bytes=facts.sample_bytes,
        read_bytes_per_second=None if pace is None else pace * facts.sample_bytes,
        worker_bytes=costs.worker_bytes,
        cache_bytes=config.volume_cache,
        prediction=_prediction(config, facts, costs),
    )
    return PlanPart(found, tuple(_lines(found)), tuple(volume_findings(config, torch.__version__)))


def _rows(config: Config, costs: StepCosts) -> Iterator[PatchRow]:
    """The config's patch with other batches, and the nearest smaller and larger patch that fit the network."""
    patch = patch_of(config)
    smaller, _ = fitting_patches(config.model, as_shape(max(1, edge - 1) for edge in patch))
    _, larger = fitting_patches(config.model, as_shape(edge + 1 for edge in patch))
    wanted = [(patch, batch) for batch in sorted({*BATCHES, config.batch_size})]
    if smaller is not None:
        wanted.insert(0, (smaller, config.batch_size))
    for size, batch in (*wanted, (larger, config.batch_size)):
        cost = costs.step(config.model_copy(update={"patch_size": size, "batch_size": batch}))
        if cost is not None:
            yield PatchRow(size, batch, *cost)


def _prediction(config: Config, facts: VolumeFacts, costs: StepCosts) -> PredictionBudget:
    """What predicting the largest volume takes."""
    sliding = SlidingWindow(config.predict_overlap, config.predict_flips)
    batch = config.val_batch_size or config.batch_size
    size = prediction_size(facts.largest, patch_of(config), sliding, classes=facts.rules.classes)
    cost = costs.forward(batch)
    seconds = None if cost is None or cost.seconds is None else cost.seconds * size.passes / batch
    vram = None if cost is None or cost.vram_bytes is None else cost.vram_bytes + size.sums_bytes
    return PredictionBudget(facts.largest, size.windows, seconds, vram, size.disk_bytes)


def volume_findings(config: Config, torch_version: str) -> Iterator[Finding]:
    """What makes a step slower than it has to be."""
    patch = patch_of(config)
    divisor = divisor_of(config.model, patch)
    padded = [-(-edge // step) * step for edge, step in zip(patch, divisor, strict=True)]
    if padded != list(patch):
        smaller, larger = fitting_patches(config.model, patch)
        sizes = " or ".join(f"patch_size={list(size)}" for size in (smaller, larger) if size is not None)
        yield Finding(
            f"patches of {sizes_text(patch)} are padded to {sizes_text(padded)}: a step computes "
            f"{math.prod(padded) / math.prod(patch):.2f} times the voxels that it learns from",
            sizes,
            name="patch-is-padded",
        )
    if torch_version.startswith(f"{SLOW_CONV3D}.") and config.precision != "32":
        yield Finding(
            f"torch {torch_version} runs 3D convolutions in mixed precision up to four times slower than other "
            "versions (pytorch issue 166122)",
            "pip install 'torch!=2.9.*'",
            name="slow-conv3d",
        )


def _lines(plan: VolumePlan) -> Iterator[str]:
    if plan.rows:
        table = [
            [
                sizes_text(row.patch), str(row.batch), size_text(row.live_bytes), size_text(row.vram_bytes),
                "?" if row.patches_per_second is None else number_text(row.patches_per_second),
                "TOO MUCH" if row.fits is False else "",
            ]
            for row in plan.rows
        ]  # fmt: skip
        heads = ["patch", "batch", "live tensors", "VRAM", "patches/s", ""]
        yield from ("other batch and patch sizes:", textwrap.indent(format_table(table, heads).rstrip(), "  "), "")
    needed = plan.read_bytes_per_second
    yield (
        f"reading: a patch with its label is {size_text(plan.patch_bytes)}, "
        f"{plan.read_bytes / plan.patch_bytes:.1f} times that is read for it on average"
        + ("" if needed is None else f"; the accelerators can take {size_text(round(needed))}/s")
    )
    yield (
        f"RAM: {size_text(plan.worker_bytes)} for each worker and its batches; if the volumes are compressed, up to "
        f"{size_text(plan.cache_bytes)} of decoded chunks on a node (volume_cache)"
    )
    found = plan.prediction
    parts = [f"{found.windows:,} windows"]
    if found.seconds is not None:
        parts.append(duration_text(found.seconds))
    if found.vram_bytes is not None:
        parts.append(f"{size_text(found.vram_bytes)} of VRAM")
    parts.append(f"up to {size_text(found.disk_bytes)} of disk")
    takes = ", ".join(parts)
    yield f"predicting a volume of {sizes_text(found.volume)}: {takes}; each test-time flip takes as long again"
