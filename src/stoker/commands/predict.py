"""`stoker predict`: classifies images, or segments volumes, with a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from stoker.commands.options import CheckpointArgument, JsonOption, RawOption, without_settings
from stoker.core.errors import EXIT_FINDING, EXIT_OK, Interrupted, UsageError

if TYPE_CHECKING:
    from stoker.config import Config
    from stoker.tasks.volumes.predict.manifest import PredictionOptions

VOLUMES = "For volumes: "


def register(app: typer.Typer) -> None:
    app.command(epilog="Example: stoker predict runs/demo photo.jpg holiday/ --json")(predict)


def predict(
    checkpoint: CheckpointArgument,
    data: Annotated[
        list[str],
        typer.Argument(
            metavar="DATA [KEY=VALUE]",
            help="Image files, or folders with images at any depth; volumes, folders of volumes, data sets, Zarr URLs. "
            "Then keys of the checkpoint's config, such as predict_flips=zyx.",
            show_default=False,
        ),
    ],
    top: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="For images: classes to print. [default: 5]", show_default=False),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help=f"{VOLUMES}folder of the predictions; resumes there.", show_default=False),
    ] = None,
    more: Annotated[
        list[Path] | None,
        typer.Option(
            "--checkpoint",
            metavar="CKPT",
            readable=False,
            help=f"{VOLUMES}average with this checkpoint; can be repeated.",
            show_default=False,
        ),
    ] = None,
    format_: Annotated[
        Literal["tiff", "zarr"] | None,
        typer.Option("--format", help=f"{VOLUMES}format of the files. [default: tiff]", show_default=False),
    ] = None,
    probabilities: Annotated[
        Literal["float16", "uint8"] | None,
        typer.Option(help=f"{VOLUMES}store probabilities (uint8: 0 to 255), not classes.", show_default=False),
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
    from stoker.train.checkpoint.restore import task_of

    for_volumes = {
        "--out": out, "--checkpoint": more, "--format": format_, "--probabilities": probabilities,
        "--submission": submission, "--force": force,
    }  # fmt: skip
    places, settings = without_settings(data)
    if not places:
        raise UsageError("usage", "no images or volumes given", hint="stoker predict CKPT DATA...")
    if task_of(checkpoint) != "segment3d":
        _refuse(for_volumes, f"{checkpoint} classifies images", "these are for volumes")
        return _predict_images(checkpoint, [Path(one) for one in places], settings, top or 5, raw, json)
    _refuse({"--top": top}, f"{checkpoint} segments volumes", "every voxel gets one class")
    if out is None:
        raise UsageError("no-out", "no folder for the predictions given", hint="--out predictions/")

    from stoker.tasks.volumes.predict.manifest import PredictionOptions
    from stoker.tasks.volumes.predict.postprocess import parse_chain
    from stoker.tasks.volumes.predict.windows import SlidingWindow

    def options_of(config: Config) -> PredictionOptions:
        return PredictionOptions(
            SlidingWindow(config.predict_overlap, config.predict_flips), config.predict_threshold, probabilities,
            format_ or "tiff", parse_chain(config.predict_postprocess), submission, force,
        )  # fmt: skip

    return _predict_volumes([checkpoint, *(more or ())], places, out, settings, options_of, raw, json)


def _refuse(options: dict[str, Any], seen: str, why: str) -> None:
    given = [name for name, value in options.items() if value not in (None, False, [])]
    if given:
        raise UsageError("option-of-other-task", f"{', '.join(given)}: {seen}", why=why, hint="leave them out")


def _predict_images(
    checkpoint: Path, images: Sequence[Path], overrides: Sequence[str], top: int, raw: bool, json: bool
) -> int:
    from stoker.core.console import print_json, print_result, progress_bar, say
    from stoker.tasks.images.prediction import predict_images
    from stoker.tasks.images.results import predictions_text
    from stoker.train.checkpoint.sources import open_model

    restored = open_model(checkpoint, overrides, raw=raw, say=say)
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


def _predict_volumes(
    checkpoints: Sequence[Path],
    data: Sequence[str],
    out: Path,
    overrides: Sequence[str],
    options_of: Callable[[Config], PredictionOptions],
    raw: bool,
    json: bool,
) -> int:
    from stoker.core.console import print_json, print_result, progress_bar, say
    from stoker.tasks.images.results import volumes_text
    from stoker.tasks.volumes.predict.inputs import cases_to_predict
    from stoker.tasks.volumes.predict.predict_folder import predict_folder
    from stoker.tasks.volumes.segment import open_trained

    cases = cases_to_predict(data, say)
    trained = [open_trained(path, say, overrides, raw=raw) for path in checkpoints]
    options = options_of(trained[0].config)
    try:
        with progress_bar("predicting", None, unit="windows") as advance:
            found = predict_folder(trained, cases, out, options, progress=advance, say=say)
    except KeyboardInterrupt:
        raise Interrupted("interrupted", "stopped by Ctrl-C", hint="the same command resumes") from None
    for name, reason in found.bad:
        say(f"bad volume: {name}: {reason}")
    if json:
        print_json(
            {
                "checkpoints": [str(one.path) for one in trained],
                "weights": ["averaged" if one.averaged else "raw" for one in trained],
                "out": str(out),
                "volumes": [
                    {
                        "id": one.id,
                        "path": str(one.path),
                        "shape": list(one.shape),
                        "windows": one.windows,
                        "seconds": one.seconds,
                        "foreground": one.foreground,
                    }
                    for one in found.volumes
                ],
                "bad": [{"id": name, "reason": reason} for name, reason in found.bad],
                "submission": None if found.submission is None else str(found.submission),
            }
        )
    elif found.volumes:
        print_result(volumes_text(found.volumes, found.submission))
    return EXIT_FINDING if found.bad else EXIT_OK
