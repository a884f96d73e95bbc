"""`stoker train`: trains what a config describes, or goes on where it stopped."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from stoker.commands.options import ConfigArgument, JsonOption, OverridesArgument, SetOption


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
    from stoker.commands.cpu_threads import let_threads_sleep

    let_threads_sleep()
    from stoker.commands.training import train_from_config
    from stoker.output.json_document import print_json

    code, summary = train_from_config(config, [*(overrides or ()), *(set_ or ())], resume, fresh, force=force)
    if json and summary is not None:
        print_json(summary)
    return code
