"""`stoker lr-find`: a learning rate for a config, by a range test that leaves nothing behind."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from stoker.commands.options import ConfigArgument, JsonOption, OverridesArgument, SetOption, let_threads_sleep
from stoker.errors import EXIT_FINDING, EXIT_OK, UsageError


def register(app: typer.Typer) -> None:
    app.command(name="lr-find", epilog="Example: stoker lr-find configs/rsb_a3.yaml --plot lr.png")(lr_find)


def lr_find(
    config: ConfigArgument,
    overrides: OverridesArgument = None,
    set_: SetOption = None,
    lowest: Annotated[float, typer.Option("--min", help="Learning rate to begin with.")] = 1e-6,
    highest: Annotated[float, typer.Option("--max", help="Learning rate to end with.")] = 10.0,
    steps: Annotated[int, typer.Option(min=10, help="Steps between them, equal ratios apart.")] = 100,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE.png", help="Where the curve goes; none when not given.")
    ] = None,
    json: JsonOption = False,
) -> int:
    """Print the learning rate at which the loss falls fastest, as the line to type.

    The test trains a model of its own in a process of its own, on the config's data with its augmentation, and
    ends early where the loss runs away. No run folder, no checkpoint. Exits with 1 where the loss never fell.
    """
    if not 0 < lowest < highest:
        raise UsageError("usage", f"--min {lowest:g} has to be above 0 and below --max {highest:g}")
    if plot is not None and (plot.suffix != ".png" or not plot.absolute().parent.is_dir()):
        # A slip here must not cost a minute first.
        raise UsageError("usage", f"--plot {plot} is no PNG file in a folder that exists", hint="--plot lr.png")

    let_threads_sleep()  # the process of the test inherits it
    from stoker.console import print_json, print_result, say
    from stoker.tasks.lr_find import find_lr, lr_text, plot_lr

    found = find_lr(config, [*(overrides or ()), *(set_ or ())], lowest, highest, steps)
    if plot is not None:
        plot_lr(found, plot)
        say(f"picture: {plot}")
    if json:
        print_json(found.as_dict())
    else:
        print_result(lr_text(found))
    return EXIT_OK if found.suggestion is not None else EXIT_FINDING
