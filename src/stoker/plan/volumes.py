"""What only a plan for volumes has: other batch and patch sizes, what reading takes, and the prediction of a volume."""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from stoker.core.finding import Finding
from stoker.plan.allocator import replay
from stoker.plan.budget import PlannedRun, StepNeeds, host_shape, step_s_of
from stoker.plan.records import PatchRow, Plan, PredictionBudget, VolumePlan
from stoker.plan.roofline import step_seconds
from stoker.plan.tracing import CannotTrace, Trace, trace_forward, trace_step
from stoker.plan.vram import outside_bytes, parts_at_peak, usage_under
from stoker.profile.datasheets import Datasheet
from stoker.tasks.volumes.formats.volume import Shape
from stoker.tasks.volumes.networks import divisor_of, fitting_patches
from stoker.tasks.volumes.planning import VolumeFacts, mean_read_bytes, patch_of, row_bytes, traceable_step
from stoker.tasks.volumes.predict.windows import SlidingWindow, prediction_size

BATCHES = (1, 2, 4)
"""Shown beside the config's own."""
SLOW_CONV3D = "2.9"
"""Convolutions of volumes in mixed precision are up to four times slower in this version (pytorch issue 166122)."""


def with_volumes(plan: Plan, job: PlannedRun, needs: StepNeeds) -> Plan:
    """The plan with its part about volumes; traces a few more steps, which takes seconds each."""
    facts, config, hardware = job.volumes, job.config, job.hardware
    assert facts is not None
    pace = plan.time.rates.get("accelerator")
    read = mean_read_bytes(config, facts)
    shape = host_shape(job, needs)
    memory = job.measured.loader_memory
    each = memory.worker if shape.loader.engine == "process" else memory.thread
    volumes = VolumePlan(
        rows=() if hardware.on_cpu else patch_rows(job, facts, needs.trace),
        patch_bytes=row_bytes(config, facts)[1],
        read_bytes=read,
        read_bytes_per_second=None if pace is None else pace.images_per_second * read,
        worker_bytes=each + job.prefetch * shape.loader.batch_bytes,
        cache_bytes=config.volume_cache,
        prediction=prediction_budget(job, facts),
    )
    return replace(plan, volumes=volumes, findings=(*plan.findings, *volume_findings(job, torch.__version__)))


def patch_rows(job: PlannedRun, facts: VolumeFacts, own: Trace | None) -> tuple[PatchRow, ...]:
    """The config's patch with other batches, and the nearest smaller and larger patch that fit the network.

    `own` is the trace of the config's step.
    """
    config, patch = job.config, patch_of(job.config)
    smaller, _ = fitting_patches(config.model, _moved(patch, -1))
    _, larger = fitting_patches(config.model, _moved(patch, 1))
    wanted = [(patch, batch) for batch in sorted({*BATCHES, config.batch_size})]
    if smaller is not None:
        wanted.insert(0, (smaller, config.batch_size))
    wanted.append((larger, config.batch_size))
    known = {(patch, config.batch_size): own}
    rows = [_row(job, facts, size, batch, known.get((size, batch))) for size, batch in wanted]
    return tuple(row for row in rows if row is not None)


def _moved(patch: Shape, by: int) -> Shape:
    return max(1, patch[0] + by), max(1, patch[1] + by), max(1, patch[2] + by)


def _row(job: PlannedRun, facts: VolumeFacts, patch: Shape, batch: int, trace: Trace | None) -> PatchRow | None:
    config = job.config.model_copy(update={"patch_size": patch, "batch_size": batch})
    try:
        trace = trace or trace_step(traceable_step(config, facts.channels, facts.rules.classes))
    except CannotTrace:
        return None
    limit = job.hardware.vram_bytes
    outside = outside_bytes(trace, compiled=config.compile_model, gpus=job.hardware.world)
    usage = usage_under(trace, limit, outside)
    peak = sum(parts_at_peak(trace, usage, outside).values())
    step_s = step_s_of(replace(job, config=config), trace)
    return PatchRow(
        patch, batch, usage.allocated_peak, peak, None if limit is None else peak <= limit,
        None if step_s is None else batch * config.gradient_accumulation * job.hardware.world / step_s,
    )  # fmt: skip


def prediction_budget(job: PlannedRun, facts: VolumeFacts) -> PredictionBudget:
    """What predicting the largest volume takes."""
    config, hardware = job.config, job.hardware
    sliding = SlidingWindow(config.predict_overlap, config.predict_flips)
    batch = config.val_batch_size or config.batch_size
    size = prediction_size(facts.largest, patch_of(config), sliding, classes=facts.rules.classes)
    try:
        trace = trace_forward(traceable_step(config, facts.channels, facts.rules.classes), batch)
    except CannotTrace:
        return PredictionBudget(facts.largest, size.windows, None, None, size.disk_bytes)
    vram = None
    if not hardware.on_cpu:
        outside = outside_bytes(trace, compiled=False, gpus=1)
        vram = replay(trace.events, trace.sizes).reserved_peak + sum(outside.values()) + size.sums_bytes
    seconds = None if hardware.sheet is None else _forward_s(job, trace, hardware.sheet) * size.passes / batch
    return PredictionBudget(facts.largest, size.windows, seconds, vram, size.disk_bytes)


def _forward_s(job: PlannedRun, trace: Trace, sheet: Datasheet) -> float:
    config = job.config
    tf32 = config.matmul_precision != "highest"
    return step_seconds(trace.ops, sheet, channels_last=config.channels_last, tf32=tf32).total_s


def volume_findings(job: PlannedRun, torch_version: str) -> list[Finding]:
    """What costs time without a reason."""
    config, patch, found = job.config, patch_of(job.config), []
    divisor = divisor_of(config.model, patch)
    padded = [-(-edge // step) * step for edge, step in zip(patch, divisor, strict=True)]
    if padded != list(patch):
        smaller, larger = fitting_patches(config.model, patch)
        sizes = " or ".join(f"patch_size={list(size)}" for size in (smaller, larger) if size is not None)
        found.append(
            Finding(
                f"patches of {_by(patch)} are padded to {_by(padded)}: a step computes "
                f"{math.prod(padded) / math.prod(patch):.2f} times the voxels that it learns from",
                sizes,
                name="patch-is-padded",
            )
        )
    if torch_version.startswith(f"{SLOW_CONV3D}.") and config.precision != "32":
        found.append(
            Finding(
                f"torch {torch_version} runs 3D convolutions in mixed precision up to four times slower than other "
                "versions (pytorch issue 166122)",
                "pip install 'torch!=2.9.*'",
                name="slow-conv3d",
            )
        )
    return found


def _by(sizes: Shape | list[int]) -> str:
    return " x ".join(map(str, sizes))
