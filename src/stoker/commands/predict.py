"""`stoker predict`: classifies images, or segments volumes, with a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from stoker.commands.options import (
    Argument,
    CheckpointArgument,
    JsonOption,
    Option,
    RawOption,
    flags_for,
    without_settings,
)
from stoker.core.errors import UsageError

VOLUMES = "For volumes: "


def register(app: typer.Typer) -> None:
    app.command(epilog="Example: stoker predict runs/demo photo.jpg holiday/ --json")(predict)


def predict(
    context: typer.Context,
    checkpoint: CheckpointArgument,
    data: Annotated[
        list[str],
        Argument(
            metavar="DATA [KEY=VALUE]",
            help="Image files, or folders with images at any depth; volumes, folders of volumes, data sets, Zarr URLs. "
            "Then keys of the checkpoint's config, such as predict_flips=zyx.",
        ),
    ],
    top: Annotated[int | None, Option(metavar="N", min=1, help="For images: classes to print. [default: 5]")] = None,
    out: Annotated[
        Path | None, Option(metavar="DIR", help=f"{VOLUMES}folder of the predictions; resumes there.")
    ] = None,
    more: Annotated[
        list[Path] | None,
        Option(
            "--checkpoint",
            metavar="CKPT",
            readable=False,
            help=f"{VOLUMES}average with this checkpoint; can be repeated.",
        ),
    ] = None,
    format_: Annotated[
        Literal["tiff", "zarr"] | None, Option("--format", help=f"{VOLUMES}format of the files. [default: tiff]")
    ] = None,
    probabilities: Annotated[
        Literal["float16", "uint8"] | None, Option(help=f"{VOLUMES}store probabilities (uint8: 0 to 255), not classes.")
    ] = None,
    submission: Annotated[bool, typer.Option("--submission", help=f"{VOLUMES}also write submission.zip.")] = False,
    force: Annotated[
        bool, typer.Option("--force", help=f"{VOLUMES}replace what was predicted with other settings.")
    ] = False,
    raw: RawOption = False,
    json: JsonOption = False,
) -> int:
    """Print the most probable classes of each image, or write the classes of each volume's voxels.

    Images are decoded, resized and cropped as in validation. Volumes of any size are predicted in overlapping windows;
    the same command again resumes a prediction that was stopped. What cannot be read is named and skipped, and the exit
    code is then 1.
    """
    places, settings = without_settings(data)
    if not places:
        raise UsageError("usage", "no images or volumes given", hint="stoker predict CKPT DATA...")

    from stoker.core.console import print_answer
    from stoker.tasks.base import task_named
    from stoker.train.checkpoint.restore import task_of

    task = task_named(task_of(checkpoint))
    flags = {
        "top": top, "out": out, "more": more, "format_": format_, "probabilities": probabilities,
        "submission": submission, "force": force,
    }  # fmt: skip
    flags = flags_for(task, context, flags, f"{checkpoint} was trained on", "option-of-other-task")
    return print_answer(task.predict(checkpoint, places, settings, raw=raw, **flags), as_json=json)
