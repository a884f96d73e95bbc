"""`stoker plan`: what a config needs on a machine, before anything runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from stoker.commands.options import ConfigArgument, JsonOption, OverridesArgument


def register(app: typer.Typer) -> None:
    app.command(
        epilog="Example: stoker plan configs/single_gpu_full.yaml --gpu a10g --cpus 16 --ram 62GB --price 1.21"
    )(plan)


def plan(
    config: ConfigArgument,
    overrides: OverridesArgument = None,
    gpu: Annotated[
        str | None, typer.Option(help="Accelerator to plan for: a name such as a10g, or your own datasheet.yaml.")
    ] = None,
    cpus: Annotated[int | None, typer.Option(help="CPUs per node, as the cloud counts them: hyper-threads.")] = None,
    cores: Annotated[int | None, typer.Option(help="Physical cores behind --cpus; without it, half as many.")] = None,
    ram: Annotated[str | None, typer.Option(help="Memory per node, with a unit: 62GB.")] = None,
    shm: Annotated[str | None, typer.Option(help="Size of /dev/shm: 8GB.")] = None,
    disk: Annotated[str | None, typer.Option(help="Free disk space for checkpoints and cache: 500GB.")] = None,
    price: Annotated[float | None, typer.Option(min=0.0, help="Price per node and hour.")] = None,
    storage: Annotated[
        str | None, typer.Option(help="Where the data is: s3, fsx, gp3, local, or a rate such as 500MB/s.")
    ] = None,
    samples: Annotated[
        int | None, typer.Option(min=1, help="Number of training images, if the data is not on this machine.")
    ] = None,
    measure: Annotated[
        bool, typer.Option("--measure", help="Measure the speed and memory of the loader here; takes some ten seconds.")
    ] = False,
    write_tiers: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Write a conservative, a balanced and an aggressive config for the machine."),
    ] = None,
    plot: Annotated[Path | None, typer.Option(metavar="FILE.png", help="Also draw the budget as a picture.")] = None,
    json: JsonOption = False,
) -> int:
    """Estimate whether a config fits in VRAM, RAM, /dev/shm and disk, how long it takes and what it costs.

    Without options the plan is for this machine. Nothing is trained and no accelerator is needed: the step of the real
    model is traced on tensors without memory. Exits with 1 if something does not fit.
    """
    from stoker.core.console import Answer, print_answer, say
    from stoker.plan.planning import WantedMachine, plan_config
    from stoker.plan.summary import plan_text, plot_plan
    from stoker.plan.tiers import write_tier_configs

    wanted = WantedMachine(gpu, cpus, ram, shm, disk, price, storage, samples, measure, cores)
    planned = plan_config(config, overrides or (), wanted)
    if plot is not None:
        plot_plan(planned.plan, config.name, plot)
        say(f"picture: {plot}")
    if write_tiers is not None:
        for path in write_tier_configs(planned, write_tiers):
            say(f"written: {path}")
    plan = planned.plan
    return print_answer(Answer(plan_text(plan, config.name), plan.as_dict(), not plan.refused), as_json=json)
