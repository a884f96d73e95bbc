"""`stoker demo`: trains on handwritten digits, or made-up scans of scrolls, in a few minutes on a CPU."""

from __future__ import annotations

import json as json_format
import time
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stoker.commands.options import JsonOption, let_threads_sleep
from stoker.core.console import say
from stoker.core.errors import UserError
from stoker.core.files import cache_folder, write_text

if TYPE_CHECKING:
    from stoker.tasks.demo import Demo, DemoResult


def register(app: typer.Typer) -> None:
    app.command(epilog="Example: stoker demo --volumes --fresh")(demo)


def demo(
    folder: Annotated[
        Path | None, typer.Option(help="Folder for data and run. [default: stoker/demo in the user's cache folder]")
    ] = None,
    volumes: Annotated[
        bool, typer.Option("--volumes", help="Find thin sheets in volumes instead, in about three minutes.")
    ] = False,
    fresh: Annotated[bool, typer.Option("--fresh", help="Train again from the beginning.")] = False,
    json: JsonOption = False,
) -> int:
    """Train a small ResNet on 1,797 handwritten digits, and show where the time went.

    Or, with `--volumes`, a small U-Net on made-up scans of scrolls, in which thin sheets are labelled and most voxels
    are not. Runs the same code as `stoker train`. Exits with 1 if the network does not learn to read 97 % of the
    digits, or does not reach a Dice of 90 % on a scroll that was held out.
    """
    from stoker.core.console import Answer, print_answer
    from stoker.tasks.demo import DIGITS, SCROLLS, demo_text

    code, result = run_demo(SCROLLS if volumes else DIGITS, (folder or cache_folder() / "demo").absolute(), fresh)
    learned = print_answer(Answer(demo_text(result), result.as_dict(), result.learned), as_json=json)
    return code or learned


def run_demo(demo: Demo, folder: Path, fresh: bool, overrides: Sequence[str] = ()) -> tuple[int, DemoResult]:
    """Trains unless that is already done; the exit code of the training and the result."""
    began = time.monotonic()
    let_threads_sleep()
    config = _prepare(demo, folder)

    from stoker.commands.train import train_from_config
    from stoker.run.folder import RunFolder
    from stoker.tasks.demo import DemoResult, time_spent

    code, summary = train_from_config(config, overrides, None, fresh)
    assert summary is not None, "one device: this process trained"
    run = RunFolder(Path(summary["run_folder"]))
    return code, DemoResult(
        config=config,
        run_folder=run.root,
        demo=demo,
        best=summary[f"best_val_{demo.metric}"],
        epochs=summary["epochs"],
        seconds=time.monotonic() - began,
        spent=time_spent(run),
    )


def _prepare(demo: Demo, folder: Path) -> Path:
    """Writes the data and a config that names it below `folder`; any other command can use that config."""
    config, data = folder / demo.config_name, folder / demo.folder
    places = {"data_root": str(data), "runs_dir": str(folder / "runs")}
    text = resources.files("stoker.tasks").joinpath(demo.config_name).read_text(encoding="utf-8")
    try:
        if not data.exists():
            say(f"writing {demo.about} to {data}")
        demo.write(data)
        # A JSON string is also a YAML string, whatever is in the path.
        write_text(config, text + "".join(f"{key}: {json_format.dumps(value)}\n" for key, value in places.items()))
    except OSError as error:
        raise UserError(
            "demo-folder-not-writable",
            f"{folder} cannot be written: {error.strerror or error}",
            why="the demo keeps its data and its run there",
            hint="stoker demo --folder /a/writable/folder",
        ) from None
    return config
