"""Segmentation of volumes: from a config to a run that the loop can train, and from a checkpoint to its network."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from stoker.config import Config, config_values
from stoker.core.console import Say
from stoker.core.errors import UserError
from stoker.core.units import count
from stoker.profile.host import HostConfig
from stoker.tasks.building import (
    RunContext,
    assemble_run,
    count_parameters,
    describe_schedule,
    input_dtype,
    input_pipeline,
    loader_options,
    ready_device,
    ready_model,
    train_step,
)
from stoker.tasks.device_copies import Copy
from stoker.tasks.volumes.augment import VolumePrepare, build_volume_augment, build_volume_eval
from stoker.tasks.volumes.data import PatchLoader, VolumeData, training_plan, validation_plan
from stoker.tasks.volumes.losses import build_volume_loss
from stoker.tasks.volumes.networks import build_volume_model
from stoker.tasks.volumes.patches.labels import LabelRules
from stoker.tasks.volumes.patches.patch_collate import PatchBatch, PatchPlan
from stoker.tasks.volumes.scores.counts import VolumeCounts
from stoker.train.checkpoint.restore import open_state
from stoker.train.evaluate import Remark
from stoker.train.loop import Run, RunRecord
from stoker.train.step import Prepared


def build_run(config: HostConfig, data: VolumeData, context: RunContext) -> Run:
    """The run that the config describes, at its beginning."""
    ranks, device, say, staging = context.ranks, context.device, context.say, context.staging
    ready_device(config, device)
    loss = build_volume_loss(config.volume_loss, data.rules.classes, data.rules.outside)
    model = build_network(config, data, context)
    step = train_step(config, model, loss, context)
    reading = data.reading if staging is None else replace(data.reading, copy=staging.place)
    follow, make_way = (None, None) if staging is None else (staging.follow, staging.make_way)

    train, val = training_plan(config, data, ranks), validation_plan(config, data, ranks)

    def load(plan: PatchPlan, held: int) -> PatchLoader:
        options = loader_options(config, config.num_workers, held, context.quarantine_file)
        return PatchLoader(plan, reading, options, say, follow if plan is train else make_way)

    dtype = input_dtype(config, device)
    augment = build_volume_augment(config, *data.statistics(data.train), dtype)
    evaluated = augment if data.val is None else build_volume_eval(config, *data.statistics(data.val), dtype)
    pipeline = input_pipeline(
        config, context, load, (lambda _epoch: train, val), partial(prepare_batch, augment),
        partial(prepare_val_batch, evaluated, data.rules.outside), data.names,
    )  # fmt: skip
    record = RunRecord(
        config_values(config), tuple(f"label {number}" for number in range(data.rules.classes)),
        data={"classes": data.rules.classes, "ignore": data.rules.ignore, "channels": data.channels},
    )  # fmt: skip
    return assemble_run(
        config, context, model=model, step=step, pipeline=pipeline, val_loss=loss,
        scoring=VolumeScoring(data.val, data.rules, device, config.surface_tolerance), record=record,
    )  # fmt: skip


def build_network(config: Config, data: VolumeData, context: RunContext) -> nn.Module:
    """The network that the config describes, on its device."""
    model = ready_model(config, build_volume_model(config, data.channels, data.rules.classes), context)
    for weight in model.parameters():
        if weight.ndim == 5 and weight.shape[2:].numel() == 1:
            # The strides of axes of length one mean nothing, but DistributedDataParallel compares them with those of
            # the gradient, and complains at the first step of every process.
            weight.data = weight.data.reshape(-1).view(weight.shape)
    return model


def describe_run(config: Config, run: Run, data: VolumeData) -> str:
    """What is about to be trained, in a few lines to check before leaving it to run."""
    patch = " x ".join(map(str, data.train.patches.patch))
    if data.val is None:
        val = "no validation"
    else:
        val = f"{count(len(data.val.cases), 'validation volume')} ({count(data.val.steps.samples, 'patch', 'patches')})"
    part = "all of it" if config.fold == "all" else f"fold {config.fold} of {config.folds} by {config.split_by}"
    ignored = "" if data.rules.ignore is None else f", label {data.rules.ignore} is ignored"
    lines = [
        f"{config.model}: {count_parameters(run.model):,} parameters, {count(data.rules.classes, 'class', 'classes')}"
        f"{ignored}, {config.volume_loss}",
        f"{count(len(data.train.cases), 'training volume')}, {val}, {part}",
        f"patches of {patch}, {count(data.channels, 'channel')}, {config.foreground_patches:.0%} around foreground",
        *describe_schedule(config, run.ranks, run.device, run.schedule.horizon),
    ]
    if config.steps_per_epoch is None and not config.fast_dev_run:
        lines.append("steps_per_epoch is not set: an epoch has as many updates as nnU-Net's")
    return "\n".join(lines)


def prepare_batch(augment: VolumePrepare, copy: Copy, batch: PatchBatch, *_of_no_interest: int) -> Prepared:
    """A training batch on the device, augmented; everything random follows from its samples' keys, and nothing from the
    epoch, the step, or the batch's number within it."""
    inputs, labels = augment.prepare(batch, copy)
    return Prepared(inputs, labels, labels, mixed=False)


def prepare_val_batch(prepare: VolumePrepare, outside: int, copy: Copy, batch: PatchBatch) -> Prepared:
    """A validation batch on the device; nothing of a patch that could not be read counts."""
    inputs, labels = prepare.prepare(batch, copy)
    for slot in np.flatnonzero(~batch.valid).tolist():
        labels[slot] = outside
    return Prepared(inputs, labels, labels, mixed=False)


class VolumeScoring:
    """Loss over the patches with a labelled voxel; Dice, IoU and surface Dice by volume."""

    def __init__(self, val: PatchPlan | None, rules: LabelRules, device: torch.device, tolerance: float) -> None:
        self._counts = VolumeCounts(
            0 if val is None else len(val.cases), rules.classes, device, ignore=rules.outside, tolerance=tolerance
        )
        self._outside = rules.outside
        # The sum of the losses, and how many patches it is over.
        self._loss = torch.zeros(2, dtype=self._counts.tensor.dtype, device=device)
        self._warned = False

    def reset(self) -> None:
        self._counts.tensor.zero_()
        self._loss.zero_()

    def add(self, logits: Tensor, labels: Tensor, loss: Tensor, batch: PatchBatch, piece: slice) -> None:
        self._counts.add(logits, labels, batch.cases[piece], batch.valid[piece])
        # A patch without a labelled voxel has the loss 0, which says nothing about the network.
        labelled = (labels != self._outside).flatten(1).any(1).sum()
        self._loss += torch.stack((loss.detach() * len(labels), labelled)).to(self._loss.dtype)

    def result(self) -> dict[str, float]:
        if dist.is_available() and dist.is_initialized():
            dist.all_reduce(self._counts.tensor)
            dist.all_reduce(self._loss)
        total, patches = self._loss.tolist()
        return ({"loss": total / patches} if patches else {}) | self._counts.result()

    def look(self, metrics: Mapping[str, Any]) -> Remark | None:
        """Says once that no validation patch could be scored: an epoch without metrics must not go unnoticed."""
        if "val/loss" in metrics or self._warned:
            return None
        self._warned = True
        why = "no validation patch could be read, or none has a labelled voxel"
        hint = "quarantine.jsonl names volumes that could not be read; fold: N validates on others"
        text = f"warning: no validation metrics: {why}\nhint: {hint}"
        return Remark("nothing_validated", {"why": why, "hint": hint}, text)


@dataclass(frozen=True)
class TrainedVolumeModel:
    """A trained network, ready to segment volumes, and what is known about it."""

    path: Path
    model: nn.Module
    """On the CPU, in evaluation mode, float32."""
    config: HostConfig
    """As it was trained, with the overrides of this command, resolved for this machine. `normalize` says how voxels
    become inputs: stoker.tasks.volumes.cases.survey has what it needs."""
    rules: LabelRules
    channels: int
    """Images of a case that the network takes together."""
    averaged: bool
    """Whether its weights are the moving average."""
    epoch: int
    step: int

    @property
    def classes(self) -> int:
        return self.rules.classes


def open_trained(
    path: Path, say: Say = lambda _text: None, overrides: Sequence[str] = (), *, raw: bool = False
) -> TrainedVolumeModel:
    """The network of a checkpoint, or of a run folder's best one: its moving average if it has one, unless `raw`."""
    trained = open_state(path, overrides, raw=raw, say=say)
    state, config, facts = trained.state, trained.config, trained.state.get("data") or {}
    if config.task != "segment3d" or config.patch_size is None or "channels" not in facts:
        raise UserError(
            "checkpoint-of-images",
            f"{trained.path} was trained with task: {config.task}",
            why="it classifies images, and has no classes for voxels",
            hint="a checkpoint of a run with task: segment3d",
        )
    rules = LabelRules(int(facts["classes"]), facts["ignore"])
    channels = int(facts["channels"])
    # Without what only training needs; but the heads of deep supervision have weights too.
    heads = bool(state["config"]["deep_supervision"])
    plain = {"deep_supervision": heads, "gradient_checkpointing": False, "dropout": 0.0}
    model = build_volume_model(config.model_copy(update=plain), channels, rules.classes)
    return TrainedVolumeModel(
        path=trained.path, model=trained.load_into(model), config=config, rules=rules, channels=channels,
        averaged=trained.averaged, epoch=int(state["progress"]["epoch"]),
        step=int(state["progress"]["step"]),
    )  # fmt: skip
