"""What one training process does, in order: data, ranks, model, checkpoint, loop."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from stoker.clock.file import ClockFile
from stoker.config import Config
from stoker.console import progress_bar, say
from stoker.errors import StokerError, UserError
from stoker.files import write_text
from stoker.machine.host import HostWatch, Machine
from stoker.run.folder import RunFolder
from stoker.run.metrics import MetricsFile, truncate_after
from stoker.run.trackers import trackers_for
from stoker.tasks.classify import build_run, describe_run, open_data
from stoker.tasks.image_data import chosen_record
from stoker.train.checkpoint.folder import Checkpoints
from stoker.train.checkpoint.restore import resume
from stoker.train.checkpoint.saver import load_for_resume
from stoker.train.compute import utilisation_of
from stoker.train.loop import Run, train
from stoker.train.observer import RunObserver, run_header
from stoker.train.progress_line import TrainProgress
from stoker.train.ranks import Ranks, from_first, process_group
from stoker.train.schedule import lr_warning

Summary = dict[str, Any]


def train_here(
    config: Config,
    folder: RunFolder,
    ranks: Ranks,
    machine: Machine,
    checkpoint: Path | None,
    progress: TrainProgress | None,
    stack: ExitStack,
) -> Summary | None:
    """Trains on this rank, from the last checkpoint where there is one; on the first rank what came of it."""
    device = _device(ranks)
    if device.type == "cpu":
        here = ranks.local_world or max(1, ranks.world // config.num_nodes)
        torch.set_num_threads(max(1, machine.cpus // here))
    say_here = _say_nothing if progress is None else progress.say
    with progress_bar("listing", None) as advance:
        data = open_data(config, say_here, advance)
    chosen = chosen_record(config, data.train, data.val)
    if chosen is not None and ranks.is_first:
        say_here(f"classes: {', '.join(chosen['classes'])}")
        write_text(folder.subset_file, json.dumps(chosen, indent=1) + "\n")
    stack.enter_context(process_group(ranks, "nccl" if device.type == "cuda" else "gloo", config.rank_timeout))
    workers = config.num_workers if isinstance(config.num_workers, int) else machine.cpus
    run = build_run(config, data, ranks, device, workers=workers, quarantine_file=folder.quarantine_file, say=say_here)
    stack.callback(run.close)
    checkpoints = Checkpoints(folder.checkpoints, config.save_top_k)
    # Read by one rank and sent to the others: they need not see its disk, and cannot find another one.
    found = from_first(lambda: load_for_resume(checkpoints, checkpoint), ranks)
    if found is not None:
        state, where, notes = found
        for note in notes:
            say_here(f"warning: {note}")
        resume(run, state, where, say_here)
        if run.progress.finished:
            say_here(
                f"{folder.root} is finished: {run.progress.step:,} steps, best val/acc1 {_percent(run.progress.best)}"
            )
            return _summary(run, folder) if ranks.is_first else None
        say_here(f"going on from {where.name}: epoch {run.progress.epoch}, step {run.progress.step:,}")
    if progress is not None:
        # As the checkpoint counts them; without one, what a killed start has told is taken back as a whole.
        saved = {"step": 0, "epoch": 0} if found is None else found[0]["progress"]
        left = truncate_after(folder.metrics_file, saved["step"], saved["epoch"])
        truncate_after(folder.clock_file, saved["step"], saved["epoch"])
        header = run_header(config, data.train, run, workers=workers, cpus=machine.cpus)
        clock = ClockFile(folder.clock_file, header, HostWatch(), step=run.progress.step, name_samples=run.name_samples)
        _listen(run, config, folder, checkpoints, progress, clock, stack, resumed=found is not None or left > 0)
        say_here(describe_run(config, run, data))
        warning = lr_warning(config.optimizer, run.peak_lr, run.total_batch)
        if warning:
            say_here(f"warning: {warning}")
    stack.callback(run.saver.close)
    # What is open is closed while signals are still taken: a second notice must not cut that short.
    with run.stop.listening(), stack:
        try:
            train(run)
        except StokerError as error:
            run.observer.event("left", run.progress.step, {"ending": error.name, "why": error.seen})
            raise
    return _summary(run, folder) if ranks.is_first else None


def _listen(
    run: Run,
    config: Config,
    folder: RunFolder,
    checkpoints: Checkpoints,
    progress: TrainProgress,
    clock: ClockFile,
    stack: ExitStack,
    *,
    resumed: bool,
) -> None:
    """The first rank writes and speaks for all."""
    trackers = trackers_for(config, folder, resumed_at=run.progress.step if resumed else None, say=progress.say)
    metrics = MetricsFile(folder.metrics_file)
    world = run.ranks.world
    observer = RunObserver(
        metrics, trackers, progress, log_every=config.log_every, world=world, clock_file=clock,
        utilisation=utilisation_of(config, run.saver.parts.model, run.device, world),
    )  # fmt: skip
    stack.callback(observer.close)
    run.observer = observer
    run.saver.checkpoints = checkpoints
    run.saver.say = progress.say
    run.saver.before_write = metrics.sync
    run.saver.told = lambda name, details: observer.event(name, run.progress.step, details)
    if run.progress.step > 0:
        observer.event("resumed", run.progress.step, {"epoch": run.progress.epoch, "world": run.ranks.world})


def _summary(run: Run, folder: RunFolder) -> Summary:
    progress = run.progress
    return {
        "run_folder": str(folder.root),
        "finished": progress.finished,
        "epochs": progress.epoch,
        "steps": progress.step,
        "best_val_acc1": progress.best,
        "checkpoints": str(folder.checkpoints),
    }


def devices_here(config: Config, machine: Machine) -> int:
    """How many devices of this node train; raises where there are not as many."""
    devices = config.devices if isinstance(config.devices, int) else max(1, machine.accelerators or 1)
    present = machine.accelerators
    if present and devices > present:
        raise UserError(
            "devices-missing", f"devices: {devices}, but this machine has {present}", hint=f"devices={present}"
        )
    return devices


def _device(ranks: Ranks) -> torch.device:
    if torch.cuda.is_available():
        if ranks.local_rank >= torch.cuda.device_count():
            raise UserError(
                "devices-missing",
                f"this is process {ranks.local_rank + 1} of this node, which has {torch.cuda.device_count()} GPUs",
                hint="as many processes as GPUs (torchrun --nproc_per_node, srun --ntasks-per-node)",
            )
        torch.cuda.set_device(ranks.local_rank)
        return torch.device("cuda", ranks.local_rank)
    return torch.device("cpu")


def set_aside(folder: RunFolder) -> list[Path]:
    """Keeps what an earlier run left, under another name: a slip of the finger must not cost ten days.

    The new folder, where there was something to keep.
    """
    for number in range(1, 10_000):
        aside = folder.root / f"before-fresh-{number}"
        if not aside.exists():
            break
    kept = [file for file in folder.of_one_run if file.exists()]
    if not kept:
        return []
    aside.mkdir()
    for file in kept:
        file.rename(aside / file.name)
    say(f"the earlier run is kept in {aside}")
    return [aside]


def _percent(value: float | None) -> str:
    return "none" if value is None else f"{value:.2f}%"


def _say_nothing(_text: str) -> None:
    """For ranks that do not speak."""
