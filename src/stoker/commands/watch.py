"""`stoker watch`: a run while it goes on."""

from __future__ import annotations

from typing import Annotated

import typer

from stoker.commands.options import JsonOption
from stoker.commands.report import RunArgument


def register(app: typer.Typer) -> None:
    app.command(epilog="Example: stoker watch runs/rsb_a3 --web --port 8008")(watch)


def watch(
    run: RunArgument,
    once: Annotated[bool, typer.Option("--once", help="Show it once, and end.")] = False,
    web: Annotated[bool, typer.Option("--web", help="As a page for browsers of this machine; prints the URL.")] = False,
    port: Annotated[int, typer.Option(help="With --web: the port on 127.0.0.1; 0 is any.", min=0, max=65535)] = 0,
    json: JsonOption = False,
) -> int:
    """Show how far a run is, how fast, and what it waits for; renewed each second until the run ends.

    Ctrl-C ends the watching (exit 0), never the run. --json prints what is known now, once.
    """
    from stoker.console import print_json
    from stoker.report.document import read_run
    from stoker.report.page import report_document
    from stoker.report.watch_screen import print_frame
    from stoker.report.watch_screen import watch as watch_in_terminal
    from stoker.report.watch_web import watch_in_browser
    from stoker.run.folder import find_run

    reader = read_run(find_run(run))
    if json:
        print_json(report_document([reader.document()]))
    elif once:
        print_frame(reader.document())
    elif web:
        watch_in_browser(reader.document, port)
    else:
        watch_in_terminal(reader.document)
    return 0
