"""`stoker eval`: the accuracy of a checkpoint, class by class; for volumes, its scores volume by volume."""

from __future__ import annotations

from collections.abc import Callable
from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from stoker.commands.options import JsonOption, RawOption, without_settings
from stoker.core.errors import EXIT_FINDING, EXIT_OK, UsageError, UserError

if TYPE_CHECKING:
    from stoker.config import Config
    from stoker.run.folder import RunFolder
    from stoker.tasks.volumes.evaluation import ScoreOptions
    from stoker.tasks.volumes.results import Judged, VolumeEvaluation

SCORES_FILE, SHEET_FILE = "scores.json", "worst.png"
# Of the sheet that a run's report shows: four volumes in six pictures each fit into its width and into a megabyte.
REPORTED, REPORTED_SIDE, REPORTED_BYTES = 4, 180, 1_000_000
LARGEST_SIDE = 320
"""Of a picture on the sheet: a volume of the competition is drawn voxel by voxel."""


def register(app: typer.Typer) -> None:
    app.command(
        name="eval",
        epilog="Example: stoker eval runs/rsb_a3 /data/imagenetv2-matched-frequency-format-val --plot confusion.png, "
        "or for volumes: stoker eval runs/scrolls --score vesuvius-surface --out scores",
    )(evaluate)


def evaluate(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="CKPT [DATA_ROOT] [KEY=VALUE]",
            help="Checkpoint or run folder of `stoker train`, or a file of Lightning, timm, torchvision or "
            "safetensors; left out with --predictions. Then the data. Images: folder or URL with val/, or with class "
            "folders. Volumes: a data set whose labelled volumes are all scored. [default: the checkpoint's, and of "
            "volumes its validation fold] Then keys of its config, such as predict_flips=zyx.",
            show_default=False,
        ),
    ] = None,
    split: Annotated[
        Literal["val", "train", "all"] | None,
        typer.Option(help="Which images or volumes; `all` for volumes only. [default: val]", show_default=False),
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
        typer.Option(
            "--checkpoint",
            metavar="CKPT",
            readable=False,
            help="Volumes: average with this checkpoint; can be repeated.",
            show_default=False,
        ),
    ] = None,
    predictions: Annotated[
        Path | None,
        typer.Option(metavar="DIR", readable=False, help="Score the masks in this folder, without a checkpoint."),
    ] = None,
    labels: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            readable=False,
            help="With --predictions: their labels, by the same names; or a data set. Labels that do not count: "
            "ignore_label=N. [default: the data set's; 2 for vesuvius-surface]",
            show_default=False,
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help=f"Volumes: write {SCORES_FILE} and pictures of the worst volumes ({SHEET_FILE}) here."
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

    Volumes: Dice, IoU and surface Dice of whole volumes, the worst first; unlabelled voxels do not count. Those of the
    validation fold are kept in the run's folder, with pictures of the worst: `stoker report` shows them. Masks that
    another program made are scored with --predictions and --labels.
    """
    places, settings = without_settings(words or ())
    if min(spacing) <= 0:
        raise UsageError("usage", f"--spacing {' '.join(map(str, spacing))}: the size of a voxel is above 0")
    if (predictions is None) == (not places) or (predictions is None) != (labels is None):
        raise UsageError(
            "usage",
            "give either a checkpoint, or --predictions together with --labels",
            hint="stoker eval runs/NAME, or stoker eval --predictions MASKS --labels LABELS",
        )
    if len(places) > 2:
        raise UsageError("usage", f"{places[2]!r} is neither DATA_ROOT nor KEY=VALUE", hint="stoker eval --help")

    from stoker.config import load_config
    from stoker.config.reference import write_scalar
    from stoker.config.volume_keys import PredictionKeys
    from stoker.tasks.volumes.evaluation import ScoreOptions
    from stoker.tasks.volumes.predict.postprocess import parse_chain
    from stoker.train.checkpoint.restore import task_of

    def scoring_of(config: Config) -> ScoreOptions:
        steps = parse_chain(config.predict_postprocess)
        return ScoreOptions(score, config.surface_tolerance, spacing, config.predict_threshold, steps, pictures)

    if predictions is not None and labels is not None:
        _refuse_of_images(per_class=per_class, real_labels=real_labels, plot=plot)
        # Any patch: nothing is predicted.
        config = load_config(None, ["task=segment3d", "patch_size=[1,1,1]", *settings]).config
        return _score_masks(predictions, labels, scoring_of(config), config.ignore_label, out, json=json)
    checkpoint, data_root = Path(places[0]), places[1] if len(places) > 1 else None
    # How it is predicted and judged may differ from the run's own settings, what is judged may not.
    keys = {text.partition("=")[0] for text in settings}
    is_own = keys <= PredictionKeys.model_fields.keys() | {"surface_tolerance"} and data_root is None
    if data_root is not None:
        settings.insert(0, f"data_root={write_scalar(data_root)}")
    if task_of(checkpoint) == "segment3d":
        _refuse_of_images(per_class=per_class, real_labels=real_labels, plot=plot)
        which = split or ("val" if data_root is None else "all")
        return _evaluate_volumes(
            [checkpoint, *(more or ())], settings, which, scoring_of, out,
            is_own=is_own and which == "val", raw=raw, json=json,
        )  # fmt: skip
    of_volumes = {
        "--split all": split == "all", "--out": out, "--score": score != "segmentation", "--checkpoint": more
    }  # fmt: skip
    if used := [name for name, value in of_volumes.items() if value]:
        raise UsageError("usage", f"{checkpoint} classifies images; {used[0]} is for volumes")
    part: Literal["val", "train"] = "train" if split == "train" else "val"
    return _evaluate_images(checkpoint, settings, part, real_labels, plot, per_class, raw=raw, json=json)


def _refuse_of_images(**options: Any) -> None:
    if used := [name for name, value in options.items() if value]:
        raise UsageError("usage", f"--{used[0].replace('_', '-')} is for checkpoints that classify images")


def _evaluate_images(
    checkpoint: Path,
    settings: list[str],
    split: Literal["val", "train"],
    real_labels: Path | None,
    plot: Path | None,
    per_class: bool,
    *,
    raw: bool,
    json: bool,
) -> int:
    from stoker.core.console import print_json, print_result, progress_bar, say
    from stoker.tasks.images.evaluation import evaluate_checkpoint, open_labelled
    from stoker.tasks.images.results import evaluation_text, plot_confusion
    from stoker.train.checkpoint.sources import open_model

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


def _evaluate_volumes(
    checkpoints: list[Path],
    settings: list[str],
    split: Literal["val", "train", "all"],
    scoring_of: Callable[[Config], ScoreOptions],
    out: Path | None,
    *,
    is_own: bool,
    raw: bool,
    json: bool,
) -> int:
    from stoker.core.console import progress_bar, say
    from stoker.core.units import count
    from stoker.run.folder import run_of
    from stoker.tasks.volumes.evaluation import choose_cases, evaluate_volumes
    from stoker.tasks.volumes.predict.windows import SlidingWindow
    from stoker.tasks.volumes.segment import open_trained

    trained = [open_trained(path, say, settings, raw=raw) for path in checkpoints]
    first = trained[0]
    sliding = SlidingWindow(first.config.predict_overlap, first.config.predict_flips)
    scoring = scoring_of(first.config)
    with progress_bar("listing", None) as advance:
        chosen = choose_cases(first.config, first.rules, split, say, advance)
    weights = "averaged weights" if first.averaged else "raw weights"
    steps = f"{count(first.epoch, 'epoch')} ({count(first.step, 'step')})"
    others = f" and {count(len(trained) - 1, 'other network')}" if len(trained) > 1 else ""
    title = f"{first.config.model} after {steps}, {weights}{others}, {chosen.what}"
    # What the report of a run shows is of its own validation fold, and of its own checkpoint alone.
    keep = _Keeper(out, title, run_of(first.path) if is_own and len(trained) == 1 else None)
    found, judged = evaluate_volumes(
        trained, chosen, scoring, sliding=sliding, bar=progress_bar, keep=keep.scores, say=say
    )
    return keep.finish(found, judged, json=json)


def _score_masks(
    predictions: Path, labels: Path, scoring: ScoreOptions, ignore: int | None, out: Path | None, *, json: bool
) -> int:
    from dataclasses import replace

    from stoker.core.console import progress_bar, say
    from stoker.tasks.volumes.evaluation import score_masks

    scoring = scoring if out is not None else replace(scoring, pictures=0)
    keep = _Keeper(out, str(predictions))
    found, judged = score_masks(
        predictions, labels, scoring, ignore=ignore, bar=progress_bar, keep=keep.scores, say=say
    )
    return keep.finish(found, judged, json=json)


class _Keeper:
    """Writes what has been scored after every volume: an evaluation can take a night, and Ctrl-C must not lose it."""

    def __init__(self, out: Path | None, title: str, run: RunFolder | None = None) -> None:
        self._out, self._title, self._run = out, title, run
        if out is not None:
            try:
                out.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise UserError(
                    "out-not-writable", f"{out} cannot be created: {error.strerror or error}", hint="--out scores"
                ) from None

    def scores(self, found: VolumeEvaluation, _judged: Any) -> None:
        from stoker.core.files import write_text

        if self._out is not None:
            write_text(self._out / SCORES_FILE, dumps(found.as_dict(), indent=2, allow_nan=False) + "\n")

    def finish(self, found: VolumeEvaluation, judged: list[Judged], *, json: bool) -> int:
        """Draws and prints everything; the exit code."""
        from stoker.core.console import print_json, print_result, say
        from stoker.core.files import write_bytes, write_text
        from stoker.tasks.contact_sheet import draw_sheet
        from stoker.tasks.volumes.results import evaluation_text, sheet_of

        code, place = EXIT_OK, self._out
        try:
            if place is not None:
                self.scores(found, judged)
                sheet = draw_sheet(sheet_of(found, self._title, judged), LARGEST_SIDE)
                write_bytes(place / SHEET_FILE, sheet.as_png())
                say(f"{place}: {SCORES_FILE}, {SHEET_FILE}")
            if self._run is not None:
                place = self._run.root
                sheet = draw_sheet(sheet_of(found, self._title, judged[:REPORTED]), REPORTED_SIDE)
                write_bytes(self._run.worst_file, sheet.as_jpeg(REPORTED_BYTES))
                write_text(self._run.evaluation_file, dumps(found.as_dict(), indent=2, allow_nan=False) + "\n")
                say(f"`stoker report {place}` shows the worst volumes")
        except OSError as error:
            # The scores may have taken an hour: print them anyway.
            say(f"warning: {place} could not be written: {error.strerror or error}")
            code = EXIT_FINDING
        if json:
            print_json(found.as_dict())
        else:
            print_result(evaluation_text(found, self._title))
        return code
