"""`stoker lr-find`: suggests a learning rate for a config by a range test that leaves nothing behind."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from stoker.commands.options import (
    AverageOption,
    ConfigArgument,
    FromOption,
    JsonOption,
    OverridesArgument,
    check_picture,
    let_threads_sleep,
)
from stoker.core.errors import UsageError


def register(app: typer.Typer) -> None:
    app.command(name="lr-find", epilog="Example: stoker lr-find configs/rsb_a3.yaml --plot lr.png")(lr_find)


def lr_find(
    config: ConfigArgument,
    overrides: OverridesArgument = None,
    lowest: Annotated[float, typer.Option("--min", help="Lowest learning rate, at the first step.")] = 1e-6,
    highest: Annotated[float, typer.Option("--max", help="Highest learning rate, at the last step.")] = 10.0,
    steps: Annotated[
        int, typer.Option(min=10, help="Number of steps; the rate grows by the same factor at each.")
    ] = 100,
    sweeps: Annotated[
        int, typer.Option(min=1, max=50, help="How often to repeat the test; more narrow the interval.")
    ] = 3,
    from_: FromOption = None,
    ema: AverageOption = None,
    plot: Annotated[Path | None, typer.Option(metavar="FILE.png", help="Draw the curve into this file.")] = None,
    json: JsonOption = False,
) -> int:
    """Print the learning rate at which the loss falls fastest, as the KEY=VALUE to type, and how sure that is.

    The test trains in a separate process, on the config's data with its augmentation: a fresh model, or with --from a
    checkpoint, in mid-run with its optimizer's state. Each sweep ends early if the loss diverges. It writes no run
    folder and no checkpoint. Exits with 1 if there is nothing to suggest: the loss never fell by more than its noise.
    """
    if not 0 < lowest < highest:
        raise UsageError("usage", f"--min {lowest:g} must be above 0 and below --max {highest:g}")
    if plot is not None:
        check_picture("--plot", plot, "lr.png")

    let_threads_sleep()  # inherited by the test's process
    from stoker.core.console import Answer, print_answer, say
    from stoker.tune.lr_find import find_lr, lr_text, plot_lr

    start = None
    if from_ is not None or ema is not None:
        from stoker.train.checkpoint.branching import start_from  # imports torch, which only the test's process needs

        start = start_from(from_, ema=ema, keep_optimizer=None)
    found = find_lr(config, overrides or (), lowest, highest, steps, sweeps=sweeps, start=start)
    if plot is not None:
        plot_lr(found, plot)
        say(f"picture: {plot}")
    return print_answer(Answer(lr_text(found), found.as_dict(), found.suggestion is not None), as_json=json)
