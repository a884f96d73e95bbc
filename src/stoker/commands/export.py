"""`stoker export`: writes a checkpoint's model for other programs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from stoker.commands.options import Argument, CheckpointArgument, JsonOption, Option, OverridesArgument, RawOption


def register(app: typer.Typer) -> None:
    app.command(epilog="Example: stoker export runs/demo model.onnx --to onnx")(export)


def export(
    checkpoint: CheckpointArgument,
    out: Annotated[Path, Argument(metavar="OUT", help="File to write.")],
    to: Annotated[
        Literal["safetensors", "onnx", "torch-export"],
        Option(help="Only the weights, or a program that contains them."),
    ],
    overrides: OverridesArgument = None,
    image: Annotated[
        Path | None,
        Option(
            metavar="FILE",
            readable=False,
            help="Also compare on this image or volume. [default: the first in the checkpoint's data_root, if any]",
        ),
    ] = None,
    raw: RawOption = False,
    force: Annotated[bool, typer.Option("--force", help="Replace OUT if it exists.")] = False,
    json: JsonOption = False,
) -> int:
    """Write a checkpoint's model as safetensors, ONNX or torch.export (.pt2).

    The file is loaded again and its output compared with the checkpoint's; it appears only if they agree. It takes
    normalised float32 images, or patches of volumes, in batches of any size; its metadata holds what a program needs
    to know: class names, mean, std and img_size, or patch_size and normalize. ONNX needs
    `pip install 'stoker[export]'`.
    """
    from stoker.core.console import print_answer
    from stoker.tasks.base import task_named
    from stoker.tasks.export_formats import check_can_export, export_model
    from stoker.train.checkpoint.restore import task_of

    check_can_export(to, out, force)
    subject = task_named(task_of(checkpoint)).export(checkpoint, overrides or (), image=image, raw=raw)
    return print_answer(export_model(subject, to, out), as_json=json)
