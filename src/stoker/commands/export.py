"""`stoker export`: writes a checkpoint's model for other programs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from stoker.commands.options import CheckpointArgument, JsonOption, RawOption, SetOption


def register(app: typer.Typer) -> None:
    app.command(epilog="Example: stoker export runs/demo model.onnx --to onnx")(export)


def export(
    checkpoint: CheckpointArgument,
    out: Annotated[Path, typer.Argument(metavar="OUT", help="File to write.", show_default=False)],
    to: Annotated[
        Literal["safetensors", "onnx", "torch-export"],
        typer.Option(help="Only the weights, or a program that contains them.", show_default=False),
    ],
    image: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            readable=False,
            help="Also compare on this image. [default: the first image in the checkpoint's data_root, if any]",
            show_default=False,
        ),
    ] = None,
    set_: SetOption = None,
    raw: RawOption = False,
    force: Annotated[bool, typer.Option("--force", help="Replace OUT if it exists.")] = False,
    json: JsonOption = False,
) -> int:
    """Write a checkpoint's model as safetensors, ONNX or torch.export (.pt2).

    The file is loaded again and its output compared with the checkpoint's; it appears only if they agree. It takes
    normalised float32 images in batches of any size; its metadata holds the class names, mean, std and img_size.
    ONNX needs `pip install 'stoker[export]'`.
    """
    from stoker.console import print_json, print_result, say
    from stoker.tasks.exporting import check_can_export, export_model
    from stoker.tasks.results import export_text
    from stoker.train.checkpoint.sources import open_model

    check_can_export(to, out, force)
    restored = open_model(checkpoint, set_ or (), raw=raw, say=say)
    found = export_model(restored, to, out, force=force, image=image)
    if json:
        print_json(
            {
                "checkpoint": str(restored.path),
                "weights": "averaged" if restored.averaged else "raw",
                "out": str(found.path),
                "format": to,
                "bytes": found.size_bytes,
                "checked_with": found.checked_with,
                "differences": [
                    {"images": one.what, "max_abs": one.max_abs, "tolerance": one.tolerance}
                    for one in found.differences
                ],
            }
        )
    else:
        print_result(export_text(found.path, found.size_bytes, found.checked_with, found.differences))
    return 0
