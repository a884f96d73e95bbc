"""Training and validation: by group, by volume, or by region with a margin, and never by overlapping patch.

A split by region makes cropped volumes, which have no other voxels: nothing can leak from one part to the other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from stoker.core.errors import UserError
from stoker.core.units import count
from stoker.loader.rng import mix_numbers
from stoker.tasks.volumes.cases.cases import Case
from stoker.tasks.volumes.formats.volume import Shape, slab, whole


@dataclass(frozen=True)
class SplitRule:
    """How cases are divided into folds, and which of them is the validation set."""

    by: Literal["group", "volume", "region"] = "group"
    folds: int = 5
    fold: int | Literal["all"] = 0
    """The fold to validate on; `all` trains on everything, without validation."""
    margin: int = 0
    """Voxels between training and validation, for `region`: at least half of the network's receptive field."""
    seed: int = 0


@dataclass(frozen=True)
class Division:
    """The cases of a split; those of a split by region are boxes of volumes."""

    train: tuple[Case, ...]
    val: tuple[Case, ...]


def divide(cases: Sequence[Case], shapes: Mapping[str, Shape], rule: SplitRule) -> Division:
    """The cases to train and to validate on; `shapes` by id. Raises UserError for a fold without either."""
    if rule.fold == "all":
        return Division(tuple(cases), ())
    if not 0 <= rule.fold < rule.folds:
        raise UserError(
            "unknown-fold", f"fold {rule.fold}; there are the folds 0 to {rule.folds - 1}", hint="fold=0, or fold=all"
        )
    if rule.by == "region":
        parts = [_regions(case, shapes[case.id], rule) for case in cases]
        train = tuple(box for boxes, _ in parts for box in boxes)
        val = tuple(box for _, boxes in parts for box in boxes)
    else:
        names = {case.id: case.group if rule.by == "group" else case.id for case in cases}
        voxels: dict[str, int] = {}
        for case in cases:
            voxels[names[case.id]] = voxels.get(names[case.id], 0) + whole(shapes[case.id]).voxels
        fold_of = assign_folds(voxels, rule.folds, rule.seed)
        train = tuple(case for case in cases if fold_of[names[case.id]] != rule.fold)
        val = tuple(case for case in cases if fold_of[names[case.id]] == rule.fold)
    if not val or not train:
        raise _one_sided(cases, rule, "validate" if not val else "train")
    return Division(train, val)


def assign_folds(voxels: Mapping[str, int], folds: int, seed: int) -> dict[str, int]:
    """The fold of each group: the largest first, each into the fold that has the fewest voxels so far.

    A pure function of the names and sizes, in any order; the seed decides between equals."""
    names = sorted(voxels, key=lambda name: (-voxels[name], _rank(seed, name), name))
    filled = [0] * folds
    fold_of: dict[str, int] = {}
    for name in names:
        lightest = min(range(folds), key=lambda fold: (filled[fold], fold))
        fold_of[name] = lightest
        filled[lightest] += voxels[name]
    return fold_of


def _regions(case: Case, shape: Shape, rule: SplitRule) -> tuple[list[Case], list[Case]]:
    """A case cut across its longest axis: training parts on both sides, and the fold's slab for validation."""
    assert isinstance(rule.fold, int)
    axis = max(range(3), key=lambda number: (shape[number], -number))
    first, last = (rule.fold * shape[axis] // rule.folds, (rule.fold + 1) * shape[axis] // rule.folds)

    def part(begin: int, end: int) -> list[Case]:
        return [replace(case, box=slab(shape, axis, begin, end))] if end > begin else []

    return part(0, first - rule.margin) + part(last + rule.margin, shape[axis]), part(first, last)


def _one_sided(cases: Sequence[Case], rule: SplitRule, verb: str) -> UserError:
    if rule.by == "region":
        why = f"the volumes are too small for {rule.folds} slabs with a margin of {rule.margin} voxels"
        hint = "fewer folds, a smaller margin, or fold=all"
    else:
        there = len({case.group if rule.by == "group" else case.id for case in cases})
        noun = count(there, "group" if rule.by == "group" else "volume")
        why = f"there {'is' if there == 1 else 'are'} {noun} for {rule.folds} folds"
        others = "split by volume or by region, or " if rule.by == "group" else "split by region, or "
        hint = (f"folds={there}, " if 2 <= there < rule.folds else others) + "fold=all to train without validation"
    return UserError("empty-fold", f"fold {rule.fold} leaves nothing to {verb} on", why=why, hint=hint)


def _rank(seed: int, name: str) -> int:
    value = mix_numbers(seed, len(name))
    for byte in name.encode("utf-8", "surrogateescape"):
        value = mix_numbers(value, byte)
    return value
