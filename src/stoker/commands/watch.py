"""`stoker watch`: follow a run while it trains, or a search of `stoker tune`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from stoker.commands.options import Argument, JsonOption


def register(app: typer.Typer) -> None:
    app.command(epilog="Example: stoker watch runs/rsb_a3 --web --port 8008")(watch)


def watch(
    run: Annotated[
        Path,
        Argument(
            metavar="RUN", readable=False, help="Run folder, its name under runs/, or the journal of `stoker tune`."
        ),
    ],
    once: Annotated[bool, typer.Option("--once", help="Show the current state once and exit.")] = False,
    web: Annotated[bool, typer.Option("--web", help="Serve a live page on this machine; prints its URL.")] = False,
    port: Annotated[int, typer.Option(help="With --web: port on 127.0.0.1; 0 picks a free one.", min=0, max=65535)] = 0,
    json: JsonOption = False,
) -> int:
    """Follow a run in the terminal: progress, throughput, where a step's time goes; updated every second.

    Stops when the run ends. Ctrl-C stops watching (exit 0), not the run. --json prints the current state once.
    """
    from stoker.core.console import print_json
    from stoker.report.document import open_reader
    from stoker.report.live_view import print_frame, watch_in_browser, watch_in_terminal
    from stoker.report.page import report_document

    _, reader = open_reader(run)
    if json:
        print_json(report_document([reader.document()]))
    elif once:
        print_frame(reader.document())
    elif web:
        watch_in_browser(reader.document, port)
    else:
        watch_in_terminal(reader.document)
    return 0
