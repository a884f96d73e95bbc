"""`stoker eval` for volumes: predicts and scores whole volumes one by one, or scores masks that are already on disk."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from stoker.config import load_config
from stoker.config.volume_keys import PredictionKeys
from stoker.core.console import Answer, progress_bar, say, some
from stoker.core.errors import UserError
from stoker.core.units import count
from stoker.io.stores import ReadFailure
from stoker.profile.host import HostConfig
from stoker.run.folder import run_of
from stoker.tasks.volumes.cases.cases import Case, open_cases, volumes_in
from stoker.tasks.volumes.cases.places import place_at, ref_to
from stoker.tasks.volumes.cases.split import divide
from stoker.tasks.volumes.cases.survey import statistics_of
from stoker.tasks.volumes.data import label_rules, list_cases, reading_options, split_rule, survey_cases
from stoker.tasks.volumes.formats.opening import OpenVolumes, VolumeRef
from stoker.tasks.volumes.formats.volume import ArrayVolume, Volume, whole
from stoker.tasks.volumes.pack.index import INDEX as PACK_INDEX
from stoker.tasks.volumes.patches.labels import LabelRules
from stoker.tasks.volumes.predict.postprocess import check_chain
from stoker.tasks.volumes.predict.segmenter import predicted_mask, segmenter_of
from stoker.tasks.volumes.predict.windows import SlidingWindow
from stoker.tasks.volumes.scores.report import ScoreOptions, ScoreReport, score_options
from stoker.tasks.volumes.segment import open_trained

COMPETITION_IGNORE = 2


@dataclass(frozen=True)
class Chosen:
    """The cases that are scored, where they are read, and what their labels mean."""

    cases: tuple[Case, ...]
    volumes: OpenVolumes
    rules: LabelRules
    what: str
    """The split in words."""


def evaluate(
    checkpoint: Path,
    data_root: str | None,
    settings: Sequence[str],
    *,
    split: Literal["val", "train", "all"] | None,
    raw: bool,
    more: Sequence[Path] | None,
    **options: Any,
) -> Answer:
    """Segments every case with these networks, averaged, and scores it; cases that cannot be read are left out and
    listed. The options are those of `score_options`."""
    trained = [open_trained(path, say, settings, raw=raw) for path in (checkpoint, *(more or ()))]
    first = trained[0]
    config, scoring = first.config, score_options(first.config, **options)
    split = split or ("val" if data_root is None else "all")
    chosen = choose_cases(config, first.rules, split)
    segmenter = segmenter_of(trained)
    if scoring.threshold is not None and first.classes != 2:
        raise UserError(
            "threshold-of-many-classes",
            f"predict_threshold is {scoring.threshold:g}, but the network knows {first.classes} classes",
            why="a threshold decides between one class and background; among several, the most probable one is taken",
            hint="leave out predict_threshold",
        )
    check_chain(scoring.post, first.classes)
    means, deviations = statistics_of(chosen.cases, chosen.volumes, config.normalize)
    source = {
        "checkpoint": str(first.path), "averaged_with": [str(other.path) for other in trained[1:]],
        "model": config.model, "weights": "averaged" if first.averaged else "raw", "epoch": first.epoch,
        "step": first.step, "split": chosen.what,
    }  # fmt: skip
    steps = f"{count(first.epoch, 'epoch')} ({count(first.step, 'step')})"
    others = f" and {count(len(trained) - 1, 'other network')}" if len(trained) > 1 else ""
    title = f"{config.model} after {steps}, {source['weights']} weights{others}, {chosen.what}"
    # A run's report shows the scores of its own validation fold by its own checkpoint alone. Settings of prediction and
    # scoring may differ from the run's, the volumes may not.
    keys = {text.partition("=")[0] for text in settings}
    is_own = split == "val" and len(trained) == 1 and keys <= PredictionKeys.model_fields.keys() | {"surface_tolerance"}
    run = run_of(first.path) if is_own else None
    report = ScoreReport(source, str(config.data_root), scoring, len(chosen.cases), title)
    sliding = SlidingWindow(config.predict_overlap, config.predict_flips)
    for number, case in enumerate(chosen.cases):
        try:
            images = [chosen.volumes.get(ref, case.box) for ref in case.images]
            # Labels first: a wrong one must not cost a prediction.
            label = read_label(case, chosen.volumes, chosen.rules)
            with progress_bar(f"{report.number} predicting {case.id}", None, unit="windows") as advance:
                prediction = predicted_mask(
                    segmenter, images, threshold=scoring.threshold, sliding=sliding,
                    statistics=(means[number], deviations[number]), progress=advance,
                )  # fmt: skip
        except ReadFailure as failure:
            report.leave_out(case.id, failure)
            continue
        report.add(case.id, images[0], prediction, label, first.classes, chosen.rules.ignore)
    return report.answer(run)


def choose_cases(config: HostConfig, rules: LabelRules, split: Literal["val", "train", "all"]) -> Chosen:
    """The cases of a split that have labels; the same fold as in training."""
    listed = list_cases(config, say)
    found = label_rules(config, listed)
    if found.classes != rules.classes:
        raise UserError(
            "classes-differ",
            f"{config.data_root} has {found.classes} classes, the network knows {rules.classes}",
            why="predictions would be compared with labels that mean something else",
            hint="a data set with the classes of training",
        )
    volumes = OpenVolumes(reading_options(config))
    with progress_bar("listing", None) as advance:
        surveyed = survey_cases(config, listed, volumes, say, advance)
    if split == "all":
        cases, what = surveyed.cases, "all volumes"
    else:
        parts = divide(surveyed.cases, surveyed.shapes, split_rule(config))
        cases = parts.val if split == "val" else parts.train
        what = "training volumes" if split == "train" else f"fold {config.fold} of {config.folds}"
    if not cases:
        raise UserError(
            "nothing-to-score",
            f"fold: {config.fold} leaves no volumes for validation",
            hint="--split train, or another folder with labelled volumes: stoker eval CKPT DATA_ROOT",
        )
    labelled = tuple(case for case in cases if case.label is not None)
    if len(labelled) < len(cases):
        say(f"{count(len(cases) - len(labelled), 'volume')} without a label left out")
    if not labelled:
        raise UserError(
            "labels-missing", f"no volume of {config.data_root} has a label", why="there is nothing to score"
        )
    return Chosen(labelled, volumes, found, what)


def read_label(case: Case, volumes: OpenVolumes, rules: LabelRules) -> NDArray[Any]:
    """The labels of a whole case, checked."""
    assert case.label is not None
    volume = volumes.get(case.label, case.box)
    rules.check_kind(case.id, volume)
    label = volume.read(whole(volume.shape))
    rules.check_values(case.id, volume.name, label)
    return label


MaskPair = tuple[str, VolumeRef, VolumeRef, VolumeRef | None]
"""A name, the mask on disk, its label, and the image if it is known."""


def pair_masks(predictions: Path, labels: Path) -> tuple[list[MaskPair], LabelRules | None]:
    """The masks of a folder with their labels, by name: those of a data set, or of a folder of masks."""
    masks = volumes_in(place_at(predictions))
    if not masks:
        raise UserError("no-masks", f"{predictions} has no masks", why="a mask is a file like 1004283650.tif",
                        hint=f"ls {predictions}")  # fmt: skip
    rules: LabelRules | None = None
    known: dict[str, tuple[VolumeRef, VolumeRef | None]]
    is_data_set = labels.suffix.lower() in (".yaml", ".yml") or any(
        (labels / name).is_file() for name in ("train.csv", "dataset.json", PACK_INDEX)
    )
    if is_data_set:
        listed = open_cases(labels)
        rules = listed.rules
        known = {case.id: (case.label, case.images[0]) for case in listed.cases if case.label is not None}
    else:
        known = {name: (ref_to(path), None) for name, path in volumes_in(place_at(labels)).items()}
    if strange := sorted(masks.keys() - known.keys()):
        raise UserError(
            "labels-missing",
            f"{labels} has no label for {count(len(strange), 'mask')}: {some(strange)}",
            why="a mask and its label have the same name",
            hint="--labels with the folder that holds them, or move these masks elsewhere",
        )
    if rest := len(known) - len(masks):
        say(f"{count(rest, 'label')} without a mask left out")
    return [(name, ref_to(path), *known[name]) for name, path in masks.items()], rules


def score_masks(
    predictions: Path,
    labels: Path,
    settings: Sequence[str],
    *,
    more: Sequence[Path] | None,  # noqa: ARG001 - there is no checkpoint to average with
    **options: Any,
) -> Answer:
    """Scores masks that are on disk already. Probabilities, floats or 0 to 255, need a threshold.

    Without `ignore_label`, it is the data set's; for the competition's score of a plain folder, 2."""
    # Any patch: nothing is predicted.
    config = load_config(None, ["task=segment3d", "patch_size=[1,1,1]", *settings]).config
    scoring, ignore = score_options(config, **options), config.ignore_label
    if scoring.out is None:
        scoring = replace(scoring, pictures=0)
    pairs, rules = pair_masks(predictions, labels)
    if ignore is None and rules is not None:
        ignore = rules.ignore
    elif ignore is None and scoring.score == "vesuvius-surface":
        ignore = COMPETITION_IGNORE
    volumes = OpenVolumes()
    source = str(predictions)
    report = ScoreReport({"predictions": source}, str(labels), scoring, len(pairs), source)
    for name, mask, truth, picture in pairs:
        try:
            label, prediction = volumes.get(truth), volumes.get(mask)
            _check_mask(name, prediction, label, scoring)
            wanted, guess = label.read(whole(label.shape)), prediction.read(whole(prediction.shape))
            # Without an image, overlays are drawn on black.
            black = ArrayVolume(name, np.broadcast_to(np.uint8(0), label.shape))
            image: Volume = black if picture is None else volumes.get(picture)
        except ReadFailure as failure:
            report.leave_out(name, failure)
            continue
        if scoring.threshold is not None:
            largest = 1 if guess.dtype.kind == "f" else np.iinfo(guess.dtype).max
            guess = (guess > scoring.threshold * largest).astype(np.uint8)
        elif scoring.score == "vesuvius-surface":
            guess = (guess != 0).astype(np.uint8)  # the competition treats 1 and 255 alike
        classes = _classes(name, wanted, guess, ignore)
        check_chain(scoring.post, classes)
        report.add(name, image, guess, wanted, classes, ignore)
    return report.answer()


def _check_mask(name: str, prediction: Volume, label: Volume, scoring: ScoreOptions) -> None:
    if prediction.shape != label.shape:
        raise UserError(
            "shapes-differ",
            f"{prediction.name} is {prediction.shape}, {label.name} is {label.shape}",
            why="every voxel of the mask needs its label",
            hint="predict the whole volume, or move this mask elsewhere",
        )
    if prediction.dtype.kind == "f" and scoring.threshold is None:
        raise UserError(
            "probabilities",
            f"{prediction.name} holds {prediction.dtype} numbers",
            why="a mask holds classes; probabilities become classes by a threshold",
            hint="predict_threshold=0.5",
        )
    LabelRules(2).check_kind(name, label)


def _classes(name: str, label: NDArray[Any], prediction: NDArray[Any], ignore: int | None) -> int:
    """How many classes occur. Where nothing is labelled, a mask may hold anything; elsewhere it must hold classes."""
    known = label if ignore is None else label[label != ignore]
    low, high = (int(known.min()), int(known.max())) if known.size else (0, 0)
    low, high = min(low, int(prediction.min())), max(high, int(prediction.max()))
    if low < 0 or high > 32_766:
        raise UserError("label-out-of-range", f"{name} has the values {low} to {high}", why="classes are 0 to 32,766")
    if high == 255 and known.size and int(known.max()) <= 1:
        raise UserError(
            "mask-of-bytes",
            f"the mask of {name} has values up to 255, its label only 0 and 1",
            why="255 would count as one more class, which no label has",
            hint="predict_threshold=0.5 takes 0 to 255 as probabilities",
        )
    return max(2, high + 1)
