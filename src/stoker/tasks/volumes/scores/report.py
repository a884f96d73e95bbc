"""What was scored, volume by volume: the table, the JSON document, and the pictures of the worst volumes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from json import dumps
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from stoker.config import Config
from stoker.core.console import Answer, format_table, progress_bar, say, shown
from stoker.core.errors import UsageError, UserError
from stoker.core.files import write_bytes, write_text
from stoker.core.units import count, size_text
from stoker.io.stores import ReadFailure
from stoker.profile.host import usable_cpus
from stoker.profile.memory import read_memory
from stoker.run.folder import RunFolder
from stoker.tasks.contact_sheet import Sheet, SheetSection, draw_sheet
from stoker.tasks.volumes.formats.volume import Volume
from stoker.tasks.volumes.pictures import ERROR_LEGEND, Cut, cuts_row, worst_cuts
from stoker.tasks.volumes.predict.postprocess import PostStep, parse_chain, post_processed
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
    """How volumes are scored, and what is kept of them."""

    score: ScoreName
    tolerance: float
    spacing: Spacing
    """Spacing of the voxels, in the tolerance's unit."""
    threshold: float | None
    """Probability above which a voxel is of class 1; None for the most probable class."""
    post: tuple[PostStep, ...]
    """What is done to a mask before it is scored."""
    out: Path | None
    """Folder for scores and pictures."""
    pictures: int
    """How many of the worst volumes are drawn."""

    @property
    def chain(self) -> str:
        """The steps of `post`, as in `predict_postprocess`."""
        return ",".join(map(str, self.post))


def score_options(
    config: Config, *, score: ScoreName, spacing: Spacing, out: Path | None, pictures: int
) -> ScoreOptions:
    """Refuses what would fail after the first prediction, which may take an hour."""
    if min(spacing) <= 0:
        raise UsageError("usage", f"--spacing {' '.join(map(str, spacing))}: the size of a voxel is above 0")
    if score == "vesuvius-surface":
        load_matcher()
    return ScoreOptions(
        score, config.surface_tolerance, spacing, config.predict_threshold, parse_chain(config.predict_postprocess),
        out, pictures,
    )  # fmt: skip


class ScoreReport:
    """Scores volumes (`total` of them), sorts them with the worst first, and keeps pictures of the worst. The scores
    are written after every volume: an evaluation can take a night, and Ctrl-C must not lose it."""

    def __init__(self, source: dict[str, Any], place: str, scoring: ScoreOptions, total: int, title: str) -> None:
        self._source, self._place, self._scoring, self._total, self._title = source, place, scoring, total, title
        self._volumes: list[VolumeScores] = []
        self._cuts: dict[str, tuple[Cut, ...]] = {}
        self._unreadable: list[tuple[str, str]] = []
        self._warned = False
        if scoring.out is not None:
            try:
                scoring.out.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                seen = f"{scoring.out} cannot be created: {error.strerror or error}"
                raise UserError("out-not-writable", seen, hint="--out scores") from None

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
        if scoring.out is not None:
            self._write(scoring.out / SCORES_FILE)

    def leave_out(self, name: str, failure: ReadFailure) -> None:
        self._unreadable.append((name, str(failure)))
        say(f"warning: {name} is left out, it cannot be read: {failure}")

    def answer(self, run: RunFolder | None = None) -> Answer:
        """Everything that was scored, also as pictures beside the scores and in the run's folder."""
        place, complete = self._scoring.out, True
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
        voxels = max(math.prod(part.stop - part.start for part in octant) for octant in octants(shape))
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
