"""`stoker report`: a page about a run or a search of `stoker tune`, or a comparison of two runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from stoker.commands.options import Argument, JsonOption
from stoker.core.errors import UsageError


def register(app: typer.Typer) -> None:
    app.command(epilog="Example: stoker report runs/rsb_a3 --open")(report)


def report(
    run: Annotated[
        Path,
        # Not checked here: our own error names the runs that exist.
        Argument(
            metavar="RUN",
            readable=False,
            help="Run folder, its name under runs/, the folder of stoker.watch(), or the journal of `stoker tune`.",
        ),
    ],
    run2: Annotated[Path | None, Argument(metavar="RUN2", readable=False, help="A second run to compare with.")] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Where to write the page. [default: report.html in the run folder]", readable=False
        ),
    ] = None,
    open_: Annotated[bool, typer.Option("--open", help="Open the page in the browser.")] = False,
    json: JsonOption = False,
) -> int:
    """Write a self-contained HTML page about a run: where the time of its steps went, throughput, learning curves.

    For a journal of `stoker tune`: what was tried and why, what it measured, and what was kept.

    --json prints the data of the page instead; the page is then only written with --out.
    """
    from stoker.core.console import print_json, print_result, say
    from stoker.report.document import read_document
    from stoker.report.page import page_path_for, report_document, show_in_browser, write_page
    from stoker.report.tune_document import is_tune

    read = [read_document(path) for path in (run, run2) if path is not None]
    searches = [path for path, (_, one) in zip((run, run2), read, strict=False) if is_tune(one)]
    if searches and run2 is not None:
        raise UsageError(
            "usage", f"{searches[0]} is the journal of a search, which is not compared with another",
            hint=f"stoker report {searches[0]}",
        )  # fmt: skip
    document = report_document([one for _, one in read])
    if json:
        print_json(document)
    path = out or (None if json else page_path_for([folder for folder, _ in read], search=bool(searches)))
    if path is None:
        return 0
    write_page(path, document)
    if not json:
        for shown in document.get("runs") or [document["tune"]]:
            for text in shown["missing"]:
                say(f"note: {shown.get('label') or shown['name']}: {text}")
        print_result(str(path))
    if open_:
        show_in_browser(path)
    return 0
