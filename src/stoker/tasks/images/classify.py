"""Image classification: from a config to a run that the loop can train, and to a step that a plan can trace."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from stoker.config import Config, config_values
from stoker.core.console import Advance, Say
from stoker.core.errors import UserError
from stoker.core.files import write_text
from stoker.loader.loader import Follow, LoaderSpeed
from stoker.profile.host import HostConfig
from stoker.profile.observed import StorageFacts
from stoker.run.folder import RunFolder
from stoker.tasks import building
from stoker.tasks.base import metric_of
from stoker.tasks.building import (
    RunContext,
    assemble_run,
    count_parameters,
    describe_schedule,
    input_dtype,
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
from stoker.tasks.images.class_losses import build_loss, cross_entropy
from stoker.tasks.images.data import (
    IMAGENET_CLASSES,
    choose_decoding,
    chosen_record,
    contents_of_samples,
    describe_storage,
    listing_of_samples,
    measure_speed,
    open_loader,
    open_samples,
    training_plan,
    validation_plan,
)
from stoker.tasks.images.decode.decoders import available_decoders
from stoker.tasks.images.decode.decoding import Decoding
from stoker.tasks.images.image_loader import ImageBatch, ImageLoader, ImagePlan
from stoker.tasks.images.image_staging import stage_images
from stoker.tasks.images.label_alarm import MOST_CLASSES, Confusion, Figures, is_suspicious, judge_labels
from stoker.tasks.images.layouts.opening import check_same_classes
from stoker.tasks.images.layouts.sample_index import SampleSet
from stoker.tasks.images.models import build_model, facts_about
from stoker.tasks.staging import Staging
from stoker.train.checkpoint.changes import Contents, Listings
from stoker.train.checkpoint.folder import FoundCheckpoint
from stoker.train.compute import compute_dtype
from stoker.train.evaluate import Accumulator, Remark
from stoker.train.loop import InputPipeline, Run, RunRecord
from stoker.train.prefetch_guard import PrefetchGuard
from stoker.train.ranks import Ranks
from stoker.train.schedule import default_resize_epochs, image_size
from stoker.train.step import Prepared, TraceableStep
from stoker.train.transfers import Uploader, batches_in_hand, queue_of


@dataclass(frozen=True)
class TrainingData:
    """The samples of a run, and their decoder."""

    train: SampleSet
    val: SampleSet | None
    decoding: Decoding

    @property
    def samples(self) -> int:
        """Images to train on."""
        return len(self.train)

    def storage(self) -> StorageFacts:
        """What is known about the source without reading from it."""
        return describe_storage(self.train)

    def names(self, samples: Sequence[int]) -> list[str]:
        """The files of training samples, from their indices in the data set."""
        return [self.train.index.name(sample) for sample in samples]


def open_data(config: Config, say: Say, progress: Advance | None = None) -> TrainingData:
    """Training and validation samples; data without a validation split has none."""
    train = open_samples(config, "train", progress=progress, say=say)
    if len(train.classes) < 2:
        raise UserError(
            "one-class",
            f"{config.data_root}/train has only one class, {train.classes[0]}",
            why="classification needs at least two",
        )
    try:
        val = open_samples(config, "val", classes=train.classes, progress=progress, say=say)
        check_same_classes(train.index, val.index)
    except UserError as error:
        if error.name != "split-not-found":
            raise
        if config.early_stopping is not None:
            raise UserError(
                "early-stopping-without-validation",
                f"early_stopping is {config.early_stopping}, but {error.seen}",
                why=f"it watches {metric_of(config_values(config)).key}, which would never be measured",
                hint="early_stopping=null, or add validation images",
            ) from None
        say(f"no validation: {error.seen}")
        val = None
    if config.num_classes is not None and config.num_classes < len(train.classes):
        raise UserError(
            "num-classes", f"num_classes is {config.num_classes}, but the data has {len(train.classes)} classes"
        )
    decoding, _ = choose_decoding(config, train.index)
    return TrainingData(train, val, decoding)


def listings(data: TrainingData) -> Listings:
    """Which images the data has, in order."""
    parts = {"train": data.train, "val": data.val}
    return {part: None if one is None else listing_of_samples(one) for part, one in parts.items()}


def contents(config: HostConfig, data: TrainingData) -> Contents:
    """A hash of some images, to notice data that was made again under the same names."""
    if config.stage_to is not None:
        return {}  # it reads its local copy, and that has its own manifest
    parts = {"train": data.train, "val": data.val}
    return {part: None if one is None else contents_of_samples(config, one) for part, one in parts.items()}


def record_choice(config: HostConfig, data: TrainingData, folder: RunFolder, say: Say) -> None:
    """Says and records which classes a config has chosen."""
    chosen = chosen_record(config, data.train, data.val)
    if chosen is not None:
        say(f"classes: {', '.join(chosen['classes'])}")
        write_text(folder.subset_file, json.dumps(chosen, indent=1) + "\n")


def open_training_loader(config: HostConfig, data: TrainingData) -> ImageLoader:
    """The loader of one process, without a model to feed."""
    return open_loader(config, training_plan(config, data.train, data.decoding), workers=config.num_workers)


def measure_training_speed(config: HostConfig, data: TrainingData, *, workers: int, seconds: float) -> LoaderSpeed:
    """How fast the loader is for a consumer that takes no time."""
    return measure_speed(config, data.train, data.decoding, workers=workers, seconds=seconds)


def build_run(config: HostConfig, data: TrainingData, context: RunContext) -> Run:
    """The run that the config describes, at its beginning."""
    device = context.device
    ready_device(config, device)
    num_classes = config.num_classes or len(data.train.classes)
    model = build_network(config, num_classes, context)
    step = train_step(config, model, build_loss(config), context)
    uploader = Uploader(queue_of(device))
    loaders = _Loaders(config, data, context, on_gpu=uploader.queue is not None)
    val_loader = loaders.validation()
    colours = colours_of(model)
    augment = train_augment(config, num_classes, colours, device)
    pipeline = InputPipeline(
        train_loader=loaders.of_epoch, val_loader=val_loader, uploader=uploader,
        prepare=partial(prepare_batch, augment, uploader.copy, context.ranks.rank * config.gradient_accumulation),
        prepare_val=partial(prepare_val_batch, eval_prepare(config, colours, device), uploader.copy),
        name_samples=data.names, close=loaders.close, guard_memory=PrefetchGuard(context.say).check,
    )  # fmt: skip
    return assemble_run(
        config, context, model=model, step=step, pipeline=pipeline, val_loss=cross_entropy,
        scoring=ImageScoring(device, data.train.classes, None if val_loader is None else num_classes, config.loss),
        record=RunRecord(config_values(config), data.train.classes, decoder=data.decoding.decoder),
    )  # fmt: skip


class ImageScoring:
    """Loss and accuracies; asks once whether the labels belong to other classes."""

    def __init__(self, device: torch.device, classes: Sequence[str], outputs: int | None, loss: str) -> None:
        """Confusions are counted between `outputs` classes; without it, or with too many, only the metrics are used."""
        self._sums = Accumulator(device)
        self._classes, self._loss = classes, loss
        self._confusion = None if outputs is None or outputs > MOST_CLASSES else Confusion(outputs, device)
        self._asked = False

    def reset(self) -> None:
        self._sums.reset()
        if self._confusion is not None:
            self._confusion.reset()

    def add(self, logits: Tensor, labels: Tensor, loss: Tensor, batch: Any, piece: slice) -> None:  # noqa: ARG002
        self._sums.add(logits, labels, loss)
        if self._confusion is not None:
            self._confusion.add(logits, labels)

    def result(self) -> dict[str, float]:
        return self._sums.result()

    def look(self, metrics: Mapping[str, Any]) -> Remark | None:
        loss = metrics.get("train/loss") if self._loss == "cross_entropy" else None
        figures = Figures(metrics.get("val/acc1"), metrics.get("train/acc1"), loss)
        if self._asked or not is_suspicious(figures, len(self._classes)):
            return None
        counts = None if self._confusion is None else self._confusion.total()
        alarm = judge_labels(figures, counts, self._classes)
        self._asked = alarm is not None
        return None if alarm is None else Remark("labels?", alarm.details(), alarm.text())


def open_staging(config: HostConfig, data: TrainingData, ranks: Ranks, say: Say) -> Staging | None:
    """The local copy that training fills, if the config names one."""
    if config.stage_to is None:
        return None
    val = None
    if data.val is not None and config.limit_val_batches != 0:
        val = validation_plan(config, data.val, data.decoding, ranks)
    return stage_images(config, checked_training_plan(config, data, ranks), val, ranks, say)


def describe_run(config: Config, run: Run, data: TrainingData) -> str:
    """What is about to be trained, in a few lines that people check before they go home."""
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


class _Loaders:
    """The loaders of a run; progressive resizing opens a new one when the image size changes."""

    def __init__(self, config: HostConfig, data: TrainingData, context: RunContext, *, on_gpu: bool) -> None:
        self._config, self._data, self._context, self._on_gpu = config, data, context, on_gpu
        self._said: set[str] = set()
        self._open: ImageLoader | None = None
        self._size: int | None = None
        self._val: ImageLoader | None = None

    def of_epoch(self, epoch: int) -> ImageLoader:
        config, staging = self._config, self._context.staging
        sized = config.model_copy(update={"img_size": image_size_of(config, epoch)})
        if self._open is None or sized.img_size != self._size:
            if self._open is not None:
                self._open.close()
            plan = checked_training_plan(sized, self._data, self._context.ranks)
            follow = None if staging is None else staging.follow
            self._open = self._loader(sized, plan, config.gradient_accumulation, follow)
            self._size = sized.img_size
        return self._open

    def validation(self) -> ImageLoader | None:
        config, staging = self._config, self._context.staging
        if self._data.val is None or config.limit_val_batches == 0:
            return None
        plan = validation_plan(config, self._data.val, self._data.decoding, self._context.ranks)
        self._val = self._loader(config, plan, 1, None if staging is None else staging.make_way)
        return self._val

    def close(self) -> None:
        for loader in (self._open, self._val):
            if loader is not None:
                loader.close()

    def _loader(self, config: HostConfig, plan: ImagePlan, accumulation: int, follow: Follow | None) -> ImageLoader:
        context, held = self._context, batches_in_hand(accumulation, on_gpu=self._on_gpu)
        return open_loader(
            config, plan, workers=config.num_workers, held=held, quarantine_file=context.quarantine_file,
            copy=None if context.staging is None else context.staging.place, follow=follow, say=self._once,
        )  # fmt: skip

    def _once(self, line: str) -> None:
        """Progressive resizing opens many loaders: a message that applies to all of them is printed once."""
        if line not in self._said:
            self._said.add(line)
            self._context.say(line)


def image_size_of(config: Config, epoch: int) -> int:
    """The size of an epoch's training images: progressive resizing changes it."""
    until = config.resize_epochs or default_resize_epochs(config.epochs)
    return image_size(epoch, config.start_img_size, config.img_size, until)


def checked_training_plan(config: Config, data: TrainingData, ranks: Ranks) -> ImagePlan:
    """What the training batches of this rank hold; raises UserError if they do not fill an epoch."""
    plan = training_plan(config, data.train, data.decoding, ranks)
    _check_length(config, len(data.train), plan.steps.total_batch * config.gradient_accumulation)
    return plan


def _check_length(config: Config, samples: int, total: int) -> None:
    """Refuses epochs without a single update of `total` samples, and epochs longer than the data."""
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
    augment: TrainAugment, copy: Copy, first_part: int, batch: ImageBatch, epoch: int, step: int, number: int
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
    num_classes = num_classes or config.num_classes or IMAGENET_CLASSES
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
