"""`stoker demo`: trains on handwritten digits that ship with it, in a minute or two on a CPU."""

from __future__ import annotations

import json as json_format
import time
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stoker.commands.options import JsonOption, let_threads_sleep
from stoker.console import say
from stoker.errors import EXIT_FINDING, EXIT_OK, UserError
from stoker.files import cache_folder, write_text

if TYPE_CHECKING:
    from stoker.tasks.demo import DemoResult

CONFIG_NAME = "demo.yaml"


def register(app: typer.Typer) -> None:
    app.command(epilog="Example: stoker demo --fresh")(demo)


def demo(
    folder: Annotated[
        Path | None,
        typer.Option(help="Folder for data and run. [default: stoker/demo in the user's cache folder]"),
    ] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Train again from the beginning.")] = False,
    json: JsonOption = False,
) -> int:
    """Train a small ResNet on 1,797 handwritten digits, and show where the time went.

    Runs the same code as `stoker train`. Exits with 1 if the network does not learn to read 97 % of the digits.
    """
    from stoker.console import print_json, print_result
    from stoker.tasks.demo import demo_text

    code, result = _run_demo((folder or cache_folder() / "demo").absolute(), fresh)
    if json:
        print_json(result.as_dict())
    else:
        print_result(demo_text(result))
    return code or (EXIT_OK if result.learned else EXIT_FINDING)


def _run_demo(folder: Path, fresh: bool) -> tuple[int, DemoResult]:
    """Trains unless that is already done; the exit code of the training and the result."""
    began = time.monotonic()
    let_threads_sleep()
    config = _prepare(folder)

    from stoker.commands.train import train_from_config
    from stoker.run.folder import RunFolder
    from stoker.tasks.demo import DemoResult, time_spent

    code, summary = train_from_config(config, [], None, fresh)
    assert summary is not None, "one device: this process trained"
    run = RunFolder(Path(summary["run_folder"]))
    return code, DemoResult(
        config=config,
        run_folder=run.root,
        best_val_acc1=summary["best_val_acc1"],
        epochs=summary["epochs"],
        seconds=time.monotonic() - began,
        spent=time_spent(run),
    )


def _prepare(folder: Path) -> Path:
    """Writes the digits and a config that names them below `folder`; any other command can use that config."""
    from stoker.tasks.demo import write_digits

    config, digits = folder / CONFIG_NAME, folder / "digits"
    places = {"data_root": str(digits), "runs_dir": str(folder / "runs")}
    text = resources.files("stoker").joinpath(CONFIG_NAME).read_text(encoding="utf-8")
    try:
        if not digits.exists():
            say(f"writing 1,797 handwritten digits as JPEGs to {digits}")
        write_digits(digits)
        # A JSON string is also a YAML string, whatever is in the path.
        write_text(config, text + "".join(f"{key}: {json_format.dumps(value)}\n" for key, value in places.items()))
    except OSError as error:
        raise UserError(
            "demo-folder-not-writable",
            f"{folder} cannot be written: {error.strerror or error}",
            why="the demo keeps its digits and its run there",
            hint="stoker demo --folder /a/writable/folder",
        ) from None
    return config
