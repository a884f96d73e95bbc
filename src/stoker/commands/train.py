"""`stoker train`: trains the model a config describes, or resumes the run."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stoker.commands.options import (
    AverageOption,
    ConfigArgument,
    FromOption,
    JsonOption,
    OverridesArgument,
    config_and_overrides,
    let_threads_sleep,
    own_command,
)
from stoker.core.console import say, say_notes
from stoker.core.errors import EXIT_OK, UsageError

if TYPE_CHECKING:
    from stoker.train.checkpoint.branching import Start


def register(app: typer.Typer) -> None:
    app.command(epilog="Example: stoker train configs/rsb_a3.yaml data_root=/data/imagenet devices=4")(train)


def train(
    config: ConfigArgument,
    overrides: OverridesArgument = None,
    resume: Annotated[
        Path | None, typer.Option(metavar="CKPT", help="Resume from this checkpoint instead of the run's last.")
    ] = None,
    from_: FromOption = None,
    ema: AverageOption = None,
    keep_optimizer: Annotated[
        bool, typer.Option("--keep-optimizer", help="With --from: also its optimizer's state, if that is the same.")
    ] = False,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Start over; the earlier run's files are moved to a folder beside it.")
    ] = False,
    replan: Annotated[
        bool,
        typer.Option(
            "--replan", help="Resume with another schedule (epochs, lr, warmup, …), which applies from this step on."
        ),
    ] = False,
    accept_changed_data: Annotated[
        bool,
        typer.Option(
            "--accept-changed-data",
            help="Resume although samples were added, removed, renamed, relabelled or overwritten.",
        ),
    ] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Start even if the plan says that memory or disk will run out.")
    ] = False,
    json: JsonOption = False,
) -> int:
    """Train a model. The same command resumes a run that was stopped; a finished run is left alone."""
    let_threads_sleep()
    from stoker.core.console import print_json

    path, settings = config_and_overrides(config, overrides)
    if not (resume or from_ or fresh or replan) and (done := _finished(path, settings)) is not None:
        if json:
            print_json(done)
        return EXIT_OK
    from stoker.train.checkpoint.branching import start_from

    start = start_from(from_, ema=ema, keep_optimizer=keep_optimizer)
    code, summary = train_from_config(
        path, settings, resume, fresh, force=force, replan=replan, accept_data=accept_changed_data, start=start
    )
    if json and summary is not None:
        print_json(summary)
    return code


def train_from_config(
    path: Path,
    overrides: Sequence[str],
    checkpoint: Path | None,
    fresh: bool,
    *,
    force: bool = False,
    replan: bool = False,
    accept_data: bool = False,
    start: Start | None = None,
) -> tuple[int, dict[str, Any] | None]:
    """Trains, or starts the processes that do; returns the exit code and, on the first rank, the run's summary."""
    let_threads_sleep()
    from stoker.config import config_values
    from stoker.config.reading import load_for_command
    from stoker.io import outage
    from stoker.plan.guard import refuse_what_cannot_fit
    from stoker.profile.host import fit_to_machine, read_machine
    from stoker.run.folder import open_run, run_folder_for
    from stoker.tasks.base import metric_of
    from stoker.tasks.building import no_data, trial_run
    from stoker.tasks.training import TrainJob, train_here
    from stoker.train.checkpoint.branching import check_start
    from stoker.train.compute import accelerator_of
    from stoker.train.launch import launch, launched_here
    from stoker.train.progress_line import TrainLog, TrainProgress
    from stoker.train.ranks import Ranks, check_devices, ranks_from_environment
    from stoker.verify.run_checks import warnings_before_training

    ranks = ranks_from_environment()
    loaded = trial_run(load_for_command(path, overrides).config)
    if loaded.fast_dev_run and checkpoint is not None:
        raise UsageError("usage", "fast_dev_run begins with a new model", hint="leave out --resume")
    if loaded.data_root is None:
        raise no_data(loaded)  # before the plan talks about memory for data that was not named
    accelerator_of(loaded)  # refuses an unknown name before anything starts, on every rank
    machine = read_machine()
    config, notes = fit_to_machine(loaded, machine)
    if ranks is None or ranks.is_first:
        say_notes(notes)
    check_devices(config, machine)
    folder = run_folder_for(config, path)
    if checkpoint is not None and not checkpoint.exists() and (of_run := folder.root / checkpoint).exists():
        checkpoint = of_run  # named as it is called in the run folder
    if start is not None and (ranks is None or ranks.is_first):
        check_start(start, folder.checkpoints, resume=checkpoint, weights=config.weights, fresh=fresh)
    if ranks is None or (ranks.local_rank == 0 and not launched_here()):
        # Once on each node, before any process is started: those of our own launcher come later.
        refuse_what_cannot_fit(config, path, machine, force=force)
    if ranks is None and config.devices * config.num_nodes > 1:
        return launch(own_command(), config.devices, config.num_nodes), None
    ranks = ranks or Ranks()
    with ExitStack() as stack:
        if config.fast_dev_run:
            nowhere = stack.enter_context(TemporaryDirectory(prefix="stoker-"))
            config = config.model_copy(update={"runs_dir": nowhere})
        folder = run_folder_for(config, path)
        progress = None
        outage.told_elsewhere()  # in the progress line, by the first rank
        if ranks.is_first:
            opened = open_run(config, path, fresh=fresh)
            stack.enter_context(opened)
            if opened.set_aside is not None:
                say(f"the earlier run is kept in {opened.set_aside}")
                if checkpoint is not None and checkpoint.resolve().parent == folder.checkpoints.resolve():
                    checkpoint = opened.set_aside / folder.checkpoints.name / checkpoint.name  # moved with the rest
                start = start and start.moved(folder.root, opened.set_aside)
            metric = metric_of(config_values(config)).key
            progress = TrainProgress(TrainLog(folder.logs), metric=metric, waiting=outage.text)
            stack.callback(progress.close)

        def look(data: Any) -> list[str]:
            return warnings_before_training(config, path, overrides, machine, data)

        job = TrainJob(config, folder, machine, checkpoint, start, replan=replan, accept_data=accept_data, look=look)
        return EXIT_OK, train_here(job, ranks, progress, stack)


def _finished(path: Path, overrides: Sequence[str]) -> dict[str, Any] | None:
    """The summary of a run that is finished with this config; None if it is not, or if other processes belong to it.
    Answered before torch is imported."""
    from stoker.config import config_values
    from stoker.config.reading import load_for_command
    from stoker.profile.host import fit_to_machine, read_machine
    from stoker.run.folder import finished_lines, finished_progress, finished_summary, run_folder_for
    from stoker.tasks.base import metric_of
    from stoker.train.ranks import ranks_from_environment

    if ranks_from_environment() is not None:
        return None
    loaded = load_for_command(path, overrides).config
    if loaded.fast_dev_run:
        return None
    config, notes = fit_to_machine(loaded, read_machine())
    folder = run_folder_for(config, path)
    progress = finished_progress(folder, config)
    if progress is None:
        return None
    say_notes(notes)
    metric = metric_of(config_values(config))
    for line in finished_lines(folder, metric, progress):
        say(line)
    return finished_summary(folder, metric, progress)
