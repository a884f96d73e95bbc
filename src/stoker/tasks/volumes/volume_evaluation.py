"""`stoker eval` for volumes: predicts and scores whole volumes one by one, or scores masks that are already on disk."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from json import dumps
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from stoker.config import Config, load_config
from stoker.config.volume_keys import PredictionKeys
from stoker.core.console import Advance, Answer, Say, format_table, progress_bar, say, shown, some
from stoker.core.errors import UsageError, UserError
from stoker.core.files import write_bytes, write_text
from stoker.core.units import count, size_text
from stoker.io.stores import ReadFailure
from stoker.profile.host import HostConfig, usable_cpus
from stoker.profile.memory import read_memory
from stoker.run.folder import RunFolder, run_of
from stoker.tasks.contact_sheet import Sheet, SheetSection, draw_sheet
from stoker.tasks.volumes.cases.cases import Case, open_cases, volumes_in
from stoker.tasks.volumes.cases.places import place_at, ref_to
from stoker.tasks.volumes.cases.split import divide
from stoker.tasks.volumes.cases.survey import statistics_of
from stoker.tasks.volumes.data import label_rules, list_cases, reading_options, split_rule, survey_cases
from stoker.tasks.volumes.formats.opening import OpenVolumes, VolumeRef
from stoker.tasks.volumes.formats.volume import ArrayVolume, Volume, whole
from stoker.tasks.volumes.pack.index import INDEX as PACK_INDEX
from stoker.tasks.volumes.patches.labels import LabelRules
from stoker.tasks.volumes.pictures import ERROR_LEGEND, Cut, cuts_row, worst_cuts
from stoker.tasks.volumes.predict.postprocess import PostStep, check_chain, parse_chain, post_processed
from stoker.tasks.volumes.predict.segmenter import predicted_mask, segmenter_of
from stoker.tasks.volumes.predict.windows import SlidingWindow
from stoker.tasks.volumes.scores.topology import BYTES_PER_VOXEL, load_matcher, octants
from stoker.tasks.volumes.scores.whole import (
    ISOTROPIC,
    ClassScores,
    ScoreName,
    Spacing,
    VolumeScores,
    mean_of,
    score_surface,
    score_volume,
)
from stoker.tasks.volumes.segment import open_trained

COMPETITION_IGNORE = 2
MEMORY_SHARE = 0.8
"""Share of the free memory that matching the topology may take."""
SCORES_FILE, SHEET_FILE = "scores.json", "worst.png"
# On the sheet that a run's report shows, four volumes in six pictures each fit into its width and into a megabyte.
REPORTED, REPORTED_SIDE, REPORTED_BYTES = 4, 180, 1_000_000
LARGEST_SIDE = 320
"""Side of a picture on the sheet: a volume of the competition is drawn voxel by voxel."""
MOST_LISTED = 20
"""Volumes in the text; `--json` and `--out` have all."""
_COMPETITION = {
    "score": "score of the competition", "topo_score": "topology", "surface_dice_2": "surface Dice at 2",
    "voi_score": "VOI score",
}  # fmt: skip
_WORDS = {"dice": "Dice", "iou": "IoU", "surface_dice": "surface Dice", **_COMPETITION}


@dataclass(frozen=True)
class ScoreOptions:
    score: ScoreName
    tolerance: float
    spacing: Spacing
    """Spacing of the voxels, in the tolerance's unit."""
    threshold: float | None
    """Probability above which a voxel is of class 1; None for the most probable class."""
    post: tuple[PostStep, ...]
    """What is done to a mask before it is scored."""
    pictures: int
    """Number of volumes, the worst ones, of which planes are kept."""

    @property
    def chain(self) -> str:
        """The steps of `post`, as in `predict_postprocess`."""
        return ",".join(map(str, self.post))


def _scoring(config: Config, score: ScoreName, spacing: Spacing, pictures: int) -> ScoreOptions:
    """Refuses what would fail after the first prediction, which may take an hour."""
    if min(spacing) <= 0:
        raise UsageError("usage", f"--spacing {' '.join(map(str, spacing))}: the size of a voxel is above 0")
    if score == "vesuvius-surface":
        load_matcher()
    steps = parse_chain(config.predict_postprocess)
    return ScoreOptions(score, config.surface_tolerance, spacing, config.predict_threshold, steps, pictures)


@dataclass(frozen=True)
class Chosen:
    """The cases that are scored, where they are read, and what their labels mean."""

    cases: tuple[Case, ...]
    volumes: OpenVolumes
    rules: LabelRules
    what: str
    """The split in words."""


class VolumeEvaluation:
    """Scores volumes, `total` in all, sorts them, the worst first, and keeps planes of the worst. The scores are
    written after every volume: an evaluation can take a night, and Ctrl-C must not lose it."""

    def __init__(
        self, source: dict[str, Any], place: str, scoring: ScoreOptions, total: int, title: str, out: Path | None
    ) -> None:
        self._source, self._place, self._scoring, self._total = source, place, scoring, total
        self._title, self._out = title, out
        self._volumes: list[VolumeScores] = []
        self._cuts: dict[str, tuple[Cut, ...]] = {}
        self._unreadable: list[tuple[str, str]] = []
        self._warned = False
        if out is not None:
            try:
                out.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise UserError(
                    "out-not-writable", f"{out} cannot be created: {error.strerror or error}", hint="--out scores"
                ) from None

    @property
    def number(self) -> str:
        """The number of the next volume, for a progress bar."""
        return f"{len(self._volumes) + len(self._unreadable) + 1} of {self._total}:"

    def add(
        self, name: str, image: Volume, prediction: NDArray[Any], label: NDArray[Any], classes: int, ignore: int | None
    ) -> None:
        scoring = self._scoring
        prediction = post_processed(prediction, scoring.post)
        with progress_bar(f"{self.number} scoring {name}", None, unit="octants") as advance:
            scores = score_volume(
                name, prediction, label, classes=classes, ignore=ignore, tolerance=scoring.tolerance,
                spacing=scoring.spacing,
            )  # fmt: skip
            if scoring.score == "vesuvius-surface":
                competition = score_surface(prediction, label, ignore, self._processes(label.shape), advance)
                scores = replace(scores, competition=competition)
        self._volumes = sorted([*self._volumes, scores], key=lambda one: (one.rank, one.id))
        worst = {one.id for one in self._volumes[: scoring.pictures]}
        if name in worst:
            self._cuts[name] = worst_cuts(image, label, prediction, ignore)
        self._cuts = {one: cuts for one, cuts in self._cuts.items() if one in worst}
        if self._out is not None:
            self._write(self._out / SCORES_FILE)

    def leave_out(self, name: str, failure: ReadFailure) -> None:
        self._unreadable.append((name, str(failure)))
        say(f"warning: {name} is left out, it cannot be read: {failure}")

    def answer(self, run: RunFolder | None = None) -> Answer:
        """Everything that was scored, also as pictures beside the scores and in the run's folder."""
        place, complete = self._out, True
        try:
            if place is not None:
                self._write(place / SCORES_FILE)
                write_bytes(place / SHEET_FILE, draw_sheet(self._sheet(self._total), LARGEST_SIDE).as_png())
                say(f"{place}: {SCORES_FILE}, {SHEET_FILE}")
            if run is not None:
                place = run.root
                sheet = draw_sheet(self._sheet(REPORTED), REPORTED_SIDE)
                write_bytes(run.worst_file, sheet.as_jpeg(REPORTED_BYTES))
                self._write(run.evaluation_file)
                say(f"`stoker report {place}` shows the worst volumes")
        except OSError as error:
            # The scores may have taken an hour: print them anyway.
            say(f"warning: {place} could not be written: {error.strerror or error}")
            complete = False
        return Answer(self._text(), self._document(), complete)

    def _write(self, path: Path) -> None:
        write_text(path, dumps(self._document(), indent=2, allow_nan=False) + "\n")

    def _means(self) -> dict[str, float | None]:
        """The means over the volumes: Dice, IoU and surface Dice in percent, the competition's score from 0 to 1."""
        means = [one.mean for one in self._volumes]
        found = _in_percent(ClassScores(*(mean_of(one[number] for one in means) for number in range(3))))
        if self._scoring.score == "vesuvius-surface":
            judged = [one.competition.as_dict() for one in self._volumes if one.competition is not None]
            found |= {name: mean_of(one[name] for one in judged) for name in _COMPETITION}
        return found

    def _document(self) -> dict[str, Any]:
        return {
            **self._source,
            "data": self._place,
            "score": self._scoring.score,
            "tolerance": self._scoring.tolerance,
            "spacing": list(self._scoring.spacing),
            "threshold": self._scoring.threshold,
            "post": self._scoring.chain,
            "mean": self._means(),
            "volumes": [_record(one) for one in self._volumes],
            "unreadable": [{"name": name, "reason": reason} for name, reason in self._unreadable],
            "left": self._total - len(self._volumes) - len(self._unreadable),
        }

    def _text(self) -> str:
        """The table of the volumes, the worst first, and their means."""
        volumes, unreadable, scoring = self._volumes, self._unreadable, self._scoring
        unit = "voxels" if scoring.spacing == ISOTROPIC else "units of the spacing"
        about = f"{self._title}\n{shown(self._place)}: {count(len(volumes), 'volume')}"
        about += f", surface Dice within {scoring.tolerance:g} {unit}"
        about += f", threshold {scoring.threshold:g}" if scoring.threshold is not None else ""
        about += f", after {scoring.chain}" if scoring.post else ""
        header, rows = _table(volumes[:MOST_LISTED], scoring.score, self._means())
        parts = [about, format_table(rows, header)]
        if len(volumes) > MOST_LISTED:
            parts[1] = f"{MOST_LISTED} worst of {len(volumes)} volumes, and the mean of all\n{parts[1]}"
        if unreadable:
            lines = [f"  {shown(name)}: {reason}" for name, reason in unreadable[:MOST_LISTED]]
            lines += [f"  and {len(unreadable) - len(lines)} more"] if len(unreadable) > len(lines) else []
            parts.append("\n".join([f"{count(len(unreadable), 'unreadable volume')} left out:", *lines]))
        return "\n\n".join(parts)

    def _sheet(self, most: int) -> Sheet:
        """The worst volumes as pictures: image, label, prediction and errors in the worst plane, errors across the
        other axes."""
        rows = [cuts_row(self._cuts[one.id], _title(one)) for one in self._volumes[:most] if one.id in self._cuts]
        section = SheetSection("The worst volumes", (ERROR_LEGEND,), tuple(rows))
        means = ", ".join(
            f"{_WORDS[name]} {value:.3f}" if name in _COMPETITION else f"{_WORDS[name]} {value:.2f} %"
            for name, value in self._means().items()
            if value is not None
        )
        about = f"{shown(self._place)}: {count(len(self._volumes), 'volume')}; mean {means}"
        return Sheet(self._title, (about,), (section,))

    def _processes(self, shape: Sequence[int]) -> int:
        """How many octants are matched at once: as many as there are cores, and as fit into memory."""
        voxels = max(int(np.prod([part.stop - part.start for part in octant])) for octant in octants(shape))
        need, memory = voxels * BYTES_PER_VOXEL, read_memory()
        if memory is None:
            return 1
        fit = int(MEMORY_SHARE * memory.available_bytes // need)
        if not fit and not self._warned:
            self._warned = True
            say(
                f"warning: matching the topology of an octant takes about {size_text(need)} of memory; "
                f"{size_text(memory.available_bytes)} are free"
            )
        return max(1, min(fit, usable_cpus()))


def _record(one: VolumeScores) -> dict[str, Any]:
    document: dict[str, Any] = {"id": one.id, **_in_percent(one.mean), "labelled": 100 * one.labelled}
    if len(one.classes) > 1:
        document["classes"] = [{"class": number, **_in_percent(of)} for number, of in enumerate(one.classes, 1)]
    if one.competition is not None:
        document["competition"] = one.competition.as_dict()
    return document


def _in_percent(scores: ClassScores) -> dict[str, float | None]:
    return {name: None if value is None else 100 * value for name, value in scores._asdict().items()}


def _table(
    volumes: Sequence[VolumeScores], score: ScoreName, means: dict[str, float | None]
) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    names = [*(shown(one.id) for one in volumes), "mean"]
    scores = [*(_in_percent(one.mean) for one in volumes), means]
    if score != "vesuvius-surface":
        labelled = [*(f"{100 * one.labelled:.0f}" for one in volumes), ""]
        return ("volume", "Dice %", "IoU %", "surface Dice %", "labelled %"), [
            (name, *(_digits(one[key], 2) for key in ClassScores._fields), share)
            for name, one, share in zip(names, scores, labelled, strict=True)
        ]
    judged = [*(one.competition.as_dict() for one in volumes if one.competition is not None), means]
    return ("volume", "score", "topology", "surface Dice", "VOI score", "Dice %", "IoU %"), [
        (name, *(_digits(parts[key], 3) for key in _COMPETITION), _digits(one["dice"], 2), _digits(one["iou"], 2))
        for name, one, parts in zip(names, scores, judged, strict=True)
    ]


def _title(scores: VolumeScores) -> str:
    words, found = [shown(scores.id)], _in_percent(scores.mean)
    if scores.competition is not None:
        words.append(f"score {scores.competition.score:.3f}")
    words += [f"Dice {_digits(found['dice'], 2)} %", f"surface Dice {_digits(found['surface_dice'], 2)} %"]
    return " · ".join(words)


def _digits(value: float | None, digits: int) -> str:
    return "none" if value is None else f"{value:.{digits}f}"


def evaluate(
    checkpoint: Path,
    data_root: str | None,
    settings: Sequence[str],
    *,
    split: Literal["val", "train", "all"] | None,
    raw: bool,
    score: ScoreName,
    spacing: Spacing,
    more: Sequence[Path] | None,
    out: Path | None,
    pictures: int,
) -> Answer:
    """Segments every case with these networks, averaged, and scores it; cases that cannot be read are left out and
    listed."""
    trained = [open_trained(path, say, settings, raw=raw) for path in (checkpoint, *(more or ()))]
    first = trained[0]
    config, scoring = first.config, _scoring(first.config, score, spacing, pictures)
    split = split or ("val" if data_root is None else "all")
    with progress_bar("listing", None) as advance:
        chosen = choose_cases(config, first.rules, split, say, advance)
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
    evaluation = VolumeEvaluation(source, str(config.data_root), scoring, len(chosen.cases), title, out)
    sliding = SlidingWindow(config.predict_overlap, config.predict_flips)
    for number, case in enumerate(chosen.cases):
        try:
            images = [chosen.volumes.get(ref, case.box) for ref in case.images]
            # Labels first: a wrong one must not cost a prediction.
            label = read_label(case, chosen.volumes, chosen.rules)
            with progress_bar(f"{evaluation.number} predicting {case.id}", None, unit="windows") as advance:
                prediction = predicted_mask(
                    segmenter, images, threshold=scoring.threshold, sliding=sliding,
                    statistics=(means[number], deviations[number]), progress=advance,
                )  # fmt: skip
        except ReadFailure as failure:
            evaluation.leave_out(case.id, failure)
            continue
        evaluation.add(case.id, images[0], prediction, label, first.classes, chosen.rules.ignore)
    return evaluation.answer(run)


def choose_cases(
    config: HostConfig,
    rules: LabelRules,
    split: Literal["val", "train", "all"],
    say: Say,
    progress: Advance | None = None,
) -> Chosen:
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
    surveyed = survey_cases(config, listed, volumes, say, progress)
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


@dataclass(frozen=True)
class MaskPair:
    """A mask on disk, its label, and the image if it is known."""

    id: str
    prediction: VolumeRef
    label: VolumeRef
    image: VolumeRef | None = None


def pair_masks(predictions: Path, labels: Path, say: Say) -> tuple[list[MaskPair], LabelRules | None]:
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
    pairs = []
    for name, path in masks.items():
        label, image = known[name]
        pairs.append(MaskPair(name, ref_to(path), label, image))
    return pairs, rules


def score_masks(
    predictions: Path,
    labels: Path,
    settings: Sequence[str],
    *,
    score: ScoreName,
    spacing: Spacing,
    more: Sequence[Path] | None,  # noqa: ARG001 - there is no checkpoint to average with
    out: Path | None,
    pictures: int,
) -> Answer:
    """Scores masks that are on disk already. Probabilities, floats or 0 to 255, need a threshold.

    Without `ignore_label`, it is the data set's; for the competition's score of a plain folder, 2."""
    # Any patch: nothing is predicted.
    config = load_config(None, ["task=segment3d", "patch_size=[1,1,1]", *settings]).config
    scoring, ignore = _scoring(config, score, spacing, pictures if out is not None else 0), config.ignore_label
    pairs, rules = pair_masks(predictions, labels, say)
    if ignore is None and rules is not None:
        ignore = rules.ignore
    elif ignore is None and scoring.score == "vesuvius-surface":
        ignore = COMPETITION_IGNORE
    volumes = OpenVolumes()
    name = str(predictions)
    evaluation = VolumeEvaluation({"predictions": name}, str(labels), scoring, len(pairs), name, out)
    for pair in pairs:
        try:
            label = volumes.get(pair.label)
            prediction = volumes.get(pair.prediction)
            _check_mask(pair, prediction, label, scoring)
            truth, guess = label.read(whole(label.shape)), prediction.read(whole(prediction.shape))
            image = None if pair.image is None else volumes.get(pair.image)
        except ReadFailure as failure:
            evaluation.leave_out(pair.id, failure)
            continue
        if scoring.threshold is not None:
            largest = 1 if guess.dtype.kind == "f" else np.iinfo(guess.dtype).max
            guess = (guess > scoring.threshold * largest).astype(np.uint8)
        elif scoring.score == "vesuvius-surface":
            guess = (guess != 0).astype(np.uint8)  # the competition treats 1 and 255 alike
        classes = _classes(pair.id, truth, guess, ignore)
        check_chain(scoring.post, classes)
        # Without an image, overlays are drawn on black.
        shown = image or ArrayVolume(pair.id, np.broadcast_to(np.uint8(0), truth.shape))
        evaluation.add(pair.id, shown, guess, truth, classes, ignore)
    return evaluation.answer()


def _check_mask(pair: MaskPair, prediction: Volume, label: Volume, scoring: ScoreOptions) -> None:
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
    LabelRules(2).check_kind(pair.id, label)


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
