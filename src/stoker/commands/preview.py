"""`stoker preview`: a contact sheet of what the network gets."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from stoker.commands.options import ConfigArgument, JsonOption, OverridesArgument, check_picture, let_threads_sleep
from stoker.core.errors import UsageError, UserError

DEFAULT_FILE = Path("preview.png")


def register(app: typer.Typer) -> None:
    app.command(epilog="Example: stoker preview configs/rsb_a3.yaml data_root=/data/imagenet --open")(preview)


def preview(
    config: ConfigArgument,
    overrides: OverridesArgument = None,
    out: Annotated[Path, typer.Option(metavar="FILE.png", help="Where to write the picture.")] = DEFAULT_FILE,
    count: Annotated[
        int, typer.Option(min=1, max=600, help="Training samples to show, and half as many for validation.")
    ] = 12,
    epoch: Annotated[int, typer.Option(min=0, help="Show the first steps of this epoch, counted from 0.")] = 0,
    open_: Annotated[bool, typer.Option("--open", help="Open the picture in the desktop's viewer.")] = False,
    json: JsonOption = False,
) -> int:
    """Write a picture of training and validation samples as the network gets them, with their classes.

    The training samples are those that the first steps of the run train on: cropped, augmented, mixed, with the weights
    that the loss gives their classes. Each line of them is a step. Volumes are shown as patches, as the network gets
    them and with their labels; unlabelled voxels are hatched. Builds no network, and creates no run folder.
    """
    check_picture("--out", out, "preview.png")

    let_threads_sleep()
    from stoker.config.reading import load_for_command
    from stoker.core.console import Answer, print_answer, progress_bar, say
    from stoker.core.files import write_bytes
    from stoker.profile.host import fit_to_machine, read_machine
    from stoker.report.page import show_in_browser
    from stoker.run.folder import run_name_for
    from stoker.tasks.base import task_for
    from stoker.tasks.contact_sheet import draw_sheet

    loaded = load_for_command(config, overrides).config
    if epoch >= loaded.epochs:
        raise UsageError("usage", f"--epoch {epoch} is after the last of {loaded.epochs} epochs, counted from 0")
    fitted, _ = fit_to_machine(loaded, read_machine())
    task = task_for(loaded)
    with progress_bar("listing", None) as advance:
        data = task.open_data(fitted, say, advance)
    seen = task.preview(fitted, data, run_name_for(loaded, config), count=count, epoch=epoch)
    drawn = draw_sheet(seen.sheet)
    try:
        write_bytes(out, drawn.as_png())
    except OSError as error:
        raise UserError(
            "preview-not-writable", f"{out} cannot be written: {error.strerror or error}", hint="--out ~/preview.png"
        ) from None
    width, height = drawn.image.size
    document = {"path": str(out), "width": width, "height": height} | seen.describe(drawn.boxes)
    code = print_answer(Answer(str(out), document), as_json=json)
    if open_:
        show_in_browser(out, "picture")
    return code
