"""`stoker eval` for volumes: predicts and scores whole volumes one by one, or scores masks that are already on disk."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, replace
from json import dumps
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from stoker.config import Config, load_config
from stoker.config.volume_keys import PredictionKeys
from stoker.core.console import Advance, Answer, Say, progress_bar, say, some
from stoker.core.errors import UsageError, UserError
from stoker.core.files import write_bytes, write_text
from stoker.core.units import count, size_text
from stoker.io.stores import ReadFailure
from stoker.profile.host import HostConfig, usable_cpus
from stoker.profile.memory import read_memory
from stoker.run.folder import RunFolder, run_of
from stoker.tasks.contact_sheet import draw_sheet
from stoker.tasks.volumes.cases.cases import Case, open_cases, volumes_in
from stoker.tasks.volumes.cases.places import place_at, ref_to
from stoker.tasks.volumes.cases.split import divide
from stoker.tasks.volumes.cases.survey import statistics_of
from stoker.tasks.volumes.data import label_rules, list_cases, reading_options, split_rule, survey_cases
from stoker.tasks.volumes.formats.opening import OpenVolumes, VolumeRef
from stoker.tasks.volumes.formats.volume import ArrayVolume, Volume, whole
from stoker.tasks.volumes.pack.index import INDEX as PACK_INDEX
from stoker.tasks.volumes.patches.labels import LabelRules
from stoker.tasks.volumes.pictures import worst_cuts
from stoker.tasks.volumes.predict.postprocess import check_chain, parse_chain, post_processed
from stoker.tasks.volumes.predict.segmenter import predicted_mask, segmenter_of
from stoker.tasks.volumes.predict.windows import SlidingWindow
from stoker.tasks.volumes.scores.topology import BYTES_PER_VOXEL, load_matcher, octants
from stoker.tasks.volumes.scores.whole import ScoreName, Spacing, score_surface, score_volume
from stoker.tasks.volumes.segment import open_trained
from stoker.tasks.volumes.volume_results import Judged, ScoreOptions, VolumeEvaluation, evaluation_text, sheet_of

COMPETITION_IGNORE = 2
MEMORY_SHARE = 0.8
"""Share of the free memory that matching the topology may take."""
SCORES_FILE, SHEET_FILE = "scores.json", "worst.png"
# On the sheet that a run's report shows, four volumes in six pictures each fit into its width and into a megabyte.
REPORTED, REPORTED_SIDE, REPORTED_BYTES = 4, 180, 1_000_000
LARGEST_SIDE = 320
"""Side of a picture on the sheet: a volume of the competition is drawn voxel by voxel."""


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


class _Judge:
    """Scores volumes, `about.left` in all, sorts them, and keeps planes of the worst. The scores are written after
    every volume: an evaluation can take a night, and Ctrl-C must not lose it."""

    def __init__(self, about: VolumeEvaluation, title: str, out: Path | None, run: RunFolder | None = None) -> None:
        self._about, self._scoring, self._total = about, about.scoring, about.left
        self._title, self._out, self._run = title, out, run
        self._judged: list[Judged] = []
        self._unreadable: list[tuple[str, str]] = []
        self._warned = False
        if out is not None:
            try:
                out.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise UserError(
                    "out-not-writable", f"{out} cannot be created: {error.strerror or error}", hint="--out scores"
                ) from None

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
        worst = heapq.nsmallest(scoring.pictures, [*(one.scores.rank for one in self._judged), scores.rank])
        cuts = worst_cuts(image, label, prediction, ignore) if scores.rank in worst else ()
        self._judged.append(Judged(scores, cuts))
        self._judged.sort(key=lambda one: (one.scores.rank, one.scores.id))
        # Planes of a volume that is no longer among the worst are dropped.
        for place in range(scoring.pictures, len(self._judged)):
            self._judged[place] = Judged(self._judged[place].scores)
        if self._out is not None:
            _write_scores(self._out / SCORES_FILE, self._evaluation())

    def leave_out(self, name: str, failure: ReadFailure) -> None:
        self._unreadable.append((name, str(failure)))
        say(f"warning: {name} is left out, it cannot be read: {failure}")

    @property
    def number(self) -> str:
        """The number of the next volume, for a progress bar."""
        return f"{len(self._judged) + len(self._unreadable) + 1} of {self._total}:"

    def answer(self) -> Answer:
        """Everything that was scored, also as pictures beside the scores and in the run's folder."""
        found, place, complete = self._evaluation(), self._out, True
        try:
            if place is not None:
                _write_scores(place / SCORES_FILE, found)
                sheet = draw_sheet(sheet_of(found, self._title, self._judged), LARGEST_SIDE)
                write_bytes(place / SHEET_FILE, sheet.as_png())
                say(f"{place}: {SCORES_FILE}, {SHEET_FILE}")
            if self._run is not None:
                place = self._run.root
                sheet = draw_sheet(sheet_of(found, self._title, self._judged[:REPORTED]), REPORTED_SIDE)
                write_bytes(self._run.worst_file, sheet.as_jpeg(REPORTED_BYTES))
                _write_scores(self._run.evaluation_file, found)
                say(f"`stoker report {place}` shows the worst volumes")
        except OSError as error:
            # The scores may have taken an hour: print them anyway.
            say(f"warning: {place} could not be written: {error.strerror or error}")
            complete = False
        return Answer(evaluation_text(found, self._title), found.as_dict(), complete)

    def _evaluation(self) -> VolumeEvaluation:
        return replace(
            self._about,
            volumes=tuple(one.scores for one in self._judged),
            unreadable=tuple(self._unreadable),
            left=self._total - len(self._judged) - len(self._unreadable),
        )

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


def _write_scores(path: Path, found: VolumeEvaluation) -> None:
    write_text(path, dumps(found.as_dict(), indent=2, allow_nan=False) + "\n")


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
    about = VolumeEvaluation(source, str(config.data_root), scoring, left=len(chosen.cases))
    judge = _Judge(about, title, out, run)
    sliding = SlidingWindow(config.predict_overlap, config.predict_flips)
    for number, case in enumerate(chosen.cases):
        try:
            images = [chosen.volumes.get(ref, case.box) for ref in case.images]
            # Labels first: a wrong one must not cost a prediction.
            label = read_label(case, chosen.volumes, chosen.rules)
            with progress_bar(f"{judge.number} predicting {case.id}", None, unit="windows") as advance:
                prediction = predicted_mask(
                    segmenter, images, threshold=scoring.threshold, sliding=sliding,
                    statistics=(means[number], deviations[number]), progress=advance, say=say,
                )  # fmt: skip
        except ReadFailure as failure:
            judge.leave_out(case.id, failure)
            continue
        judge.add(case.id, images[0], prediction, label, first.classes, chosen.rules.ignore)
    return judge.answer()


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
    judge = _Judge(VolumeEvaluation({"predictions": name}, str(labels), scoring, left=len(pairs)), name, out)
    for pair in pairs:
        try:
            label = volumes.get(pair.label)
            prediction = volumes.get(pair.prediction)
            _check_mask(pair, prediction, label, scoring)
            truth, guess = label.read(whole(label.shape)), prediction.read(whole(prediction.shape))
            image = None if pair.image is None else volumes.get(pair.image)
        except ReadFailure as failure:
            judge.leave_out(pair.id, failure)
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
        judge.add(pair.id, shown, guess, truth, classes, ignore)
    return judge.answer()


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
