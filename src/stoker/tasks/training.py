"""What one training process does, in order: data, ranks, model, checkpoint, loop."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from stoker.config import config_values
from stoker.core.console import Say, progress_bar
from stoker.core.errors import Interrupted, Preempted, StokerError
from stoker.profile.clock_file import ClockFile
from stoker.profile.host import HostConfig, HostWatch, Machine, bind_rank, usable_cpus
from stoker.run.folder import RunFolder, finished_lines, finished_summary, next_lines, record_config
from stoker.run.metrics import MetricsFile, truncate_after
from stoker.run.trackers import trackers_for
from stoker.tasks.base import RunData, metric_of, task_for
from stoker.tasks.building import RunContext, run_header
from stoker.tasks.contact_sheet import keep_with_run
from stoker.train.checkpoint.branching import Start, begin, own_checkpoint
from stoker.train.checkpoint.changes import (
    Contents,
    Difference,
    Listings,
    changes_since,
    data_changed,
    differences_since,
    fingerprint,
    meaning,
    save_listings,
)
from stoker.train.checkpoint.folder import Checkpoints, FoundCheckpoint
from stoker.train.checkpoint.restore import Resumed, load_for_resume, resume
from stoker.train.checkpoint.saver import Saver
from stoker.train.loader_adjuster import LoaderAdjuster
from stoker.train.loader_changes import Knob
from stoker.train.loop import Run, train
from stoker.train.observer import Observer, RunObserver
from stoker.train.progress_line import TrainProgress
from stoker.train.ranks import Ranks, device_of, from_first, process_group
from stoker.train.schedule import lr_warning

Summary = dict[str, Any]
ADJUSTED: dict[str, Knob] = {"prefetch_factor": "prefetch", "lookahead": "lookahead_bytes"}
"""Keys whose value is only where `adjust_loader` begins, unless the config sets them."""


@dataclass(frozen=True)
class TrainJob:
    """What `stoker train` asks its processes to do."""

    config: HostConfig
    folder: RunFolder
    machine: Machine
    checkpoint: Path | None = None
    """The one to resume from; None for the run's last one, if there is one."""
    start: Start | None = None
    """Where a new run takes its weights."""
    replan: bool = False
    """Whether another schedule than the checkpoint's is accepted."""
    accept_data: bool = False
    """Whether other data than the checkpoint's is accepted."""
    look: Callable[[Any], Sequence[str]] = lambda _data: ()
    """What is wrong with a new run, a line each."""


def train_here(job: TrainJob, ranks: Ranks, progress: TrainProgress | None, stack: ExitStack) -> Summary | None:
    """Trains on this rank, from the last checkpoint if there is one; returns the run's summary on the first rank.

    `progress` is that of the first rank, which writes and speaks for all. `stack` closes what was opened.
    """
    config, folder, task = job.config, job.folder, task_for(job.config)
    say: Say = (lambda _text: None) if progress is None else progress.say
    job, device = _settle(job, ranks, say)
    with progress_bar("listing", None) as advance:
        data = task.open_data(config, say, advance)
    if ranks.is_first:
        task.record_choice(config, data, folder, say)

    ranks = stack.enter_context(process_group(ranks, "nccl" if device.type == "cuda" else "gloo", config.rank_timeout))
    checkpoints = Checkpoints(folder.checkpoints, config.save_top_k, metric=metric_of(config_values(config)))
    # Read by one rank and sent to the others: they need not see its disk, and cannot find a different checkpoint.
    found = from_first(lambda: _last_checkpoint(job, checkpoints), ranks)
    listings = task.listings(data)
    if found is not None:
        data = task.as_it_began(found, config, data, say)

    staging = task.open_staging(config, data, ranks, say)
    if staging is not None:
        stack.callback(staging.close)
    run = task.build_run(config, data, RunContext(ranks, device, say, folder.quarantine_file, staging))
    stack.callback(run.input.close)
    contents: Contents = {} if config.fast_dev_run else from_first(lambda: task.contents(config, data), ranks)
    run = _completed(job, run, fingerprint(listings), contents)
    begun = _begin(job, run, say) if found is None else _resume(job, run, found, listings, contents, say)
    run = begun.run
    if run.progress.finished:
        return _say_the_end(run, folder, say, trained=False) if ranks.is_first else None

    observer: Observer = Observer()
    if progress is not None:
        observer = _open_observer(job, run, data, found, progress)
        stack.callback(observer.close)
        _announce(job, begun, data, listings, observer, say, is_new=found is None)
    saver = Saver(
        run, None if progress is None or config.fast_dev_run else checkpoints, observer,
        every_steps=config.checkpoint_every_steps, every_s=config.checkpoint_every, say=say,
    )  # fmt: skip
    stack.callback(saver.close)
    # Everything is closed while signals are still handled: a second one must not cut that short.
    with run.stop.listening(), stack:
        try:
            train(run, observer, saver)
            if staging is not None:
                staging.settle()
        except StokerError as error:
            raise _leaving(error, run, config, observer) from error.__cause__
    return _say_the_end(run, folder, say, trained=True) if ranks.is_first else None


def _settle(job: TrainJob, ranks: Ranks, say: Say) -> tuple[TrainJob, torch.device]:
    """Takes this rank's device and cores; the job then has the machine as this process may use it."""
    device, here = device_of(ranks), _ranks_here(job.config, ranks)
    # On a GPU, too: otherwise the few operators on the host would start as many threads in each rank as it has cores.
    torch.set_num_threads(max(1, job.machine.cpus // here))
    if device.type != "cuda" or job.config.numa_binding != "auto":
        return job, device
    if (line := bind_rank(device.index, here).describe()) is not None:
        say(line)
    return replace(job, machine=replace(job.machine, cpus=usable_cpus())), device


def _ranks_here(config: HostConfig, ranks: Ranks) -> int:
    """Processes of this run on this node."""
    return ranks.local_world or max(1, ranks.world // config.num_nodes)


def _last_checkpoint(job: TrainJob, checkpoints: Checkpoints) -> FoundCheckpoint | None:
    if job.start is None:
        return load_for_resume(checkpoints, job.checkpoint)
    return own_checkpoint(checkpoints, job.start)


def _completed(job: TrainJob, run: Run, samples: Any, contents: Contents) -> Run:
    """The run with what identifies its data, and with a loader that adjusts itself if the config wants that."""
    run = replace(run, record=replace(run.record, data={**run.record.data, "samples": samples, "contents": contents}))
    if not job.config.adjust_loader:
        return run
    chosen = frozenset(knob for key, knob in ADJUSTED.items() if key in job.config.model_fields_set)
    adjuster = LoaderAdjuster(job.machine.cpus / _ranks_here(job.config, run.ranks), fixed=chosen)
    return replace(run, input=replace(run.input, adjust_loader=adjuster.after_step))


def _begin(job: TrainJob, run: Run, say: Say) -> Resumed:
    if job.replan:
        say("--replan: a new run, which begins with its own schedule")
    return Resumed(run if job.start is None else begin(run, job.start, say), ())


def _resume(
    job: TrainJob, run: Run, found: FoundCheckpoint, listings: Listings, contents: Contents, say: Say
) -> Resumed:
    for note in found.notes:
        say(f"warning: {note}")
    run, events = resume(run, found, say, replan=job.replan)
    if run.progress.finished:
        return Resumed(run, ())
    if changed := _data_changes(job, found, listings, contents, say):
        events = (("data_changed", {"changed": {one.part: one.as_event() for one in changed}}), *events)
    say(f"resuming from {found.path.name}: epoch {run.progress.epoch}, step {run.progress.step:,}")
    return Resumed(run, events)


def _data_changes(
    job: TrainJob, found: FoundCheckpoint, listings: Listings, contents: Contents, say: Say
) -> list[Difference]:
    """How the data differs from the checkpoint's; raises UserError unless that is accepted."""
    # Differences that follow from a changed key are accepted: that change is reported in its own line.
    asked = {change.key for change in changes_since(found.state, config_values(job.config))}
    meant = {"train": {"samples_csv", "train_csv"}, "val": {"samples_csv", "val_csv", "subset_val_per_class"}}
    changed = differences_since(found.state, listings, job.folder.samples_file, contents)
    unmeant = [one for one in changed if not meant[one.part] & asked]
    if unmeant and not job.accept_data:
        raise data_changed(found.path, unmeant)
    for one in unmeant:
        say(f"warning: the data changed, and is accepted: {one}; {meaning([one])}")
    return changed


def _open_observer(
    job: TrainJob, run: Run, data: RunData, found: FoundCheckpoint | None, progress: TrainProgress
) -> RunObserver:
    """Opens the run's files where its checkpoint left them: lines of later steps, from before a kill, are removed."""
    config, folder, task = job.config, job.folder, task_for(job.config)
    record_config(folder, config)
    # In the checkpoint's own count of steps; without a checkpoint, all lines of a killed start go.
    saved = {"step": 0, "epoch": 0} if found is None else found.state["progress"]
    left = truncate_after(folder.metrics_file, saved["step"], saved["epoch"], say=progress.say)
    truncate_after(folder.clock_file, saved["step"], saved["epoch"], say=progress.say)
    resumed = found is not None or left > 0
    header = run_header(config, run, data, job.machine.cpus)
    observer = RunObserver(
        MetricsFile(folder.metrics_file, when_restored=lambda: record_config(folder, config)),
        trackers_for(
            config, folder, scores=task.scores, resumed_at=run.progress.step if resumed else None, say=progress.say
        ),
        progress,
        log_every=config.log_every,
        world=run.ranks.world,
        clock_file=ClockFile(
            folder.clock_file, header, HostWatch(), step=run.progress.step, name_samples=run.input.name_samples
        ),
        utilisation=task.utilisation_of(config, run.model, run.device, run.ranks.world),
        unit=task.unit,
    )
    if found is None and run.record.branched_from is not None:
        observer.event("branched", 0, {"origin": run.record.branched_from})
    if run.progress.step > 0:
        observer.event("resumed", run.progress.step, {"epoch": run.progress.epoch, "world": run.ranks.world})
    return observer


def _announce(
    job: TrainJob, begun: Resumed, data: Any, listings: Listings, observer: RunObserver, say: Say, *, is_new: bool
) -> None:
    """Writes down and says what is about to be trained."""
    config, folder, run, task = job.config, job.folder, begun.run, task_for(job.config)
    changed = any(name == "data_changed" for name, _ in begun.events)
    if not config.fast_dev_run and (is_new or changed or not folder.samples_file.exists()):
        try:
            save_listings(folder.samples_file, listings)
        except OSError as error:
            say(f"warning: {folder.samples_file}: {error.strerror}; samples that change will not be named")
    for name, details in begun.events:
        observer.event(name, run.progress.step, details)
    say(task.describe_run(config, run, data))
    if is_new:
        for line in () if config.fast_dev_run else job.look(data):
            say(f"warning: {line}")
        keep_with_run(task, folder.preview_file, config, data, run.ranks.world, say)
    warning = lr_warning(config.optimizer, run.schedule.peak_lr, run.schedule.total_batch)
    if warning and "lr_reference_batch" not in config.model_fields_set:
        say(f"warning: {warning}")


def _leaving(error: StokerError, run: Run, config: HostConfig, observer: Observer) -> StokerError:
    """The error that ends the run, reported; that of a `fast_dev_run` says that nothing is saved."""
    observer.event("left", run.progress.step, {"ending": error.name, "why": error.seen})
    if config.fast_dev_run and isinstance(error, Interrupted | Preempted):
        return type(error)(error.name, f"stopped at step {run.progress.step}; fast_dev_run saves nothing")
    return error


def _say_the_end(run: Run, folder: RunFolder, say: Say, *, trained: bool) -> Summary:
    """Says how the run ended and what to type next; returns its summary."""
    metric, progress = run.scores.metric, run.progress
    summary = finished_summary(folder, metric, vars(progress)) | {"finished": progress.finished}
    if run.record.config["fast_dev_run"]:
        steps = "1 training step" if progress.step == 1 else f"{progress.step} training steps"
        say(f"fast_dev_run: {steps}{' and validation' if run.input.val_loader else ''} ran; nothing was kept")
        return summary | dict.fromkeys(("run_folder", "best_checkpoint", "checkpoints"))
    for line in next_lines(folder, metric) if trained else finished_lines(folder, metric, vars(progress)):
        say(line)
    return summary
