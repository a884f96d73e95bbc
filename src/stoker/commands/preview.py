"""`stoker preview`: a contact sheet of what the network gets."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stoker.commands.options import ConfigArgument, JsonOption, OverridesArgument, let_threads_sleep
from stoker.core.errors import EXIT_OK, UsageError, UserError

if TYPE_CHECKING:
    from stoker.profile.host import HostConfig
    from stoker.tasks.contact_sheet import Drawn

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
    that the loss gives their classes. Each line of them is a step. Of volumes, patches are shown: as the network gets
    them, and with their labels; what is not labelled is hatched. Builds no network, and creates no run folder.
    """
    if out.suffix.lower() != ".png" or not out.absolute().parent.is_dir():
        raise UsageError("usage", f"--out {out} is not a .png file in an existing folder", hint="--out preview.png")

    let_threads_sleep()
    from stoker.config.reading import load_for_command
    from stoker.core.console import print_json, print_result
    from stoker.core.files import write_bytes
    from stoker.profile.host import fit_to_machine, read_machine
    from stoker.report.page import show_in_browser
    from stoker.run.folder import run_name_for

    loaded = load_for_command(config, overrides).config
    if epoch >= loaded.epochs:
        raise UsageError("usage", f"--epoch {epoch} is after the last of {loaded.epochs} epochs, counted from 0")
    fitted, _ = fit_to_machine(loaded, read_machine())
    draw = _draw_patches if loaded.task == "segment3d" else _draw_images
    drawn, seen = draw(fitted, run_name_for(loaded, config), count, epoch)
    try:
        write_bytes(out, drawn.as_png())
    except OSError as error:
        raise UserError(
            "preview-not-writable", f"{out} cannot be written: {error.strerror or error}", hint="--out ~/preview.png"
        ) from None
    if json:
        width, height = drawn.image.size
        print_json({"path": str(out), "width": width, "height": height} | seen)
    else:
        print_result(str(out))
    if open_:
        show_in_browser(out, "picture")
    return EXIT_OK


def _draw_images(config: HostConfig, name: str, count: int, epoch: int) -> tuple[Drawn, dict[str, Any]]:
    from stoker.core.console import progress_bar, say
    from stoker.tasks.contact_sheet import LARGEST_SIDE, draw_sheet
    from stoker.tasks.images.classify import open_data
    from stoker.tasks.images.preview import look
    from stoker.tasks.images.preview_sheet import describe, sheet_of

    with progress_bar("listing", None) as advance:
        data = open_data(config, say, advance)
    seen = look(config, data, count=count, epoch=epoch)
    drawn = draw_sheet(sheet_of(seen, name, LARGEST_SIDE))
    return drawn, describe(seen, drawn.boxes)


def _draw_patches(config: HostConfig, name: str, count: int, epoch: int) -> tuple[Drawn, dict[str, Any]]:
    from stoker.core.console import progress_bar, say
    from stoker.tasks.contact_sheet import draw_sheet
    from stoker.tasks.volumes.data import open_data
    from stoker.tasks.volumes.preview_sheet import describe, look, sheet_of

    with progress_bar("reading labels", None) as advance:
        data = open_data(config, say, advance)
    seen = look(config, data, count=count, epoch=epoch)
    drawn = draw_sheet(sheet_of(seen, name))
    return drawn, describe(seen, drawn.boxes)
