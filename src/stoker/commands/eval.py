"""`stoker eval`: how good a checkpoint is, on every sample of a split."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from stoker.commands.options import Argument, JsonOption, Option, RawOption, flags_for, without_settings
from stoker.core.errors import UsageError


def register(app: typer.Typer) -> None:
    app.command(
        name="eval",
        epilog="Example: stoker eval runs/rsb_a3 /data/imagenetv2-matched-frequency-format-val --plot confusion.png, "
        "or for volumes: stoker eval runs/scrolls --score vesuvius-surface --out scores",
    )(evaluate)


def evaluate(
    context: typer.Context,
    words: Annotated[
        list[str] | None,
        Argument(
            metavar="CKPT [DATA_ROOT] [KEY=VALUE]",
            help="Checkpoint or run folder of `stoker train`, or a file of Lightning, timm, torchvision or "
            "safetensors; left out with --predictions. Then the data. Images: folder or URL with val/, or with class "
            "folders. Volumes: a data set whose labelled volumes are all scored. [default: the checkpoint's, and of "
            "volumes its validation fold] Then keys of its config, such as predict_flips=zyx.",
        ),
    ] = None,
    split: Annotated[
        Literal["val", "train", "all"] | None,
        Option(help="Which images or volumes; `all` for volumes only. [default: val]"),
    ] = None,
    per_class: Annotated[bool, typer.Option("--per-class", help="List every class, not only the worst.")] = False,
    real_labels: Annotated[
        Path | None,
        typer.Option(metavar="real.json", help="Also score by ImageNet's reassessed (ReaL) labels.", readable=False),
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE.png", help="Draw the confusion matrix into this file.")
    ] = None,
    score: Annotated[
        Literal["segmentation", "vesuvius-surface"],
        typer.Option(help="Volumes: Dice, IoU and surface Dice; or also the score of the Vesuvius competition."),
    ] = "segmentation",
    spacing: Annotated[
        tuple[float, float, float],
        typer.Option(metavar="Z Y X", help="Volumes: size of a voxel, in the unit of surface_tolerance."),
    ] = (1.0, 1.0, 1.0),
    more: Annotated[
        list[Path] | None,
        Option(
            "--checkpoint",
            metavar="CKPT",
            readable=False,
            help="Volumes: average with this checkpoint; can be repeated.",
        ),
    ] = None,
    predictions: Annotated[
        Path | None,
        typer.Option(metavar="DIR", readable=False, help="Score the masks in this folder, without a checkpoint."),
    ] = None,
    labels: Annotated[
        Path | None,
        Option(
            metavar="DIR",
            readable=False,
            help="With --predictions: their labels, by the same names; or a data set. Labels that do not count: "
            "ignore_label=N. [default: the data set's; 2 for vesuvius-surface]",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="Volumes: write scores.json and pictures of the worst volumes (worst.png) here."
        ),
    ] = None,
    pictures: Annotated[int, typer.Option(metavar="N", min=0, help="Volumes: how many of the worst are drawn.")] = 8,
    raw: RawOption = False,
    json: JsonOption = False,
) -> int:
    """Print how good a checkpoint is.

    Images: the top-1 and top-5 accuracy and the loss, its worst classes and what it confuses. Every image counts once.
    Class folders are matched by name with the checkpoint's classes; folders named 0 to 999 (ImageNet-V2) are read as
    positions in the sorted list of ImageNet classes.

    Volumes: Dice, IoU and surface Dice of whole volumes, the worst first; unlabelled voxels do not count. Scores of the
    validation fold are kept in the run's folder, with pictures of the worst: `stoker report` shows them. Masks that
    another program made are scored with --predictions and --labels.
    """
    places, settings = without_settings(words or ())
    if (predictions is None) == (not places) or (predictions is None) != (labels is None):
        raise UsageError(
            "usage",
            "give either a checkpoint, or --predictions together with --labels",
            hint="stoker eval runs/NAME, or stoker eval --predictions MASKS --labels LABELS",
        )
    if len(places) > 2:
        raise UsageError("usage", f"{places[2]!r} is neither DATA_ROOT nor KEY=VALUE", hint="stoker eval --help")

    from stoker.config.reference import write_scalar
    from stoker.core.console import print_answer
    from stoker.tasks.base import task_named, task_with
    from stoker.train.checkpoint.restore import task_of

    flags: dict[str, Any] = {
        "per_class": per_class, "real_labels": real_labels, "plot": plot, "score": score, "spacing": spacing,
        "more": more, "out": out, "pictures": pictures,
    }  # fmt: skip
    if predictions is not None and labels is not None:
        task = task_with("score_masks")
        flags = flags_for(task, context, flags, "masks are of")
        return print_answer(task.score_masks(predictions, labels, settings, **flags), as_json=json)
    checkpoint, data_root = Path(places[0]), places[1] if len(places) > 1 else None
    if data_root is not None:
        settings.insert(0, f"data_root={write_scalar(data_root)}")
    task = task_named(task_of(checkpoint))
    flags = flags_for(task, context, flags, f"{checkpoint} was trained on")
    answer = task.evaluate(checkpoint, data_root, settings, split=split, raw=raw, **flags)
    return print_answer(answer, as_json=json)
