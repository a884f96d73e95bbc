"""`stoker train`: trains what a config describes, or goes on where it stopped."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import typer

from stoker.commands.options import ConfigArgument, JsonOption, OverridesArgument, SetOption, let_threads_sleep
from stoker.console import say_notes
from stoker.errors import EXIT_OK, UserError


def register(app: typer.Typer) -> None:
    app.command(epilog="Example: stoker train configs/rsb_a3.yaml data_root=/data/imagenet devices=4")(train)


def train(
    config: ConfigArgument,
    overrides: OverridesArgument = None,
    set_: SetOption = None,
    resume: Annotated[
        Path | None, typer.Option(metavar="CKPT", help="Go on from this checkpoint instead of the run's last.")
    ] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Begin anew; the old checkpoints are set aside.")] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Start even where the plan says that memory or disk will not last.")
    ] = False,
    json: JsonOption = False,
) -> int:
    """Train. Run the same command again to go on; a finished run says so and does nothing."""
    from stoker.console import print_json

    code, summary = train_from_config(config, [*(overrides or ()), *(set_ or ())], resume, fresh, force=force)
    if json and summary is not None:
        print_json(summary)
    return code


def train_from_config(
    path: Path, overrides: Sequence[str], checkpoint: Path | None, fresh: bool, *, force: bool = False
) -> tuple[int, dict[str, Any] | None]:
    """Trains, or starts the processes that do; the exit code, and on the first rank what came of it."""
    let_threads_sleep()
    from stoker.config.reading import load_for_command
    from stoker.machine.host import fit_to_machine, read_machine
    from stoker.plan.guard import refuse_what_cannot_fit
    from stoker.run.folder import open_run, run_folder_for
    from stoker.tasks.training import devices_here, set_aside, train_here
    from stoker.train.compute import accelerator_of
    from stoker.train.launch import launch, launched_here
    from stoker.train.progress_line import TrainLog, TrainProgress
    from stoker.train.ranks import Ranks, ranks_from_environment

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
    devices = devices_here(config, machine)
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
                open_run(config, path, entered=(lambda found: aside.extend(set_aside(found))) if fresh else None)
            )
            if aside and checkpoint is not None and checkpoint.resolve().parent == folder.checkpoints.resolve():
                checkpoint = aside[0] / folder.checkpoints.name / checkpoint.name  # it was set aside as well
            progress = TrainProgress(TrainLog(folder.logs))
            stack.callback(progress.close)
        return EXIT_OK, train_here(config, folder, ranks, machine, checkpoint, progress, stack)


def _is_program() -> bool:
    """Whether this is `stoker` itself, and not a script of another name that calls it."""
    return Path(sys.argv[0]).name in ("stoker", "__main__.py")
