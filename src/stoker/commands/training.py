"""The steps of `stoker train`, in order: config, ranks, folder, data, model, checkpoint, loop."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from stoker.commands.guard import refuse_what_cannot_fit
from stoker.commands.load import load_for_command
from stoker.config import Config, fit_to_machine
from stoker.errors import EXIT_OK, StokerError, UserError
from stoker.facts import Machine
from stoker.files import write_text
from stoker.output.clock_file import ClockFile
from stoker.output.metrics_file import MetricsFile, truncate_after
from stoker.output.progress import progress_bar
from stoker.output.run_observer import RunObserver
from stoker.output.text import say, say_notes
from stoker.output.trackers import trackers_for
from stoker.output.train_log import TrainLog
from stoker.output.train_progress import TrainProgress
from stoker.probe.host import read_machine
from stoker.run_folder import RunFolder, open_run, run_folder_for
from stoker.tasks.classify import build_run, describe_run, open_data
from stoker.tasks.clock_header import run_header
from stoker.tasks.image_data import chosen_record
from stoker.training.checkpoints import Checkpoints
from stoker.training.launch import launch, launched_here
from stoker.training.loop import Run, train
from stoker.training.ranks import Ranks, from_first, process_group, ranks_from_environment
from stoker.training.resuming import resume
from stoker.training.saving import load_for_resume
from stoker.training.schedule import lr_warning
from stoker.training.utilisation import accelerator_of, utilisation_of

Summary = dict[str, Any]


def train_from_config(
    path: Path, overrides: Sequence[str], checkpoint: Path | None, fresh: bool, *, force: bool = False
) -> tuple[int, Summary | None]:
    """Trains, or starts the processes that do; the exit code, and on the first rank what came of it."""
    ranks = ranks_from_environment()
    speaks = ranks is None or ranks.is_first
    config = load_for_command(path, overrides, None).config
    if config.task != "classify":
        raise UserError("task-not-built", f"task: {config.task} cannot be trained yet", hint="task=classify")
    accelerator_of(config)  # a name that nobody knows is refused before anything starts, on every rank
    machine = read_machine()
    config, notes = fit_to_machine(config, machine)
    if speaks:
        say_notes(notes)
    devices = _devices(config, machine)
    if ranks is None or (ranks.local_rank == 0 and not launched_here()):
        # Once on each node, before anything is started: the processes of our own launcher come after it.
        refuse_what_cannot_fit(config.model_copy(update={"devices": devices}), path, machine, force=force)
    if ranks is None and devices * config.num_nodes > 1:
        return launch(["-m", "stoker", *sys.argv[1:]] if _is_program() else sys.argv, devices, config.num_nodes), None
    ranks = ranks or Ranks()
    folder = run_folder_for(config, path)
    with ExitStack() as stack:
        progress = None
        if ranks.is_first:
            aside: list[Path] = []
            stack.enter_context(
                open_run(config, path, entered=(lambda found: aside.extend(_set_aside(found))) if fresh else None)
            )
            if aside and checkpoint is not None and checkpoint.resolve().parent == folder.checkpoints.resolve():
                checkpoint = aside[0] / folder.checkpoints.name / checkpoint.name  # it was set aside as well
            progress = TrainProgress(TrainLog(folder.logs))
            stack.callback(progress.close)
        return EXIT_OK, _train(config, folder, ranks, machine, checkpoint, progress, stack)


def _train(
    config: Config,
    folder: RunFolder,
    ranks: Ranks,
    machine: Machine,
    checkpoint: Path | None,
    progress: TrainProgress | None,
    stack: ExitStack,
) -> Summary | None:
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
        clock = ClockFile(folder.clock_file, header, step=run.progress.step, name_samples=run.name_samples)
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


def _devices(config: Config, machine: Machine) -> int:
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


def _set_aside(folder: RunFolder) -> list[Path]:
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


def _is_program() -> bool:
    """Whether this is `stoker` itself, and not a script of another name that calls it."""
    return Path(sys.argv[0]).name in ("stoker", "__main__.py")


def _percent(value: float | None) -> str:
    return "none" if value is None else f"{value:.2f}%"


def _say_nothing(_text: str) -> None:
    """For ranks that do not speak."""
