"""Image classification: from a config to a run that the loop can train, and to a step that a plan can trace."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from stoker.config import Config, config_values
from stoker.core.console import Say
from stoker.core.errors import UserError
from stoker.profile.host import HostConfig
from stoker.tasks import building
from stoker.tasks.building import (
    ClassScoring,
    RunContext,
    assemble_run,
    count_parameters,
    describe_schedule,
    input_dtype,
    input_pipeline,
    ready_device,
    ready_model,
    train_step,
)
from stoker.tasks.device_copies import Copy
from stoker.tasks.images.augment.pipeline import (
    IMAGENET_MEAN,
    IMAGENET_STD,
    Colour,
    EvalPrepare,
    TrainAugment,
    build_train_augment,
    memory_format_of,
)
from stoker.tasks.images.data import TrainingData, open_loader, training_plan, validation_plan
from stoker.tasks.images.decode.decoders import available_decoders
from stoker.tasks.images.image_loader import ImageBatch, ImageLoader, ImagePlan
from stoker.tasks.images.layouts.imagenet import CLASSES
from stoker.tasks.images.models import build_loss, build_model, cross_entropy, facts_about
from stoker.tasks.images.permuted_labels import MOST_CLASSES, Confusion, Figures, can_judge, judge_labels
from stoker.train.checkpoint.folder import FoundCheckpoint
from stoker.train.compute import compute_dtype
from stoker.train.evaluate import Remark
from stoker.train.loop import InputPipeline, Run, RunRecord
from stoker.train.ranks import Ranks
from stoker.train.schedule import default_resize_epochs, image_size
from stoker.train.step import Prepared, TraceableStep


def build_run(config: HostConfig, data: TrainingData, context: RunContext) -> Run:
    device = context.device
    ready_device(config, device)
    num_classes = config.num_classes or len(data.train.classes)
    model = build_network(config, num_classes, context)
    step = train_step(config, model, build_loss(config), context)
    colours = colours_of(model)
    augment = train_augment(config, num_classes, colours, device)
    pipeline = open_input(
        config, data, context, partial(prepare_batch, augment, context.ranks.rank * config.gradient_accumulation),
        partial(prepare_val_batch, eval_prepare(config, colours, device)),
    )  # fmt: skip
    outputs = None if pipeline.val_loader is None else num_classes
    return assemble_run(
        config, context, model=model, step=step, pipeline=pipeline, val_loss=cross_entropy,
        scoring=ImageScoring(device, data.train.classes, outputs, config.loss),
        record=RunRecord(config_values(config), data.train.classes, decoder=data.decoding.decoder),
    )  # fmt: skip


def open_input(
    config: HostConfig,
    data: TrainingData,
    context: RunContext,
    prepare: Callable[..., Prepared],
    prepare_val: Callable[..., Prepared],
) -> InputPipeline:
    """The loaders of a run; progressive resizing opens a new one when the image size changes."""
    staging = context.staging
    say = cache(context.say)  # progressive resizing opens many loaders: print once what applies to all
    val = validation_of(config, data, context.ranks)

    @cache
    def plan_at(size: int) -> ImagePlan:
        return checked_training_plan(config.model_copy(update={"img_size": size}), data, context.ranks)

    def plan_of(epoch: int) -> ImagePlan:
        return plan_at(image_size_of(config, epoch))

    def load(plan: ImagePlan, held: int) -> ImageLoader:
        follow = None if staging is None else staging.make_way if plan is val else staging.follow
        return open_loader(
            config, plan, workers=config.num_workers, held=held, quarantine_file=context.quarantine_file,
            copy=None if staging is None else staging.place, follow=follow, say=say,
        )  # fmt: skip

    return input_pipeline(config, context, load, (plan_of, val), prepare, prepare_val, data.names)


def validation_of(config: Config, data: TrainingData, ranks: Ranks) -> ImagePlan | None:
    """What the validation batches of this rank hold; None without validation."""
    if data.val is None or config.limit_val_batches == 0:
        return None
    return validation_plan(config, data.val, data.decoding, ranks)


class ImageScoring(ClassScoring):
    """Loss and accuracies; asks once whether the labels belong to other classes."""

    def __init__(self, device: torch.device, classes: Sequence[str], outputs: int | None, loss: str) -> None:
        """Confusions are counted between `outputs` classes; without it, or with too many, only the metrics are used."""
        super().__init__(device)
        self._classes, self._loss = classes, loss
        self._confusion = None if outputs is None or outputs > MOST_CLASSES else Confusion(outputs, device)
        self._asked = False

    def reset(self) -> None:
        super().reset()
        if self._confusion is not None:
            self._confusion.reset()

    def add(self, logits: Tensor, labels: Tensor, loss: Tensor, batch: Any, piece: slice) -> None:
        super().add(logits, labels, loss, batch, piece)
        if self._confusion is not None:
            self._confusion.add(logits, labels)

    def look(self, metrics: Mapping[str, Any]) -> Remark | None:
        loss = metrics.get("train/loss") if self._loss == "cross_entropy" else None
        figures = Figures(metrics.get("val/acc1"), metrics.get("train/acc1"), loss)
        if self._asked or not can_judge(figures, len(self._classes)):
            return None
        counts = None if self._confusion is None else self._confusion.total()
        alarm = judge_labels(figures, counts, self._classes)
        self._asked = alarm is not None
        return None if alarm is None else Remark("labels?", alarm.details(), alarm.text())


def describe_run(config: Config, run: Run, data: TrainingData) -> str:
    val = "no validation" if data.val is None else f"{len(data.val):,} validation images"
    return "\n".join(
        [
            f"{config.model}: {count_parameters(run.model):,} parameters, {len(data.train.classes)} classes",
            f"{len(data.train):,} training images, {val}, decoded by {data.decoding.decoder}",
            *describe_schedule(config, run.ranks, run.device, run.schedule.horizon),
        ]
    )


def with_decoder_of(found: FoundCheckpoint, config: HostConfig, data: TrainingData, say: Say) -> TrainingData:
    """The data with the decoder that the run began with: `auto` chooses it once, not again on another machine."""
    began, here = found.state.get("decoder"), data.decoding.decoder
    if config.decoder != "auto" or began in (None, here):
        return data
    if began in available_decoders():
        return replace(data, decoding=replace(data.decoding, decoder=began))
    if config.decode_mode == "draft":
        raise UserError(
            "decoder-missing",
            f"the images of this run were decoded by {began}, which is not installed here, or does not work",
            why="with decode_mode: draft, other decoders give other pixels",
            hint=f"install it, or decoder={here} to continue with other pixels",
        )
    say(f"note: {began}, which decoded the images of this run, is not available here; {here} gives the same pixels")
    return data


def image_size_of(config: Config, epoch: int) -> int:
    """The size of an epoch's training images: progressive resizing changes it."""
    until = config.resize_epochs or default_resize_epochs(config.epochs)
    return image_size(epoch, config.start_img_size, config.img_size, until)


def checked_training_plan(config: Config, data: TrainingData, ranks: Ranks) -> ImagePlan:
    """What the training batches of this rank hold; raises UserError without a single update in an epoch, and for epochs
    that are longer than the data."""
    plan = training_plan(config, data.train, data.decoding, ranks)
    samples, total = len(data.train), plan.steps.total_batch * config.gradient_accumulation
    if samples < total:
        raise UserError(
            "batch-larger-than-data",
            f"{samples} training images are fewer than one batch of {total}",
            why="the last, partial batch of an epoch is dropped, so every epoch would be empty",
            hint=f"batch_size={max(1, samples // max(1, total // config.batch_size))} or less",
        )
    if config.steps_per_epoch is not None and config.steps_per_epoch > samples // total:
        raise UserError(
            "epoch-longer-than-data",
            f"steps_per_epoch is {config.steps_per_epoch:,}, but {samples:,} training images are {samples // total:,} "
            f"updates of {total}",
            why="an epoch is at most one pass over the images, so every epoch would be shorter than the config says",
            hint=f"steps_per_epoch={samples // total}, or leave it out and set epochs",
        )
    return plan


def build_network(config: Config, num_classes: int, context: RunContext) -> nn.Module:
    """The network that the config describes, on its device."""
    model = build_model(
        config.model, num_classes, img_size=config.img_size,
        other_sizes=(config.val_img_size, config.start_img_size), drop_path=config.drop_path, dropout=config.dropout,
        gradient_checkpointing=config.gradient_checkpointing, channels_last=config.channels_last, seed=config.seed,
    )  # fmt: skip
    return ready_model(config, model, context)


def colours_of(model: nn.Module) -> tuple[Colour, Colour]:
    """Mean and deviation of the colours that the network's published weights were trained with, else ImageNet's."""
    return _colours(getattr(model, "pretrained_cfg", None) or {})


def colours_of_name(name: str) -> tuple[Colour, Colour]:
    """The same for the network of a config, which is not built."""
    return _colours(facts_about(name))


def _colours(known: Mapping[str, Any]) -> tuple[Colour, Colour]:
    mean, std = known.get("mean"), known.get("std")
    if mean is None or std is None or len(mean) != 3 or len(std) != 3:
        return IMAGENET_MEAN, IMAGENET_STD
    return tuple(mean), tuple(std)


def train_augment(
    config: Config, num_classes: int, colours: tuple[Colour, Colour], device: torch.device
) -> TrainAugment:
    """How bytes become the inputs of a training step; `colours` are the model's."""
    mean, std = colours
    return build_train_augment(config, num_classes, mean=mean, std=std, dtype=input_dtype(config, device))


def eval_prepare(config: Config, colours: tuple[Colour, Colour], device: torch.device) -> EvalPrepare:
    """How bytes become a model's inputs outside training; `colours` are the model's."""
    return EvalPrepare(*colours, input_dtype(config, device), memory_format_of(config))


def prepare_batch(
    augment: TrainAugment, first_part: int, copy: Copy, batch: ImageBatch, epoch: int, step: int, number: int
) -> Prepared:
    """A training batch on the device, augmented. `number` is its place among the batches of an update on this rank,
    `first_part` that of the rank's first one among those of all ranks."""
    images = copy(batch.images)
    return Prepared(*augment(images, batch.labels, batch.flips, batch.keys, epoch, step, first_part + number, copy))


def prepare_val_batch(prepare: EvalPrepare, copy: Copy, batch: ImageBatch) -> Prepared:
    """A validation batch on the device."""
    labels = copy(torch.from_numpy(batch.labels))
    return Prepared(prepare(copy(batch.images)), labels, labels, mixed=False)


def traceable_step(config: Config, num_classes: int | None = None) -> TraceableStep:
    """The step that `build_run` would train with, for a plan to trace; does not open the data.

    It takes the heaviest batch: with mixup, a mixed one. Policies and erasing are left out: they work on bytes, or on
    a few samples, and are done before the model's activations begin.
    """
    num_classes = num_classes or config.num_classes or CLASSES
    fresh = config.model_copy(update={"weights": None})  # their values do not change their size

    def build() -> nn.Module:
        # While a step is traced, the default device is meta: nothing is allocated.
        return build_network(fresh, num_classes, RunContext(Ranks(), torch.get_default_device()))

    always = {"mix_probability": 1.0, "mix_switch_probability": 0.0 if config.mixup_alpha > 0 else 1.0}
    plain = {"auto_augment": "none", "random_erasing": 0.0}
    # A plan is for a GPU, wherever it is made.
    dtype = compute_dtype(config.precision)
    augment = build_train_augment(config.model_copy(update=always | plain), num_classes, dtype=dtype)

    def make_batch(batch: int) -> Prepared:
        images = torch.empty(batch, config.img_size, config.img_size, 3, dtype=torch.uint8)
        # Labels, flips and keys of a batch whose content does not matter.
        nothing = np.zeros(batch, np.int64), np.zeros(batch, np.bool_), np.zeros(batch, np.uint64)
        return Prepared(*augment(images, *nothing, 0, 0))

    checkpointing = config.model_copy(update={"gradient_checkpointing": True})
    return building.traceable_step(
        config, build, build_loss(config), make_batch,
        checkpointed=None if config.gradient_checkpointing else traceable_step(checkpointing, num_classes),
    )  # fmt: skip
