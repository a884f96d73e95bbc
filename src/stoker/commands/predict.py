"""`stoker predict`: classifies images with a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from stoker.commands.options import CheckpointArgument, JsonOption, RawOption, SetOption
from stoker.errors import EXIT_FINDING, EXIT_OK


def register(app: typer.Typer) -> None:
    app.command(epilog="Example: stoker predict runs/demo photo.jpg holiday/ --json")(predict)


def predict(
    checkpoint: CheckpointArgument,
    images: Annotated[
        list[Path],
        typer.Argument(
            metavar="IMAGE...",
            readable=False,
            help="Image files, or folders with images at any depth.",
            show_default=False,
        ),
    ],
    set_: SetOption = None,
    top: Annotated[int, typer.Option(metavar="N", min=1, help="Classes to print for each image.")] = 5,
    raw: RawOption = False,
    json: JsonOption = False,
) -> int:
    """Print the most probable classes of each image.

    Images are decoded, resized and cropped as in validation. An unreadable image is named and skipped, and the exit
    code is then 1.
    """
    from stoker.console import print_json, print_result, progress_bar, say
    from stoker.tasks.prediction import predict_images
    from stoker.tasks.results import predictions_text
    from stoker.train.checkpoint.sources import open_model

    restored = open_model(checkpoint, set_ or (), raw=raw, say=say)
    with progress_bar("predicting", None, unit="images") as advance:
        found = predict_images(restored, images, top=top, progress=advance)
    for path, reason in found.bad:
        say(f"bad image: {path}: {reason}")
    if json:
        print_json(
            {
                "checkpoint": str(restored.path),
                "weights": "averaged" if restored.averaged else "raw",
                "images": [
                    {
                        "path": one.path,
                        "top": [{"class": guess.name, "probability": guess.probability} for guess in one.guesses],
                    }
                    for one in found.images
                ],
                "bad": [{"path": path, "reason": reason} for path, reason in found.bad],
            }
        )
    elif found.images:
        print_result(predictions_text(found.images))
    return EXIT_FINDING if found.bad else EXIT_OK
