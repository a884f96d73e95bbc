"""`stoker doctor`: why a training loop is not faster, ours or anybody's, and what each cure would bring."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from stoker.commands.options import JsonOption
from stoker.errors import EXIT_FINDING, UsageError


class _WithScript(TyperCommand):
    """Everything after `--` is somebody else's command line, and reaches it untouched."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if "--" in args:
            place = args.index("--")
            args, ctx.obj = args[:place], args[place + 1 :]
        return super().parse_args(ctx, args)


def register(app: typer.Typer) -> None:
    app.command(
        cls=_WithScript,
        epilog="Example: stoker doctor -- python train.py --epochs 1",
    )(doctor)


def doctor(
    context: typer.Context,
    target: Annotated[
        str | None,
        typer.Argument(
            metavar="[CONFIG|RUN_FOLDER]", help="A config to try for a minute, or a run to look at.", show_default=False
        ),
    ] = None,
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="On top of the config.", show_default=False)
    ] = None,
    seconds: Annotated[
        float | None, typer.Option(min=1.0, help="How long the trials of a config take, or a script is watched.")
    ] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="End a script after so many training batches.")] = None,
    pace: Annotated[
        str | None,
        typer.Option(
            metavar="IMAGES/S|GPU",
            help="Instead of the model: a consumer that takes so many images a second, or as many as this card would.",
        ),
    ] = None,
    confirm: Annotated[
        bool, typer.Option("--confirm", help="Try the best change of a config, and say how right it was.")
    ] = False,
    fail_if: Annotated[
        list[str] | None,
        typer.Option("--fail-if", metavar="METRIC>NUMBER", help="Exit with 1, e.g. 'wait_share>0.1'; may be repeated."),
    ] = None,
    report: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write a page about it, e.g. report.html.", readable=False),
    ] = None,
    json: JsonOption = False,
) -> int:
    """Print where every second goes, the one thing that limits, and cures with what each would bring.

    Of a config (short real runs in throw-away processes), of a finished or running run's folder, or of any PyTorch
    script: everything after `--` is run as it stands. The script's output and exit code stay its own; the report comes
    after it, on stderr. With --json the script's stdout goes to stderr, so that stdout is one document.
    """
    script: list[str] | None = context.obj

    from stoker.doctor.gate import check_gates, parse_gates

    gates = parse_gates(fail_if or ())
    _refuse_what_does_not_fit(target, script, steps, {"--confirm": confirm, "--pace": pace is not None})

    from stoker.commands.options import let_threads_sleep
    from stoker.console import print_json, print_result, say
    from stoker.doctor.diagnosing import diagnose
    from stoker.doctor.text import doctor_text
    from stoker.report.diagnosis_document import diagnosis_document
    from stoker.report.page import check_page_path, report_document, write_page

    let_threads_sleep()
    if report is not None:
        check_page_path(report)  # before the minutes that the script takes, not after
    diagnosis, code = diagnose(target, overrides or [], script, steps, seconds, pace=pace, confirm=confirm, json=json)
    if json:
        print_json(diagnosis.as_dict())
    elif script is not None:
        say("\n" + doctor_text(diagnosis))
    else:
        print_result(doctor_text(diagnosis))
    if report is not None:
        name = " ".join(script) if script is not None else Path(target or "").name
        write_page(report, report_document([diagnosis_document(diagnosis, name)]))
        say(f"page: {report}")
    failed = check_gates(gates, diagnosis.observed)
    for text in failed:
        say(f"failed: {text}")
    return code or (EXIT_FINDING if failed else 0)


def _refuse_what_does_not_fit(
    target: str | None, script: list[str] | None, steps: int | None, for_config: dict[str, bool]
) -> None:
    ways = "stoker doctor CONFIG | stoker doctor RUN_FOLDER | stoker doctor -- python train.py"
    if script is None and target is None:
        raise UsageError("usage", "nothing to look at", hint=ways)
    if script is not None and target is not None:
        raise UsageError("usage", f"{target!r} stands before `--`, and a script after it: one of them", hint=ways)
    if script == []:
        raise UsageError("usage", "nothing stands after `--`", hint="stoker doctor -- python train.py")
    given = [option for option, is_given in for_config.items() if is_given]
    if script is not None and given:
        raise UsageError("usage", f"{given[0]} is for a config, and a script has none", hint="stoker doctor CONFIG")
    if script is None and steps is not None:
        raise UsageError("usage", "--steps is for a script", hint="--seconds 30")
