"""What one training process does, in order: data, ranks, model, checkpoint, loop."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from stoker.config import Config, config_values
from stoker.core.console import Say, progress_bar
from stoker.core.errors import Interrupted, Preempted, StokerError, UserError
from stoker.profile.clock_file import ClockFile
from stoker.profile.host import HostConfig, HostWatch, Machine, usable_cpus
from stoker.profile.numa import bind_rank
from stoker.run.finished import best_checkpoint, next_lines
from stoker.run.folder import RunFolder, record_config
from stoker.run.metric import metric_of
from stoker.run.metrics import MetricsFile, truncate_after
from stoker.run.trackers import trackers_for
from stoker.tasks.base import RunData, task_for
from stoker.train.checkpoint.branching import Start, begin, own_checkpoint
from stoker.train.checkpoint.changes import changes_since
from stoker.train.checkpoint.data_changes import (
    Contents,
    Difference,
    Listings,
    data_changed,
    differences_since,
    fingerprint,
    meaning,
    save_listings,
)
from stoker.train.checkpoint.folder import Checkpoints, FoundCheckpoint
from stoker.train.checkpoint.restore import load_for_resume, resume
from stoker.train.checkpoint.saver import Saver
from stoker.train.compute import utilisation_of
from stoker.train.launch import LAUNCHED
from stoker.train.loader_adjuster import LoaderAdjuster
from stoker.train.loader_changes import Knob
from stoker.train.loop import Run, train
from stoker.train.observer import RunObserver, Silence, run_header
from stoker.train.progress_line import TrainProgress
from stoker.train.ranks import Ranks, from_first, process_group, ranks_from_environment
from stoker.train.schedule import lr_warning

Summary = dict[str, Any]
ONE_DEVICE = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "SLURM_STEP_GPUS")
"""Variables that list the GPUs of a process; a launcher that names one has given it that one."""
ADJUSTED: dict[str, Knob] = {"prefetch_factor": "prefetch", "lookahead": "lookahead_bytes"}
"""Keys whose value is only where `adjust_loader` begins, unless the config sets them."""


def train_here(
    config: HostConfig,
    folder: RunFolder,
    ranks: Ranks,
    machine: Machine,
    checkpoint: Path | None,
    progress: TrainProgress | None,
    stack: ExitStack,
    start: Start | None = None,
    *,
    replan: bool = False,
    accept_data: bool = False,
    look: Callable[[Any], Sequence[str]] = lambda _data: (),
) -> Summary | None:
    """Trains on this rank, from the last checkpoint if there is one, else from `start`; returns the run's summary on
    the first rank.

    `progress` is that of the first rank, which writes and speaks for all. With `replan`, a config with another schedule
    than the checkpoint's is not refused; with `accept_data`, other data. `look` says what is wrong with a new run, a
    line each.
    """
    task, device = task_for(config), _device(ranks)
    say_here = _say_nothing if progress is None else progress.say
    here = ranks.local_world or max(1, ranks.world // config.num_nodes)
    # On a GPU, too: otherwise the few operators on the host would start as many threads in each rank as it has cores.
    torch.set_num_threads(max(1, machine.cpus // here))
    if device.type == "cuda" and config.numa_binding == "auto":
        binding = bind_rank(device.index, here)
        machine = replace(machine, cpus=usable_cpus())
        if (line := binding.describe()) is not None:
            say_here(line)
    with progress_bar("listing", None) as advance:
        data = task.open_data(config, say_here, advance)
    if ranks.is_first:
        task.record_choice(config, data, folder, say_here)
    ranks = stack.enter_context(process_group(ranks, "nccl" if device.type == "cuda" else "gloo", config.rank_timeout))
    metric = metric_of(config_values(config))
    checkpoints = Checkpoints(folder.checkpoints, config.save_top_k, metric=metric)
    # Read by one rank and sent to the others: they need not see its disk, and cannot find a different checkpoint.
    found = from_first(
        lambda: load_for_resume(checkpoints, checkpoint) if start is None else own_checkpoint(checkpoints, start), ranks
    )
    listings = task.listings(data)
    if found is not None:
        data = task.as_it_began(found, config, data, say_here)
    staging = task.open_staging(config, data, ranks, say_here)
    if staging is not None:
        stack.callback(staging.close)
    run = task.build_run(
        config, data, ranks, device, quarantine_file=folder.quarantine_file, staging=staging, say=say_here
    )
    contents: Contents = {} if config.fast_dev_run else from_first(lambda: task.contents(config, data), ranks)
    run = replace(run, data={**run.data, "samples": fingerprint(listings), "contents": contents})
    stack.callback(run.close)
    if config.adjust_loader:
        chosen = frozenset(knob for key, knob in ADJUSTED.items() if key in config.model_fields_set)
        adjuster = LoaderAdjuster(machine.cpus / here, fixed=chosen)
        run = replace(run, adjust_loader=adjuster.after_step)
    events: tuple[tuple[str, dict[str, Any]], ...] = ()
    changed: list[Difference] = []
    if found is None and replan:
        say_here("--replan: a new run, which begins with its own schedule")
    if found is not None:
        for note in found.notes:
            say_here(f"warning: {note}")
        run, events = resume(run, found, say_here, replan=replan)
        if not run.progress.finished:
            changed = _data_changes(found, listings, contents, folder, config, accept=accept_data, say=say_here)
        if run.progress.finished:
            best = "none" if run.progress.best is None else metric.text(run.progress.best)
            early = None if run.stopping is None else run.stopping.reason(run.progress)
            why = "" if early is None else f"; {early}"
            say_here(f"{folder.root} is finished: {run.progress.step:,} steps, best {metric.key} {best}{why}")
            for line in next_lines(folder, metric):
                say_here(line)
            return _summary(run, folder) if ranks.is_first else None
        say_here(f"resuming from {found.path.name}: epoch {run.progress.epoch}, step {run.progress.step:,}")
    elif start is not None:
        run = begin(run, start, say_here)
    observer: RunObserver | Silence = Silence()
    if progress is not None:
        record_config(folder, config)
        if not config.fast_dev_run and (found is None or changed or not folder.samples_file.exists()):
            try:
                save_listings(folder.samples_file, listings)
            except OSError as error:
                say_here(f"warning: {folder.samples_file}: {error.strerror}; samples that change will not be named")
        observer = _open_observer(config, folder, run, data, found, machine, progress)
        stack.callback(observer.close)
        if changed:
            details = {"changed": {one.part: one.as_event() for one in changed}}
            observer.event("data_changed", run.progress.step, details)
        for name, details in events:
            observer.event(name, run.progress.step, details)
        say_here(task.describe_run(config, run, data))
        if found is None:
            for line in () if config.fast_dev_run else look(data):
                say_here(f"warning: {line}")
            task.keep_preview(folder.preview_file, config, data, ranks.world, say_here)
        warning = lr_warning(config.optimizer, run.peak_lr, run.total_batch)
        if warning:
            say_here(f"warning: {warning}")
    saver = Saver(
        run, None if progress is None or config.fast_dev_run else checkpoints, observer,
        every_steps=config.checkpoint_every_steps, every_s=config.checkpoint_every, say=say_here,
    )  # fmt: skip
    stack.callback(saver.close)
    # Everything is closed while signals are still handled: a second one must not cut that short.
    with run.stop.listening(), stack:
        try:
            train(run, observer, saver)
            if staging is not None:
                staging.settle()
        except StokerError as error:
            observer.event("left", run.progress.step, {"ending": error.name, "why": error.seen})
            if config.fast_dev_run and isinstance(error, Interrupted | Preempted):
                raise type(error)(
                    error.name, f"stopped at step {run.progress.step}; fast_dev_run saves nothing"
                ) from None
            raise
    if config.fast_dev_run:
        steps = "1 training step" if run.progress.step == 1 else f"{run.progress.step} training steps"
        say_here(f"fast_dev_run: {steps}{' and validation' if run.val_loader else ''} ran; nothing was kept")
    elif ranks.is_first:
        for line in next_lines(folder, metric):
            say_here(line)
    return _summary(run, folder) if ranks.is_first else None


def _data_changes(
    found: FoundCheckpoint,
    listings: Listings,
    contents: Contents,
    folder: RunFolder,
    config: Config,
    *,
    accept: bool,
    say: Say,
) -> list[Difference]:
    """How the data differs from the checkpoint's; raises UserError unless that is accepted."""
    # Differences that follow from a changed key are accepted: that change is reported in its own line.
    asked = {change.key for change in changes_since(found.state, config_values(config))}
    meant = {"train": {"samples_csv", "train_csv"}, "val": {"samples_csv", "val_csv", "subset_val_per_class"}}
    changed = differences_since(found.state, listings, folder.samples_file, contents)
    unmeant = [one for one in changed if not meant[one.part] & asked]
    if unmeant and not accept:
        raise data_changed(found.path, unmeant)
    for one in unmeant:
        say(f"warning: the data changed, and is accepted: {one}; {meaning([one])}")
    return changed


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


def _open_observer(
    config: HostConfig,
    folder: RunFolder,
    run: Run,
    data: RunData,
    found: FoundCheckpoint | None,
    machine: Machine,
    progress: TrainProgress,
) -> RunObserver:
    """Opens the run's files where its checkpoint left them: lines of later steps, from before a kill, are removed."""
    # In the checkpoint's own count of steps; without a checkpoint, all lines of a killed start go.
    saved = {"step": 0, "epoch": 0} if found is None else found.state["progress"]
    left = truncate_after(folder.metrics_file, saved["step"], saved["epoch"], say=progress.say)
    truncate_after(folder.clock_file, saved["step"], saved["epoch"], say=progress.say)
    resumed = found is not None or left > 0
    header = run_header(config, run, data.samples, data.storage(), cpus=machine.cpus)
    observer = RunObserver(
        MetricsFile(folder.metrics_file),
        trackers_for(config, folder, resumed_at=run.progress.step if resumed else None, say=progress.say),
        progress,
        log_every=config.log_every,
        world=run.ranks.world,
        clock_file=ClockFile(
            folder.clock_file, header, HostWatch(), step=run.progress.step, name_samples=run.name_samples
        ),
        utilisation=utilisation_of(config, run.model, run.device, run.ranks.world),
        unit=task_for(config).unit,
    )
    if found is None and run.branched_from is not None:
        observer.event("branched", 0, {"origin": run.branched_from})
    if run.progress.step > 0:
        observer.event("resumed", run.progress.step, {"epoch": run.progress.epoch, "world": run.ranks.world})
    return observer


def _summary(run: Run, folder: RunFolder) -> Summary:
    progress = run.progress
    kept = not run.config["fast_dev_run"]
    best = best_checkpoint(folder, run.metric) if kept else None
    return {
        "run_folder": str(folder.root) if kept else None,
        "finished": progress.finished,
        "epochs": progress.epoch,
        "steps": progress.step,
        "best_by": run.metric.name,
        f"best_val_{run.metric.name}": progress.best,
        "best_checkpoint": None if best is None else str(best),
        "checkpoints": str(folder.checkpoints) if kept else None,
    }


def check_devices(config: HostConfig, machine: Machine, environment: Mapping[str, str] = os.environ) -> None:
    """Refuses a config that asks for more devices than this machine has."""
    present = machine.accelerators
    if present == 1 and sees_own_device(environment):
        return  # the other processes have the other devices
    if present and config.devices > present:
        raise UserError(
            "devices-missing", f"devices: {config.devices}, but this machine has {present}", hint=f"devices={present}"
        )


def device_index(local_rank: int, visible: int, environment: Mapping[str, str] = os.environ) -> int:
    """The GPU of this process, among the `visible` ones: the one with its local rank, or the only one that srun shows
    it (`--gpus-per-task=1`). Raises UserError if there are more processes than GPUs."""
    if local_rank < visible:
        return local_rank
    if visible == 1 and sees_own_device(environment):
        return 0
    raise UserError(
        "devices-missing",
        f"this is process {local_rank + 1} of this node, and it sees {visible} GPU{'s' * (visible != 1)}",
        why="two processes on one GPU would each get half of it, and NCCL refuses them",
        hint="start one process per GPU (torchrun --nproc_per_node, srun --ntasks-per-node)",
    )


def sees_own_device(environment: Mapping[str, str]) -> bool:
    """Whether the launcher gave this process a GPU to itself, and each other process another one.

    torchrun and our own launcher give all processes of a node the same environment: one visible GPU would be shared.
    """
    if ranks_from_environment(environment) is None or "TORCHELASTIC_RUN_ID" in environment or LAUNCHED in environment:
        return False
    if any(len(_listed(environment.get(name, ""))) == 1 for name in ONE_DEVICE):
        return True
    # `1`, or with the kind of GPU, `a100:1`; newer versions of Slurm list it among others: `cpu=8,gres/gpu=1`.
    per_task, resources = environment.get("SLURM_GPUS_PER_TASK", ""), environment.get("SLURM_TRES_PER_TASK", "")
    return bool(
        re.fullmatch(r"([\w.-]+:)?1", per_task) or re.search(r"(^|,)gres/gpu[:=]([\w.-]+[:=])?1(,|$)", resources)
    )


def _listed(devices: str) -> list[str]:
    return [name for name in devices.split(",") if name.strip() not in ("", "-1", "NoDevFiles")]


def _device(ranks: Ranks) -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    index = device_index(ranks.local_rank, torch.cuda.device_count())
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def _say_nothing(_text: str) -> None:
    """For ranks that print nothing."""
