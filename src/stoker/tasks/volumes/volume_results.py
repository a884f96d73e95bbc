"""The results of `stoker eval` for volumes: the record, its text, and the sheet with the worst volumes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from stoker.core.console import format_table, shown
from stoker.core.units import count
from stoker.tasks.contact_sheet import Picture, Sheet, SheetRow, SheetSection
from stoker.tasks.volumes.pictures import ERROR_LEGEND, Cut, plain, with_classes, with_errors
from stoker.tasks.volumes.predict.postprocess import PostStep
from stoker.tasks.volumes.scores.whole import ISOTROPIC, ClassScores, ScoreName, Spacing, VolumeScores, mean_of

MOST_LISTED = 20
"""Volumes in the text; `--json` and `--out` have all."""
_COMPETITION = {
    "score": "score of the competition", "topo_score": "topology", "surface_dice_2": "surface Dice at 2",
    "voi_score": "VOI score",
}  # fmt: skip
_WORDS = {"dice": "Dice", "iou": "IoU", "surface_dice": "surface Dice", **_COMPETITION}


@dataclass(frozen=True)
class Judged:
    """A volume with its scores and the planes where it is worst."""

    scores: VolumeScores
    cuts: tuple[Cut, ...] = ()


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


@dataclass(frozen=True)
class VolumeEvaluation:
    """The scores of all volumes, the worst first."""

    source: dict[str, Any]
    """What was scored: a checkpoint, or a folder of masks."""
    place: str
    """Where the labels are."""
    scoring: ScoreOptions
    volumes: tuple[VolumeScores, ...] = ()
    unreadable: tuple[tuple[str, str], ...] = ()
    """Name and reason of each volume that was left out."""
    left: int = 0
    """Volumes that have not been scored yet, if the evaluation was interrupted."""

    def means(self) -> dict[str, float | None]:
        """The means over the volumes: Dice, IoU and surface Dice in percent, the competition's score from 0 to 1."""
        means = [one.mean for one in self.volumes]
        found = _in_percent(ClassScores(*(mean_of(one[number] for one in means) for number in range(3))))
        if self.scoring.score == "vesuvius-surface":
            judged = [one.competition.as_dict() for one in self.volumes if one.competition is not None]
            found |= {name: mean_of(one[name] for one in judged) for name in _COMPETITION}
        return found

    def as_dict(self) -> dict[str, Any]:
        """The document that `--json` prints."""
        return {
            **self.source,
            "data": self.place,
            "score": self.scoring.score,
            "tolerance": self.scoring.tolerance,
            "spacing": list(self.scoring.spacing),
            "threshold": self.scoring.threshold,
            "post": self.scoring.chain,
            "mean": self.means(),
            "volumes": [_record(one) for one in self.volumes],
            "unreadable": [{"name": name, "reason": reason} for name, reason in self.unreadable],
            "left": self.left,
        }


def _record(one: VolumeScores) -> dict[str, Any]:
    document: dict[str, Any] = {"id": one.id, **_in_percent(one.mean), "labelled": 100 * one.labelled}
    if len(one.classes) > 1:
        document["classes"] = [{"class": number, **_in_percent(of)} for number, of in enumerate(one.classes, 1)]
    if one.competition is not None:
        document["competition"] = one.competition.as_dict()
    return document


def _in_percent(scores: ClassScores) -> dict[str, float | None]:
    return {name: None if value is None else 100 * value for name, value in scores._asdict().items()}


def evaluation_text(found: VolumeEvaluation, title: str) -> str:
    """The table of the volumes, the worst first, and their means."""
    listed = found.volumes[:MOST_LISTED]
    scoring = found.scoring
    unit = "voxels" if scoring.spacing == ISOTROPIC else "units of the spacing"
    about = f"{title}\n{shown(found.place)}: {count(len(found.volumes), 'volume')}"
    about += f", surface Dice within {scoring.tolerance:g} {unit}"
    about += f", threshold {scoring.threshold:g}" if scoring.threshold is not None else ""
    about += f", after {scoring.chain}" if scoring.post else ""
    means = found.means()
    header, rows = _table(listed, scoring.score, means)
    parts = [about, format_table(rows, header)]
    if len(listed) < len(found.volumes):
        parts[1] = f"{len(listed)} worst of {len(found.volumes)} volumes, and the mean of all\n{parts[1]}"
    if found.unreadable:
        lines = [f"  {shown(name)}: {reason}" for name, reason in found.unreadable[:MOST_LISTED]]
        lines += [f"  and {len(found.unreadable) - len(lines)} more"] if len(found.unreadable) > len(lines) else []
        parts.append("\n".join([f"{count(len(found.unreadable), 'unreadable volume')} left out:", *lines]))
    return "\n\n".join(parts)


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


def sheet_of(found: VolumeEvaluation, title: str, judged: Sequence[Judged]) -> Sheet:
    """The worst volumes as pictures: image, label, prediction and errors in the worst plane, errors across the other
    axes."""
    rows = []
    for one in judged:
        if not one.cuts:
            continue
        first = one.cuts[0]
        pictures = [
            Picture(plain(first.image), ("image",), (first.name,)),
            Picture(with_classes(first.image, first.label, first.known), ("label",), (first.name,)),
            Picture(with_classes(first.image, first.prediction), ("prediction",), (first.name,)),
        ]
        pictures += [
            Picture(with_errors(cut), ("errors",), (f"{cut.name} · {cut.wrong:,} wrong voxels",)) for cut in one.cuts
        ]
        rows.append(SheetRow(tuple(pictures), _title(one.scores)))
    section = SheetSection("The worst volumes", (ERROR_LEGEND,), tuple(rows))
    means = ", ".join(
        f"{_WORDS[name]} {value:.3f}" if name in _COMPETITION else f"{_WORDS[name]} {value:.2f} %"
        for name, value in found.means().items()
        if value is not None
    )
    return Sheet(title, (f"{shown(found.place)}: {count(len(found.volumes), 'volume')}; mean {means}",), (section,))


def _title(scores: VolumeScores) -> str:
    words, found = [shown(scores.id)], _in_percent(scores.mean)
    if scores.competition is not None:
        words.append(f"score {scores.competition.score:.3f}")
    words += [f"Dice {_digits(found['dice'], 2)} %", f"surface Dice {_digits(found['surface_dice'], 2)} %"]
    return " · ".join(words)


def _digits(value: float | None, digits: int) -> str:
    return "none" if value is None else f"{value:.{digits}f}"
