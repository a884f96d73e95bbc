"""What only a plan for volumes has: other batch and patch sizes, what reading takes, and the prediction of a volume."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from stoker.config import Config
from stoker.core.console import format_table
from stoker.core.finding import Finding
from stoker.core.units import duration_text, number_text, size_text
from stoker.tasks.plan_facts import PlanPart, StepCosts
from stoker.tasks.volumes.formats.volume import Shape
from stoker.tasks.volumes.networks import divisor_of, fitting_patches
from stoker.tasks.volumes.planning import VolumeFacts, patch_of
from stoker.tasks.volumes.predict.windows import SlidingWindow, prediction_size

BATCHES = (1, 2, 4)
"""Shown beside the config's own."""
SLOW_CONV3D = "2.9"
"""Convolutions of volumes in mixed precision are up to four times slower in this version (pytorch issue 166122)."""


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
    smaller, _ = fitting_patches(config.model, _moved(patch, -1))
    _, larger = fitting_patches(config.model, _moved(patch, 1))
    wanted = [(patch, batch) for batch in sorted({*BATCHES, config.batch_size})]
    if smaller is not None:
        wanted.insert(0, (smaller, config.batch_size))
    for size, batch in (*wanted, (larger, config.batch_size)):
        cost = costs.step(config.model_copy(update={"patch_size": size, "batch_size": batch}))
        if cost is not None:
            yield PatchRow(size, batch, *cost)


def _moved(patch: Shape, by: int) -> Shape:
    return max(1, patch[0] + by), max(1, patch[1] + by), max(1, patch[2] + by)


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
    """What costs time without a reason."""
    patch = patch_of(config)
    divisor = divisor_of(config.model, patch)
    padded = [-(-edge // step) * step for edge, step in zip(patch, divisor, strict=True)]
    if padded != list(patch):
        smaller, larger = fitting_patches(config.model, patch)
        sizes = " or ".join(f"patch_size={list(size)}" for size in (smaller, larger) if size is not None)
        yield Finding(
            f"patches of {_by(patch)} are padded to {_by(padded)}: a step computes "
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
                _by(row.patch), str(row.batch), size_text(row.live_bytes), size_text(row.vram_bytes),
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
    yield f"predicting a volume of {_by(found.volume)}: {', '.join(parts)}; each test-time flip takes as long again"


def _by(sizes: Shape | list[int]) -> str:
    return " x ".join(map(str, sizes))
