"""`stoker demo`: the main job on handwritten digits that come along, in a minute or two on a CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from stoker.commands.options import JsonOption


def register(app: typer.Typer) -> None:
    app.command(epilog="Example: stoker demo --fresh")(demo)


def demo(
    folder: Annotated[
        Path | None,
        typer.Option(help="Where data and run go. [default: stoker/demo in the user's cache folder]"),
    ] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Train again from the beginning.")] = False,
    json: JsonOption = False,
) -> int:
    """Train a small ResNet on 1,797 handwritten digits, and show where the time went.

    The code is that of `stoker train`. Exits with 1 where the network did not learn to read 97 % of the digits.
    """
    from stoker.commands.demo_run import run_demo
    from stoker.errors import EXIT_FINDING
    from stoker.output.demo_text import demo_text
    from stoker.output.json_document import print_json
    from stoker.output.text import print_result

    code, result = run_demo(folder, fresh)
    if json:
        print_json(result.as_dict())
    else:
        print_result(demo_text(result))
    return code if code else (0 if result.learned else EXIT_FINDING)
