"""`stoker verify`: checks a run before it starts, and says what would go wrong and how to fix it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from stoker.commands.options import CONFIG, JsonOption, OverridesArgument, let_threads_sleep, own_command
from stoker.core.errors import EXIT_OK, UsageError


def register(app: typer.Typer) -> None:
    app.command(epilog="Example: stoker verify configs/rsb_a2.yaml data_root=/data/imagenet")(verify)


def verify(
    config: Annotated[Path | None, CONFIG] = None,
    overrides: OverridesArgument = None,
    skip: Annotated[
        list[str] | None, typer.Option("--skip", metavar="NAME", help="Leave out this check; can be repeated.")
    ] = None,
    deep: Annotated[bool, typer.Option("--deep", help="Also run the checks that take minutes.")] = False,
    weights: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="A trained network or its run folder, to judge the labels.", readable=False),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Folder for pictures. Default: the user's cache folder.")
    ] = None,
    price: Annotated[float | None, typer.Option(min=0.0, help="Price per node and hour, for the cost.")] = None,
    list_: Annotated[bool, typer.Option("--list", help="List every check, and run none.")] = False,
    json: JsonOption = False,
) -> int:
    """Check a config, its data, labels and model, this machine and its ranks, before a run starts.

    Each check is ✓ (fine), ✗ (wrong, with the command that fixes it) or ? (could not be checked). Takes less than two
    minutes, trains nothing and leaves no run folder behind. With several devices or nodes, the ranks are started as
    `stoker train` starts them. Exits with 1 if a check fails.
    """
    from stoker.core.console import Answer, print_answer
    from stoker.verify.run_checks import all_checks, choose_checks, list_json, list_text, run_and_show, verify_text

    if list_:
        return print_answer(Answer(list_text(all_checks()), list_json(all_checks())), as_json=json)
    if config is None:
        raise UsageError("usage", "no config given", hint="stoker verify CONFIG; stoker verify --list")
    if weights is not None and not weights.exists():
        raise UsageError("usage", f"--weights {weights} does not exist", hint="a checkpoint or a run folder")
    checks = choose_checks(all_checks(), skip or (), deep=deep)
    let_threads_sleep()

    from dataclasses import asdict, replace

    from stoker.config.reading import load_for_command
    from stoker.core.console import say_notes
    from stoker.profile.host import fit_to_machine, read_machine
    from stoker.tasks.checks import Subject
    from stoker.train.launch import launch
    from stoker.train.ranks import ranks_from_environment
    from stoker.verify.machine import expect
    from stoker.verify.nodes import meet, why_not_started

    ranks = ranks_from_environment()
    loaded = load_for_command(config, overrides or ()).config
    machine = read_machine()
    fitted, notes = fit_to_machine(loaded, machine)
    over_ranks = fitted.devices * fitted.num_nodes > 1 and any(check.topic == "nodes" for check in checks)
    if ranks is None and over_ranks and why_not_started(fitted, machine) is None:
        return launch(own_command(), fitted.devices, fitted.num_nodes)
    if ranks is None or ranks.is_first:
        say_notes(notes)
    subject = Subject(fitted, config, overrides or (), machine, weights, out, deep, price_per_hour=price)
    if ranks is not None and ranks.world > 1:
        subject = replace(subject, ranks=meet(subject, ranks))
        if not ranks.is_first:
            return EXIT_OK  # the first rank checks the rest, and speaks for all
    report = run_and_show(checks, subject)
    expected = expect(subject)
    document = {"config": str(config), **report.as_dict(), "expected": asdict(expected)}
    text = verify_text(report, expected, subject.arguments)
    return print_answer(Answer(text, document, not report.count("failed")), as_json=json)
