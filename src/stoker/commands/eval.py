"""`stoker eval`: the accuracy of a checkpoint, class by class."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Literal

import typer

from stoker.commands.options import CheckpointArgument, JsonOption, OverridesArgument, RawOption
from stoker.errors import EXIT_FINDING, EXIT_OK, UsageError

_KEY_VALUE = re.compile(r"[A-Za-z_]\w*=")


def register(app: typer.Typer) -> None:
    app.command(
        name="eval",
        epilog="Example: stoker eval runs/rsb_a3 /data/imagenetv2-matched-frequency-format-val --plot confusion.png",
    )(evaluate)


def evaluate(
    checkpoint: CheckpointArgument,
    data_root: Annotated[
        str | None,
        typer.Argument(
            metavar="[DATA_ROOT]",
            help="Folder or URL with val/, or with class folders. [default: the checkpoint's]",
            show_default=False,
        ),
    ] = None,
    overrides: OverridesArgument = None,
    split: Annotated[Literal["val", "train"], typer.Option(help="Which images to classify.")] = "val",
    per_class: Annotated[bool, typer.Option("--per-class", help="List every class, not only the worst.")] = False,
    real_labels: Annotated[
        Path | None,
        typer.Option(metavar="real.json", help="Also score by ImageNet's reassessed (ReaL) labels.", readable=False),
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE.png", help="Draw the confusion matrix into this file.")
    ] = None,
    raw: RawOption = False,
    json: JsonOption = False,
) -> int:
    """Print the top-1 and top-5 accuracy and the loss of a checkpoint, its worst classes and what it confuses.

    Every image counts once. Class folders are matched by name with the checkpoint's classes; folders named 0 to 999
    (ImageNet-V2) are read as positions in the sorted list of ImageNet classes.
    """
    settings = [*(overrides or ())]
    if data_root is not None and _KEY_VALUE.match(data_root):
        settings.insert(0, data_root)
        data_root = None
    if wrong := [text for text in settings if not _KEY_VALUE.match(text)]:
        raise UsageError("usage", f"{wrong[0]!r} is neither DATA_ROOT nor KEY=VALUE", hint="stoker eval --help")

    from stoker.config.reference import write_scalar
    from stoker.console import print_json, print_result, progress_bar, say
    from stoker.tasks.evaluation import evaluate_checkpoint, open_labelled
    from stoker.tasks.results import evaluation_text, plot_confusion
    from stoker.train.checkpoint.sources import open_model

    if data_root is not None:
        settings.insert(0, f"data_root={write_scalar(data_root)}")
    restored = open_model(checkpoint, settings, raw=raw, say=say)
    with progress_bar("listing", None) as advance:
        samples = open_labelled(restored, split, say, advance)
    with progress_bar("evaluating", len(samples), unit="images") as advance:
        found = evaluate_checkpoint(restored, samples, real_labels=real_labels, progress=advance)
    code = EXIT_OK
    if plot is not None:
        try:
            plot_confusion(found, plot)
            say(f"picture: {plot}")
        except OSError as error:
            # The scores may have taken an hour: print them anyway.
            say(f"warning: {plot} could not be written: {error.strerror or error}")
            code = EXIT_FINDING
    if json:
        print_json(found.as_dict())
    else:
        print_result(evaluation_text(found, all_classes=per_class))
    return code
