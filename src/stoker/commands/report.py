"""`stoker report`: a page about a run, or about two beside each other."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from stoker.commands.options import JsonOption

RunArgument = Annotated[
    Path,
    # Whether it is a run folder is for our own error to say.
    typer.Argument(
        metavar="RUN",
        readable=False,
        help="Run folder, its name below runs/, or the folder of stoker.watch().",
        show_default=False,
    ),
]


def register(app: typer.Typer) -> None:
    app.command(epilog="Example: stoker report runs/rsb_a3 --open")(report)


def report(
    run: RunArgument,
    run2: Annotated[
        Path | None,
        typer.Argument(metavar="[RUN2]", readable=False, help="Another run, to stand beside it.", show_default=False),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Where the page goes. [default: report.html in the run folder]", readable=False
        ),
    ] = None,
    open_: Annotated[bool, typer.Option("--open", help="Show the page in the browser.")] = False,
    json: JsonOption = False,
) -> int:
    """Write a self-contained page: where the time of a run's steps went, how fast it was, how it learned.

    With --json, the document that the page is made from is printed; the page is then written only where --out says so.
    """
    from stoker.console import print_json
    from stoker.report.document import read_document
    from stoker.report.page import default_place, report_document, report_page, say_where, show_in_browser, write_page

    read = [read_document(path) for path in (run, run2) if path is not None]
    folders, documents = [folder for folder, _ in read], [one for _, one in read]
    document = report_document(documents)
    if json:
        print_json(document)
    place = out or (None if json else default_place(folders))
    if place is not None:
        write_page(place, report_page(document))
        if not json:
            say_where(place, document)
        if open_:
            show_in_browser(place)
    return 0
