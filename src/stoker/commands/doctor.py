"""`stoker doctor`: why a training loop is slow, ours or any PyTorch script's, and the speed-up from each fix."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from stoker.commands.options import Argument, JsonOption, WithScript, let_threads_sleep, refuse_given
from stoker.core.errors import EXIT_FINDING, UsageError


def register(app: typer.Typer) -> None:
    app.command(cls=WithScript, epilog="Example: stoker doctor -- python train.py --epochs 1")(doctor)


def doctor(
    context: typer.Context,
    target: Annotated[
        str | None, Argument(metavar="CONFIG|RUN_FOLDER", help="A config to try for a minute, or the folder of a run.")
    ] = None,
    overrides: Annotated[
        list[str] | None, Argument(metavar="KEY=VALUE", help="Keys to set on top of the config.")
    ] = None,
    seconds: Annotated[
        float | None,
        typer.Option(min=1.0, help="How long to try a config, all trials together, or to record a script."),
    ] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Stop a script after this many training batches.")] = None,
    pace: Annotated[
        str | None,
        typer.Option(
            metavar="STEP_TIME|IMAGES/S|GPU",
            help="Replace the model by a consumer that takes this long for a step (400ms), or this many images per "
            "second, or is as fast as this card would be. For a script it is simulated, after the script has run; "
            "for a card, from one of its steps.",
        ),
    ] = None,
    confirm: Annotated[
        bool, typer.Option("--confirm", help="Try the best fix of a config, and compare with its prediction.")
    ] = False,
    fail_if: Annotated[
        list[str] | None,
        typer.Option(
            "--fail-if",
            metavar="METRIC>NUMBER",
            help="Exit with 1 if this holds, e.g. 'wait_share>0.1'; may be repeated.",
        ),
    ] = None,
    report: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write the diagnosis as a page, e.g. report.html.", readable=False),
    ] = None,
    json: JsonOption = False,
) -> int:
    """Show where the time of a training step goes, the bottleneck, and the speed-up from each fix.

    For a config: short real runs in throw-away processes. For the folder of a run, finished or not: what it recorded.
    For any PyTorch script: everything after `--` is run unchanged, with timers attached. The script keeps its output
    and exit code, and the diagnosis follows on stderr. With --json the script's stdout goes to stderr, and stdout is
    one JSON document.
    """
    script: list[str] | None = context.obj

    from stoker.doctor.diagnosis import check_gates, parse_gate

    gates = [parse_gate(text) for text in fail_if or ()]
    _refuse_combinations(target, script, steps, confirm)

    from stoker.core.console import print_json, print_result, say
    from stoker.doctor.diagnosing import diagnose, diagnose_script
    from stoker.doctor.screen import doctor_text

    let_threads_sleep()
    if report is not None:
        from stoker.report.page import check_page_path

        check_page_path(report)  # before the script runs for minutes, not after
    code = 0
    if script is not None:
        diagnosis, code = diagnose_script(script, steps, seconds, pace, stdout_is_ours=json)
    else:
        assert target is not None
        diagnosis = diagnose(target, overrides or [], seconds, pace, confirm=confirm)
    if json:
        print_json(diagnosis.as_dict())
    elif script is not None:
        say("\n" + doctor_text(diagnosis))
    else:
        print_result(doctor_text(diagnosis))
    if report is not None:
        from stoker.report.document import diagnosis_document
        from stoker.report.page import report_document, write_page

        name = " ".join(script) if script is not None else Path(target or "").name
        write_page(report, report_document([diagnosis_document(diagnosis, name)]))
        say(f"page: {report}")
    failed = check_gates(gates, diagnosis.observed)
    for text in failed:
        say(f"failed: {text}")
    return code or (EXIT_FINDING if failed else 0)


def _refuse_combinations(target: str | None, script: list[str] | None, steps: int | None, confirm: bool) -> None:
    ways = "stoker doctor CONFIG | stoker doctor RUN_FOLDER | stoker doctor -- python train.py"
    if script is None and target is None:
        raise UsageError("usage", "nothing to diagnose: no config, run folder or script given", hint=ways)
    if target is not None and target.endswith((".py", ".sh", ".ipynb")):
        program = {".py": "python", ".sh": "bash"}.get(Path(target).suffix)
        hint = f"stoker doctor -- {program} {target}" if program else "stoker doctor -- python train.py"
        raise UsageError("usage", f"{target} is a script, neither a config nor a run folder", hint=hint)
    if script is not None and target is not None:
        raise UsageError("usage", f"both {target!r} and a script after `--` given; expected one of them", hint=ways)
    if script == []:
        raise UsageError("usage", "no command given after `--`", hint="stoker doctor -- python train.py")
    if script is not None:
        refuse_given({"--confirm": confirm}, "needs a config, and a script has none", "stoker doctor CONFIG")
    else:
        refuse_given({"--steps": steps}, "needs a script; use --seconds for a config", "--seconds 30")
