"""What the runs of all tasks share: from a config to optimizer, schedule, moving average, ranks and compiler."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from stoker.config import Config, config_values
from stoker.core.console import Say
from stoker.core.errors import ConfigError
from stoker.core.units import count
from stoker.io.cache import CopyPlace, cache_place
from stoker.io.stores import is_url
from stoker.loader.loader import DEFAULT_PREFETCH, LoaderOptions, choose_engine
from stoker.profile.clock_file import ClockHeader
from stoker.profile.observed import AcceleratorFacts, LoaderShape
from stoker.profile.step_clock import StepClock
from stoker.tasks.base import RunData, metric_of, task_for
from stoker.train.checkpoint.weights import load_weights, open_source
from stoker.train.compute import Compiled, Precision, choose_fastest_kernels, compute_dtype, set_matmul_precision
from stoker.train.ema import WeightAverage
from stoker.train.evaluate import Accumulator, Remark, Scoring
from stoker.train.launch import StopRequest
from stoker.train.loader_adjuster import PrefetchGuard
from stoker.train.loop import InputPipeline, Run, RunRecord, RunScores
from stoker.train.optimizers import build_optimizer
from stoker.train.ranks import Ranks
from stoker.train.schedule import EarlyStopping, Horizon, Progress, Schedule, scaled_lr
from stoker.train.step import Prepared, TraceableStep, TrainStep
from stoker.train.transfers import Uploader, batches_in_hand, queue_of

if TYPE_CHECKING:
    from stoker.profile.host import HostConfig
    from stoker.tasks.staging import Staging


@dataclass(frozen=True)
class RunContext:
    """Where a run is built: its rank and device, and what its loaders use besides the data."""

    ranks: Ranks
    device: torch.device
    say: Say = lambda _text: None
    quarantine_file: Path | None = None
    staging: Staging | None = None
    """The local copy that training fills."""


def no_data(config: Config) -> ConfigError:
    """The error about a config that names no data."""
    volumes = "/folder/with/train.csv, or a YAML list of volumes"
    where = "/folder/with/train/and/val" if config.task == "classify" else volumes
    return ConfigError("data_root is not set", name="no-data", hint=f"data_root={where}")


def trial_run(config: Config) -> Config:
    """The config of `fast_dev_run`: one short epoch, at the learning rate of the real run's first step, whose result is
    not kept. Other configs are returned as they are."""
    if not config.fast_dev_run:
        return config
    number = int(config.fast_dev_run)
    first = config.warmup_start if config.warmup_epochs else 1.0
    return config.model_copy(
        update={
            "epochs": 1, "steps_per_epoch": None, "limit_train_batches": number * config.gradient_accumulation,
            "limit_val_batches": 0 if config.limit_val_batches == 0 else number, "early_stopping": None,
            "lr": config.lr * first, "warmup_epochs": 0, "lr_scheduler": "constant", "resize_epochs": None,
            "log_every": 1, "stage_to": None, "save_top_k": 0, "checkpoint_every": None, "checkpoint_every_steps": None,
            "wandb": False, "wandb_project": None, "wandb_name": None, "tensorboard": False, "csv": False,
        }
    )  # fmt: skip


def ready_device(config: Config, device: torch.device) -> None:
    """Configures how the device computes; call it before anything is built."""
    set_matmul_precision(config.matmul_precision)
    choose_fastest_kernels(device)


def updates_per_epoch(config: Config, samples: int, world: int) -> int:
    """Updates in an epoch of this many samples: all whole ones, or as many as the config says."""
    batches = samples // (config.batch_size * world)
    updates = batches // config.gradient_accumulation
    if config.limit_train_batches is not None:
        wanted = max(1, limited(batches, config.limit_train_batches) // config.gradient_accumulation)
    else:
        wanted = config.steps_per_epoch or updates
    return min(updates, wanted)


def limited(batches: int, limit: float) -> int:
    """This many batches, or that share of all, as Lightning counts them: rounded down; here at least one."""
    return min(batches, limit) if isinstance(limit, int) else max(1, int(batches * limit))


def total_batch_of(config: Config, ranks: Ranks) -> int:
    """Samples of one update, over all ranks."""
    return config.batch_size * ranks.world * config.gradient_accumulation


def peak_lr_of(config: Config, ranks: Ranks) -> float:
    return scaled_lr(config.lr, total_batch_of(config, ranks), config.lr_reference_batch, config.scale_lr)


def ready_model(config: Config, model: nn.Module, context: RunContext) -> nn.Module:
    """The model with the weights that the config names, and batch norm over all ranks if it says so, on its device."""
    if config.weights is not None:
        context.say(load_weights(model, open_source(Path(config.weights), context.say)[0]).describe())
    if config.sync_batchnorm and context.ranks.world > 1 and context.device.type == "cuda":
        model = with_sync_batchnorm(model)
    return model.to(context.device)


def with_sync_batchnorm(model: nn.Module) -> nn.Module:
    """The model with batch norm statistics over all ranks; for GPUs only, and before optimizer, EMA and DDP."""
    from stoker.tasks.light_timm import timm

    # timm's conversion, not torch's, which would lose the activation of timm's joint norm-and-activation layers.
    converted: nn.Module = timm.layers.convert_sync_batchnorm(model)
    return converted


def count_parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def train_step(
    config: Config, model: nn.Module, loss: Callable[[Any, Tensor], Tensor], context: RunContext
) -> TrainStep:
    """The step that updates a model on its device."""
    ranks = context.ranks
    return TrainStep(
        for_computing(config, model, context), build_optimizer(config, model, peak_lr_of(config, ranks)), loss,
        Precision(config.precision, context.device), ranks, micro_batch=config.batch_size,
        clip_grad_norm=config.clip_grad_norm, seed=config.seed, say=context.say,
    )  # fmt: skip


def input_pipeline(
    config: Config,
    context: RunContext,
    open_loader: Callable[[Any, int], Any],
    plans: tuple[Callable[[int], Any], Any],
    prepare: Callable[..., Prepared],
    prepare_val: Callable[..., Prepared],
    name_samples: Callable[[Sequence[int]], list[str]],
) -> InputPipeline:
    """The loaders of a run, as they feed a device. `plans` are the training plan of an epoch, of which a new one
    replaces the loader, and that of validation or None. `open_loader` gets a plan and how many of its batches the loop
    holds; what prepares a batch gets a function that copies to the device, the batch and, for training, its place:
    epoch, step, number within the step."""
    uploader = Uploader(queue_of(context.device))
    plan_of, val = plans
    now = plan_of(0)
    # Validation's batches are copied ahead of the model, too.
    held, val_held = (batches_in_hand(n, on_gpu=uploader.queue is not None) for n in (config.gradient_accumulation, 1))
    loader, val_loader = open_loader(now, held), None if val is None else open_loader(val, val_held)

    def train_loader(epoch: int) -> Any:
        nonlocal now, loader
        if (plan := plan_of(epoch)) is not now:
            loader.close()
            now, loader = plan, open_loader(plan, held)
        return loader

    def close() -> None:
        loader.close()
        if val_loader is not None:
            val_loader.close()

    return InputPipeline(
        train_loader=train_loader, val_loader=val_loader, uploader=uploader,
        prepare=partial(prepare, uploader.copy), prepare_val=partial(prepare_val, uploader.copy),
        name_samples=name_samples, close=close, guard_memory=PrefetchGuard(context.say).check,
    )  # fmt: skip


def assemble_run(
    config: Config,
    context: RunContext,
    *,
    model: nn.Module,
    step: TrainStep,
    pipeline: InputPipeline,
    val_loss: Callable[[Tensor, Tensor], Tensor],
    scoring: Scoring,
    record: RunRecord,
) -> Run:
    """A run at its beginning, from what its task has built and the config's schedule, average and metric."""
    ranks, device = context.ranks, context.device
    horizon = horizon_for(config, pipeline.train_loader(0).steps())
    metric = metric_of(config_values(config))
    stopping = None
    if config.early_stopping is not None:
        stopping = EarlyStopping(config.early_stopping, config.early_stopping_min_delta, metric)
    schedule = Schedule(
        horizon, peak_lr_of(config, ranks), stopping, total_batch=total_batch_of(config, ranks),
        accumulation=config.gradient_accumulation, max_bad_steps=config.max_bad_steps,
    )  # fmt: skip
    return Run(
        model=model, ema=average_of(config, model, horizon), step=step, input=pipeline,
        scores=RunScores(val_loss, scoring, metric, Accumulator(device)), schedule=schedule, record=record,
        ranks=ranks, device=device, progress=Progress(), stop=StopRequest(), clock=StepClock(device),
    )  # fmt: skip


class ClassScoring:
    """Loss and accuracy over samples that have one class each."""

    def __init__(self, device: torch.device) -> None:
        self._sums = Accumulator(device)

    def reset(self) -> None:
        self._sums.reset()

    def add(self, logits: Tensor, labels: Tensor, loss: Tensor, batch: Any, piece: slice) -> None:  # noqa: ARG002
        self._sums.add(logits, labels, loss)

    def result(self) -> dict[str, float]:
        return self._sums.result()

    def look(self, metrics: Mapping[str, Any]) -> Remark | None:  # noqa: ARG002
        return None


def traceable_step(
    config: Config,
    build_model: Callable[[], nn.Module],
    loss: Callable[[Any, Tensor], Tensor],
    make_batch: Callable[[int], Prepared],
    checkpointed: TraceableStep | None = None,
) -> TraceableStep:
    """The step that the config describes, for a plan to trace."""
    return TraceableStep(
        build_model=build_model, build_optimizer=partial(build_optimizer, config, lr=config.lr), loss=loss,
        make_batch=make_batch, batch_size=config.batch_size, precision=config.precision, ema_decay=config.ema_decay,
        accumulation=config.gradient_accumulation, clip_grad_norm=config.clip_grad_norm, checkpointed=checkpointed,
    )  # fmt: skip


def describe_schedule(config: Config, ranks: Ranks, device: torch.device, horizon: Horizon) -> list[str]:
    """Batch, length, learning rate and device of a run, a line each."""
    total = total_batch_of(config, ranks)
    scaled = f" = {config.lr:g} x {total} / {config.lr_reference_batch}" if config.scale_lr else " (not scaled)"
    parts = [f"{config.batch_size}", f"{ranks.world} ranks" if ranks.world > 1 else ""]
    parts.append(f"{config.gradient_accumulation} accumulated" if config.gradient_accumulation > 1 else "")
    return [
        f"total batch {total} ({' x '.join(part for part in parts if part)}), "
        f"{count(horizon.steps_per_epoch, 'step')} an epoch, {count(horizon.epochs, 'epoch')}",
        f"learning rate {peak_lr_of(config, ranks):g}{scaled}, {config.optimizer}, {config.lr_scheduler}",
        f"{device.type}, precision {config.precision}" + (", compiled" if config.compile_model else ""),
    ]


def for_computing(config: Config, model: nn.Module, context: RunContext) -> nn.Module:
    """The model as the step calls it: compiled, and wrapped for several ranks."""
    computing = Compiled(model, config.compile_mode, context.say) if config.compile_model else model
    if context.ranks.world > 1:
        ids = [context.device.index] if context.device.type == "cuda" else None
        # Batch norm's statistics are shared before each validation; sending them at each step would only cost time.
        known = inspect.signature(DistributedDataParallel).parameters
        every_step = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"  # before 2.15
        # Gradients are views of the buckets that are sent, which saves a copy and its memory.
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


def average_of(config: Config, model: nn.Module, horizon: Horizon) -> WeightAverage | None:
    if config.ema_decay is None:
        return None
    return WeightAverage(
        model, config.ema_decay, warmup=config.ema_warmup, every=config.ema_every,
        steps_per_epoch=horizon.steps_per_epoch, warmup_steps=horizon.warmup_epochs * horizon.steps_per_epoch,
    )  # fmt: skip


def input_dtype(config: Config, device: torch.device) -> torch.dtype:
    """The dtype of the inputs: on a GPU that of the first layer, which then need not convert them."""
    return compute_dtype(config.precision) if device.type == "cuda" else torch.float32


def loader_options(
    config: Config,
    workers: int,
    held: int = 1,
    quarantine_file: Path | None = None,
    copy: CopyPlace | None = None,
) -> LoaderOptions:
    """The config's settings for how batches are made; for a consumer that holds `held` batches when it asks for the
    next. `copy` is the local copy that training fills."""
    return LoaderOptions(
        engine=config.loader,
        workers=workers,
        prefetch=config.prefetch_factor,
        held=held,
        pin_memory=config.pin_memory,
        persistent_workers=config.persistent_workers,
        worker_start=config.worker_start,
        lookahead=config.lookahead,
        copy=copy or cache_place(config.cache_dir, config.cache_size),
        max_object_bytes=config.max_image_bytes,
        max_bad_fraction=config.max_bad_fraction,
        quarantine_file=quarantine_file,
    )


def loader_shape(config: HostConfig, samples: int, world: int = 1) -> LoaderShape:
    """How one rank's training loader is set up; `samples` counts those of all ranks."""
    workers = config.num_workers
    engine = choose_engine(config.loader, workers, volumes=task_for(config).releases_gil)
    processes = engine == "process" and workers > 0
    start = "forkserver" if config.worker_start == "auto" else config.worker_start
    return LoaderShape(
        workers=workers,
        prefetch=(config.prefetch_factor or DEFAULT_PREFETCH) if workers else None,
        engine=engine if workers else "main",
        start_method=start if processes else None,
        # Threads are always kept from epoch to epoch.
        persistent=config.persistent_workers if processes else None,
        pin_memory=config.pin_memory,
        batch_size=config.batch_size,
        samples=samples // world,
        threads_per_worker=1 if processes else None,
    )


def run_header(config: HostConfig, run: Run, data: RunData, cpus: int) -> ClockHeader:
    """The first line of a run's clock file: how its loader, device and storage are set up."""
    accelerator = None
    if run.device.type == "cuda":
        accelerator = AcceleratorFacts(name=torch.cuda.get_device_name(run.device), count=torch.cuda.device_count())
    # What the loader may keep while it runs: decoded data, and bytes of an object store that each process has read
    # ahead.
    may_grow_bytes = task_for(config).kept_bytes(config)
    if config.data_root is not None and is_url(config.data_root):
        may_grow_bytes += config.lookahead * (1 + (config.num_workers if config.loader == "process" else 0))
    return ClockHeader(
        loader_shape(config, data.samples, run.ranks.world),
        cpus=cpus,
        world=run.ranks.world,
        torch=torch.__version__,
        device=run.device.type,
        accelerator=accelerator,
        storage=data.storage(),
        convolves_3d=any(isinstance(module, nn.Conv3d) for module in run.model.modules()),
        may_grow_bytes=may_grow_bytes,
    )
