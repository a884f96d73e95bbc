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
from stoker.tasks.volumes.scores.surface_dice import ISOTROPIC, Spacing
from stoker.tasks.volumes.scores.whole import ClassScores, ScoreName, VolumeScores, mean_of

MOST_LISTED = 20
"""Volumes in the text; `--json` and `--out` have all."""


_WORDS = {
    "dice": "Dice", "iou": "IoU", "surface_dice": "surface Dice", "score": "score of the competition",
    "topo_score": "topology", "surface_dice_2": "surface Dice at 2", "voi_score": "VOI score",
}  # fmt: skip


@dataclass(frozen=True)
class Judged:
    """A volume with its scores and the planes where it is worst."""

    scores: VolumeScores
    cuts: tuple[Cut, ...] = ()


@dataclass(frozen=True)
class ScoreOptions:
    """How volumes are scored."""

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
        means: dict[str, float | None] = {
            "dice": _percent(mean_of([one.dice for one in self.volumes])),
            "iou": _percent(mean_of([one.iou for one in self.volumes])),
            "surface_dice": _percent(mean_of([one.surface_dice for one in self.volumes])),
        }
        if self.scoring.score == "vesuvius-surface":
            judged = [one.competition for one in self.volumes if one.competition is not None]
            means["score"] = mean_of([one.score for one in judged])
            means["topo_score"] = mean_of([one.topology.score for one in judged])
            means["surface_dice_2"] = mean_of([one.surface_dice for one in judged])
            means["voi_score"] = mean_of([one.variation.score for one in judged])
        return means

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
    document: dict[str, Any] = {
        "id": one.id,
        **_in_percent(one),
        "labelled": 100 * one.labelled,
    }
    if len(one.classes) > 1:
        document["classes"] = [{"class": number, **_in_percent(of)} for number, of in enumerate(one.classes, 1)]
    if one.competition is not None:
        document["competition"] = one.competition.as_dict()
    return document


def _in_percent(one: VolumeScores | ClassScores) -> dict[str, float | None]:
    return {"dice": _percent(one.dice), "iou": _percent(one.iou), "surface_dice": _percent(one.surface_dice)}


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
    header: tuple[str, ...] = ("volume", "Dice %", "IoU %", "surface Dice %", "labelled %")
    rows = [
        (shown(one.id), _two(_percent(one.dice)), _two(_percent(one.iou)), _two(_percent(one.surface_dice)),
         f"{100 * one.labelled:.0f}")
        for one in volumes
    ]  # fmt: skip
    last: tuple[str, ...] = ("mean", _two(means["dice"]), _two(means["iou"]), _two(means["surface_dice"]), "")
    if score != "vesuvius-surface":
        return header, [*rows, last]
    header = ("volume", "score", "topology", "surface Dice", "VOI score", *header[1:3])
    parts = [
        (row[0], _three(one.competition.score), _three(one.competition.topology.score),
         _three(one.competition.surface_dice), _three(one.competition.variation.score), *row[1:3])
        for one, row in zip(volumes, rows, strict=True)
        if one.competition is not None
    ]  # fmt: skip
    names = ("score", "topo_score", "surface_dice_2", "voi_score")
    return header, [*parts, ("mean", *(_three(means[name]) for name in names), *last[1:3])]


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
        f"{_WORDS[name]} {_named(name, value)}" for name, value in found.means().items() if value is not None
    )
    return Sheet(title, (f"{shown(found.place)}: {count(len(found.volumes), 'volume')}; mean {means}",), (section,))


def _title(scores: VolumeScores) -> str:
    words = [shown(scores.id)]
    if scores.competition is not None:
        words.append(f"score {_three(scores.competition.score)}")
    words += [f"Dice {_two(_percent(scores.dice))} %", f"surface Dice {_two(_percent(scores.surface_dice))} %"]
    return " · ".join(words)


def _named(name: str, value: float) -> str:
    return f"{value:.2f} %" if name in ("dice", "iou", "surface_dice") else f"{value:.3f}"


def _percent(value: float | None) -> float | None:
    return None if value is None else 100 * value


def _two(value: float | None) -> str:
    return "none" if value is None else f"{value:.2f}"


def _three(value: float | None) -> str:
    return "none" if value is None else f"{value:.3f}"
