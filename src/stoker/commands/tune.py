"""`stoker tune`: finds the settings that train fastest, one change at a time, without changing the training."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from stoker.commands.options import (
    Argument,
    JsonOption,
    Option,
    OverridesArgument,
    WithScript,
    config_and_overrides,
    let_threads_sleep,
    parsed,
    refuse_given,
)
from stoker.core.errors import EXIT_INTERRUPTED, EXIT_OK, UsageError


def register(app: typer.Typer) -> None:
    app.command(cls=WithScript, epilog="Example: stoker tune configs/demo.yaml --budget 5m --pace 800")(tune)


def tune(
    context: typer.Context,
    config: Annotated[
        Path | None, Argument(metavar="CONFIG", readable=False, help="Config file; or a script after `--`.")
    ] = None,
    overrides: OverridesArgument = None,
    budget: Annotated[str, typer.Option(metavar="TIME", help="How long to search at most.")] = "20min",
    goal: Annotated[
        str,
        typer.Option(
            "--for",
            metavar="throughput|epoch-time|cost",
            help="What to improve: samples per second, the time of an epoch with its start, or the whole run with its "
            "start and compiling.",
        ),
    ] = "throughput",
    pace: Annotated[
        str | None,
        typer.Option(
            metavar="STEP_TIME|IMAGES/S|GPU",
            help="Replace the model by a consumer that takes this long for a step (25ms), or this many images per "
            "second, or is as fast as this card would be.",
        ),
    ] = None,
    trial_seconds: Annotated[
        float, typer.Option(min=0.5, help="How long a trial measures, its start not included.")
    ] = 6.0,
    write: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="The result. [default: tuned.yaml beside the config]", readable=False),
    ] = None,
    also: Annotated[
        str | None,
        typer.Option(
            metavar="precision,img_size,batch_size,mixing",
            help="Measure also what would be faster, but a different training; never part of the result.",
        ),
    ] = None,
    price: Annotated[float | None, typer.Option(min=0.0, help="Price of this machine per hour.")] = None,
    ram: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Memory for the training, e.g. 16GB. [default: what the machine has left]"),
    ] = None,
    packed: Annotated[
        list[str] | None,
        Option(
            metavar="DIR|URL",
            help="The same data packed by `stoker pack`, or a copy of it: tried instead of data_root. Counts only if "
            "every pixel is the same. Can be repeated.",
        ),
    ] = None,
    pack: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Try the data packed: images in shards, volumes in blocks of several sizes. The packs are made in "
            "DIR, beyond the budget; those that the result does not use are removed again.",
            readable=False,
        ),
    ] = None,
    ablate: Annotated[
        bool,
        typer.Option(
            "--ablate", help="Don't search: switch off one optimisation at a time, and show what each contributes."
        ),
    ] = False,
    fresh: Annotated[bool, typer.Option("--fresh", help="Ignore the journal of an interrupted search.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Overwrite a file that `stoker tune` did not write.")] = False,
    json: JsonOption = False,
) -> int:
    """Find the settings with which this config trains fastest here, input included.

    Tries one change at a time in throw-away processes, starting with what limits most: workers, engine, prefetching,
    look-ahead, decoder, compiling, memory layout. The samples, crops, labels and the total batch stay the same, and
    the plan's memory limits are kept. The winner is compared with the original from fresh starts before it is written.
    tune.jsonl beside the result records every trial; after an interruption the same command resumes.

    Any PyTorch script: `stoker tune -- python train.py -j {num_workers=4} -b {batch_size=64}` runs the command after
    `--` again and again for a few seconds, with other values in braces, and prints the fastest command. Other names
    need their values: '{decoder=pil|cv2}', in quotes.
    """
    from stoker.config.fields import parse_bytes, parse_seconds
    from stoker.tune.records import ALSO, GOALS

    script: list[str] | None = context.obj
    if goal not in GOALS:
        raise UsageError("usage", f"--for {goal} is not one of {', '.join(GOALS)}", hint="--for throughput")
    wanted = tuple(word for word in (also or "").split(",") if word)
    unknown = next((word for word in wanted if word not in ALSO), None)
    if unknown is not None:
        raise UsageError("usage", f"--also {unknown} is not one of {', '.join(ALSO)}", hint="--also precision")
    budget_s = parsed("--budget", budget, parse_seconds, "20min")
    if budget_s <= 0:
        raise UsageError("usage", f"--budget {budget} leaves no time for a trial", hint="--budget 20min")
    ram_bytes = None if ram is None else parsed("--ram", ram, parse_bytes, "16GB")

    if script is not None:
        for_config = {
            f"CONFIG ({config})": config, "--pace": pace, "--write": write, "--also": also, "--price": price,
            "--force": force, "--ablate": ablate, "--packed": packed, "--pack": pack,
        }  # fmt: skip
        hint = "stoker tune -- python train.py -j {num_workers}"
        refuse_given(for_config, "needs a config, and a script has none", hint)
    elif config is None:
        ways = "stoker tune CONFIG | stoker tune -- python train.py -j {num_workers}"
        raise UsageError("usage", "nothing to tune: neither a config nor a script given", hint=ways)
    elif config.suffix == ".py":
        hint = f"stoker tune -- python {config} -j {{num_workers}}"
        raise UsageError("usage", f"{config} is a script, not a config", hint=hint)

    let_threads_sleep()
    from stoker.core.console import print_answer
    from stoker.tune.ablate import ablate_config
    from stoker.tune.config_search import Tuned, TuneOptions, tune_config
    from stoker.tune.script_search import TunedScript, tune_script

    options = TuneOptions(
        budget_s=budget_s, trial_s=trial_seconds, goal=goal, pace=pace, write=write, also=wanted,
        price_per_hour=price, ram_bytes=ram_bytes, packed=tuple(packed or ()), pack=pack, force=force,
        fresh=fresh,
    )  # fmt: skip
    found: Tuned | TunedScript
    if script is not None:
        found = tune_script(script, options)
    else:
        assert config is not None
        path, words = config_and_overrides(config, overrides)
        if ablate:
            return print_answer(ablate_config(path, words, options), as_json=json)
        found = tune_config(path, words, options)
    print_answer(found.answer(), as_json=json)
    return EXIT_INTERRUPTED if found.outcome.stopped == "interrupted" else EXIT_OK
