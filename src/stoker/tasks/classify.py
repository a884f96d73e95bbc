"""Image classification: from a config to a run that the loop can train, and to a step that a plan can trace."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from stoker.augment.packing import Copy
from stoker.augment.pipeline import (
    IMAGENET_MEAN,
    IMAGENET_STD,
    Colour,
    EvalPrepare,
    TrainAugment,
    build_train_augment,
    memory_format_of,
)
from stoker.clock.steps import StepClock
from stoker.config import Config, config_values
from stoker.console import Advance, Say, count
from stoker.data.batch import Batch
from stoker.data.engines.making import BatchPlan
from stoker.data.images.decoding import Decoding
from stoker.data.images.opening import check_same_classes
from stoker.data.images.sample_index import SampleSet
from stoker.data.loader import ImageLoader
from stoker.errors import UserError
from stoker.machine.host import HostConfig
from stoker.models.build import build_model, count_parameters, facts_about, with_sync_batchnorm
from stoker.models.weights import load_weights
from stoker.tasks.image_data import choose_decoding, open_loader, open_samples, training_plan, validation_plan
from stoker.train.checkpoint.sources import open_source
from stoker.train.compute import (
    Compiled,
    Precision,
    choose_fastest_kernels,
    compute_dtype,
    set_matmul_precision,
)
from stoker.train.ema import WeightAverage
from stoker.train.evaluate import Accumulator
from stoker.train.launch import StopRequest
from stoker.train.loop import Run
from stoker.train.optimization import build_loss, build_optimizer, cross_entropy
from stoker.train.prefetch_guard import PrefetchGuard
from stoker.train.ranks import Ranks
from stoker.train.schedule import EarlyStopping, Horizon, Progress, default_resize_epochs, image_size, scaled_lr
from stoker.train.step import Prepared, TraceableStep, TrainStep
from stoker.train.transfers import Uploader, batches_in_hand, queue_of


@dataclass(frozen=True)
class TrainingData:
    """The samples of a run, and their decoder."""

    train: SampleSet
    val: SampleSet | None
    decoding: Decoding


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
                why="it watches val/acc1, which would never be measured",
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


def build_run(
    config: HostConfig,
    data: TrainingData,
    ranks: Ranks,
    device: torch.device,
    *,
    quarantine_file: Path | None = None,
    say: Say = lambda _text: None,
) -> Run:
    """The run that the config describes, at its beginning: model, optimizer, loaders, augmentation; alike on every
    rank. `resume` moves it to where a checkpoint was saved."""
    set_matmul_precision(config.matmul_precision)
    choose_fastest_kernels(device)
    num_classes = config.num_classes or len(data.train.classes)
    model = build_network(config, num_classes, device, ranks, say)
    total_batch = config.batch_size * ranks.world * config.gradient_accumulation
    peak_lr = scaled_lr(config.lr, total_batch, config.lr_reference_batch, config.scale_lr)
    optimizer = optimizer_for(config, model, peak_lr)
    step = TrainStep(
        _for_computing(config, model, ranks, device, say), optimizer, build_loss(config),
        Precision(config.precision, device), ranks, micro_batch=config.batch_size,
        clip_grad_norm=config.clip_grad_norm, seed=config.seed, say=say,
    )  # fmt: skip
    uploader = Uploader(queue_of(device))
    loaders = _Loaders(config, data, ranks, quarantine_file, say, on_gpu=uploader.queue is not None)
    horizon = horizon_for(config, loaders.of_epoch(0).steps())
    ema = _average(config, model, horizon)
    colours = colours_of(model)
    augment = train_augment(config, num_classes, colours, device)
    return Run(
        model=model, ema=ema, step=step, total_batch=total_batch, uploader=uploader,
        prepare=partial(prepare_batch, augment, uploader.copy, ranks.rank * config.gradient_accumulation),
        prepare_val=partial(prepare_val_batch, eval_prepare(config, colours, device), uploader.copy),
        train_loader=loaders.of_epoch, val_loader=loaders.validation(),
        val_loss=cross_entropy, horizon=horizon, peak_lr=peak_lr, stopping=_early_stopping(config),
        accumulation=config.gradient_accumulation, max_bad_steps=config.max_bad_steps, ranks=ranks, device=device,
        progress=Progress(), train_metrics=Accumulator(device), stop=StopRequest(), clock=StepClock(device),
        close=loaders.close, config=config_values(config), classes=data.train.classes,
        decoder=data.decoding.decoder,
        name_samples=lambda samples: [data.train.index.name(sample) for sample in samples],
        guard_memory=PrefetchGuard(say).check,
    )  # fmt: skip


def describe_run(config: Config, run: Run, data: TrainingData) -> str:
    """What is about to be trained, in a few lines that people check before they go home."""
    total = config.batch_size * run.ranks.world * config.gradient_accumulation
    scaled = f" = {config.lr:g} x {total} / {config.lr_reference_batch}" if config.scale_lr else " (not scaled)"
    parts = [f"{config.batch_size}", f"{run.ranks.world} ranks" if run.ranks.world > 1 else ""]
    parts.append(f"{config.gradient_accumulation} accumulated" if config.gradient_accumulation > 1 else "")
    val = "no validation" if data.val is None else f"{len(data.val):,} validation images"
    return "\n".join(
        [
            f"{config.model}: {count_parameters(run.model):,} parameters, {len(data.train.classes)} classes",
            f"{len(data.train):,} training images, {val}, decoded by {data.decoding.decoder}",
            f"total batch {total} ({' x '.join(part for part in parts if part)}), "
            f"{run.horizon.steps_per_epoch:,} steps an epoch, {count(run.horizon.epochs, 'epoch')}",
            f"learning rate {run.peak_lr:g}{scaled}, {config.optimizer}, {config.lr_scheduler}",
            f"{run.device.type}, precision {config.precision}" + (", compiled" if config.compile_model else ""),
        ]
    )


class _Loaders:
    """The loaders of a run; progressive resizing opens a new one when the image size changes."""

    def __init__(
        self,
        config: HostConfig,
        data: TrainingData,
        ranks: Ranks,
        quarantine_file: Path | None,
        say: Say,
        *,
        on_gpu: bool,
    ) -> None:
        self._on_gpu = on_gpu
        self._config = config
        self._data = data
        self._ranks = ranks
        self._quarantine_file = quarantine_file
        self._say = say
        self._said: set[str] = set()
        self._open: ImageLoader | None = None
        self._size: int | None = None
        self._val: ImageLoader | None = None

    def of_epoch(self, epoch: int) -> ImageLoader:
        config = self._config
        sized = config.model_copy(update={"img_size": image_size_of(config, epoch)})
        if self._open is None or sized.img_size != self._size:
            if self._open is not None:
                self._open.close()
            plan = checked_training_plan(sized, self._data, self._ranks)
            self._open = self._loader(sized, plan, config.gradient_accumulation)
            self._size = sized.img_size
        return self._open

    def validation(self) -> ImageLoader | None:
        if self._data.val is None or self._config.limit_val_batches == 0:
            return None
        config = self._config
        plan = validation_plan(config, self._data.val, self._data.decoding, self._ranks)
        self._val = self._loader(config, plan, 1)
        return self._val

    def close(self) -> None:
        for loader in (self._open, self._val):
            if loader is not None:
                loader.close()

    def _loader(self, config: HostConfig, plan: BatchPlan, accumulation: int) -> ImageLoader:
        held = batches_in_hand(accumulation, on_gpu=self._on_gpu)
        return open_loader(
            config, plan, workers=config.num_workers, held=held, quarantine_file=self._quarantine_file, say=self._once
        )

    def _once(self, line: str) -> None:
        """Progressive resizing opens many loaders: what is true of all of them is said once."""
        if line not in self._said:
            self._said.add(line)
            self._say(line)


def image_size_of(config: Config, epoch: int) -> int:
    """The size of an epoch's training images: progressive resizing changes it."""
    until = config.resize_epochs or default_resize_epochs(config.epochs)
    return image_size(epoch, config.start_img_size, config.img_size, until)


def checked_training_plan(config: Config, data: TrainingData, ranks: Ranks) -> BatchPlan:
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


def build_network(config: Config, num_classes: int, device: torch.device, ranks: Ranks, say: Say) -> nn.Module:
    """The network that the config describes, on its device."""
    sizes = [size for size in (config.val_img_size, config.start_img_size) if size is not None]
    model = build_model(
        config.model, num_classes, img_size=config.img_size, other_sizes=sizes, drop_path=config.drop_path,
        dropout=config.dropout, gradient_checkpointing=config.gradient_checkpointing,
        channels_last=config.channels_last, seed=config.seed,
    )  # fmt: skip
    if config.weights is not None:
        file, _ = open_source(Path(config.weights), say)
        say(load_weights(model, file).describe())
    if config.sync_batchnorm and ranks.world > 1 and device.type == "cuda":
        model = with_sync_batchnorm(model)
    return model.to(device)


def optimizer_for(config: Config, model: nn.Module, lr: float) -> torch.optim.Optimizer:
    """The optimizer that the config describes; the model has to be on its device already."""
    return build_optimizer(
        model, config.optimizer, lr, momentum=config.momentum, nesterov=config.nesterov, betas=config.betas,
        weight_decay=config.weight_decay, decay_bias_and_norm=config.decay_bias_and_norm,
    )  # fmt: skip


def _for_computing(config: Config, model: nn.Module, ranks: Ranks, device: torch.device, say: Say) -> nn.Module:
    """The model as the step calls it: compiled, and wrapped for several ranks."""
    computing = Compiled(model, config.compile_mode, say) if config.compile_model else model
    if ranks.world > 1:
        ids = [device.index] if device.type == "cuda" else None
        # Batch norm's statistics are shared before each validation; sending them at each step would only cost time.
        known = inspect.signature(DistributedDataParallel).parameters
        every_step = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"  # before 2.15
        # Gradients live in the buckets that are sent: one copy, and their memory, less.
        keys: dict[str, Any] = {every_step: False, "gradient_as_bucket_view": True}
        computing = DistributedDataParallel(computing, device_ids=ids, **keys)
    return computing


def horizon_for(config: Config, batches: int) -> Horizon:
    """The schedule that the config describes, for epochs of this many batches."""
    return Horizon(
        steps_per_epoch=batches // config.gradient_accumulation, epochs=config.epochs,
        warmup_epochs=config.warmup_epochs, warmup_start=config.warmup_start, min_lr=config.min_lr,
        scheduler=config.lr_scheduler, update=config.lr_update, step_epochs=config.lr_step_epochs,
        step_factor=config.lr_step_factor,
    )  # fmt: skip


def _early_stopping(config: Config) -> EarlyStopping | None:
    if config.early_stopping is None:
        return None
    return EarlyStopping(config.early_stopping, config.early_stopping_min_delta)


def _average(config: Config, model: nn.Module, horizon: Horizon) -> WeightAverage | None:
    if config.ema_decay is None:
        return None
    return WeightAverage(
        model, config.ema_decay, warmup=config.ema_warmup, every=config.ema_every,
        steps_per_epoch=horizon.steps_per_epoch, warmup_steps=horizon.warmup_epochs * horizon.steps_per_epoch,
    )  # fmt: skip


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


def input_dtype(config: Config, device: torch.device) -> torch.dtype:
    """What inputs are made in: on a GPU what the first layer computes in, which spares it the conversion."""
    return compute_dtype(config.precision) if device.type == "cuda" else torch.float32


def train_augment(
    config: Config, num_classes: int, colours: tuple[Colour, Colour], device: torch.device
) -> TrainAugment:
    """How bytes become the inputs of a training step; `colours` are the model's."""
    mean, std = colours
    return build_train_augment(config, num_classes, mean=mean, std=std, dtype=input_dtype(config, device))


def eval_prepare(config: Config, colours: tuple[Colour, Colour], device: torch.device) -> EvalPrepare:
    """How bytes become a model's inputs wherever it is not trained; `colours` are the model's."""
    return EvalPrepare(*colours, input_dtype(config, device), memory_format_of(config))


def prepare_batch(
    augment: TrainAugment, copy: Copy, first_part: int, batch: Batch, epoch: int, step: int, number: int
) -> Prepared:
    """A training batch on the device, augmented. `number` is its place among the batches of an update on this rank,
    `first_part` that of the rank's first one among those of all ranks."""
    images = copy(batch.images)
    return Prepared(*augment(images, batch.labels, batch.flips, batch.keys, epoch, step, first_part + number, copy))


def prepare_val_batch(prepare: EvalPrepare, copy: Copy, batch: Batch) -> Prepared:
    """A validation batch on the device."""
    labels = copy(torch.from_numpy(batch.labels))
    return Prepared(prepare(copy(batch.images)), labels, labels, mixed=False)


def traceable_step(config: Config, num_classes: int) -> TraceableStep:
    """The step that `build_run` would train with, for a plan to trace; does not open the data.

    It takes the heaviest batch: with mixup, a mixed one. Policies and erasing are left out: they work on bytes, or on
    a few samples, and are done before the model's activations begin.
    """
    fresh = config.model_copy(update={"weights": None})  # their values do not change their size

    def build() -> nn.Module:
        # While a step is traced, the default device is meta: nothing is allocated.
        return build_network(fresh, num_classes, torch.get_default_device(), Ranks(), lambda _text: None)

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
    return TraceableStep(
        build_model=build,
        build_optimizer=partial(optimizer_for, config, lr=config.lr),
        loss=build_loss(config),
        make_batch=make_batch,
        batch_size=config.batch_size,
        precision=config.precision,
        ema_decay=config.ema_decay,
        accumulation=config.gradient_accumulation,
        clip_grad_norm=config.clip_grad_norm,
        checkpointed=None if config.gradient_checkpointing else traceable_step(checkpointing, num_classes),
    )
