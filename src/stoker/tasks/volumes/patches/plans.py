"""The plans of a run over volumes: from surveyed cases to what every batch of training and validation contains, and the
loader of such a plan.

listed = open_cases(root)
volumes = OpenVolumes(reading)
surveyed = survey(listed.cases, volumes)
parts = divide(surveyed.cases, surveyed.shapes, SplitRule(fold=0))
train = plan_training(parts.train, surveyed, volumes, rules, PatchRule((72, 136, 136)), steps, seed=0)
loader = PatchLoader(train, reading, LoaderOptions(workers=2))
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from stoker.core.console import Advance, Say, some
from stoker.core.errors import UserError
from stoker.core.units import count
from stoker.loader.batch import Quarantine
from stoker.loader.loader import BatchLoader, Follow, LoaderOptions, choose_engine
from stoker.loader.sampler import Steps
from stoker.tasks.volumes.cases.cases import Case
from stoker.tasks.volumes.cases.survey import Survey, boxed, image_dtype
from stoker.tasks.volumes.formats.opening import OpenVolumes
from stoker.tasks.volumes.formats.volume import ReadingOptions, Shape
from stoker.tasks.volumes.patches.label_index import build_label_index
from stoker.tasks.volumes.patches.labels import LabelRules
from stoker.tasks.volumes.patches.patch_collate import PatchBatch, PatchMaker, PatchPlan, PatchReader, RowLayout
from stoker.tasks.volumes.patches.patches import (
    UNCHANGED,
    GridPatches,
    Patches,
    RandomPatches,
    Small,
    TransformRange,
    check_labelled,
    check_patch_fits,
)


@dataclass(frozen=True)
class PatchRule:
    """The shape and sampling of patches."""

    patch: Shape
    small: Small = "refuse"
    """A volume smaller than the patch is padded with zeros that are never trained on, or refused."""
    foreground: float = 1 / 3
    """Share of training patches that are drawn for a voxel of a class other than 0."""
    transforms: TransformRange = UNCHANGED
    overlap: float = 0.0
    """Share of a validation patch that overlaps the next one."""


def plan_training(
    cases: Sequence[Case],
    surveyed: Survey,
    volumes: OpenVolumes,
    rules: LabelRules,
    rule: PatchRule,
    steps: Steps,
    *,
    seed: int,
    progress: Advance | None = None,
    say: Say = lambda _line: None,
) -> PatchPlan:
    """Random patches of these cases; `progress` counts the cases whose labels have been indexed.

    Cases without a labelled voxel, or whose labels cannot be read, are left out, and reported to `say`."""
    if blind := [case.id for case in cases if case.label is None]:
        raise UserError(
            "labels-missing",
            f"{count(len(blind), 'case')} to train on without a label: {some(blind)}",
            why="there is nothing to learn from an image alone",
            hint="add the labels, or leave these cases out",
        )
    labels = build_label_index(cases, volumes, rules, progress=progress, say=say)
    used = check_labelled(labels, [case.id for case in cases])
    unread = {one.id for one in labels.bad}
    for one in labels.bad:
        say(f"warning: {one.id} is left out, its labels cannot be read: {one.reason}")
    left_out = [case.id for number, case in enumerate(cases) if number not in set(used) and case.id not in unread]
    if left_out:
        say(f"{count(len(left_out), 'volume')} without a labelled voxel left out: {some(left_out)}")
    chosen = tuple(cases[number] for number in used)
    shapes = _shapes(chosen, surveyed, rule)
    patches = RandomPatches(rule.patch, shapes, labels.chosen(used), seed, rule.foreground, rule.transforms)
    return plan_patches(chosen, patches, steps, _dtype(chosen, surveyed), rules)


def plan_validation(
    cases: Sequence[Case],
    surveyed: Survey,
    rules: LabelRules | None,
    rule: PatchRule,
    batch_size: int,
    *,
    world: int = 1,
    rank: int = 0,
) -> PatchPlan:
    """A grid of patches over these cases; without rules, for prediction, no labels are read."""
    patches = GridPatches(rule.patch, _shapes(cases, surveyed, rule), rule.overlap)
    steps = Steps(len(patches), batch_size, world, rank, drop_last=False)
    return plan_patches(cases, patches, steps, _dtype(cases, surveyed), rules)


def plan_patches(
    cases: Sequence[Case], patches: Patches, steps: Steps, image_dtype: np.dtype[Any], rules: LabelRules | None
) -> PatchPlan:
    """The plan of a split whose images have the same channels and type of voxels."""
    by_channels = {len(case.images): case.id for case in cases}
    if len(by_channels) != 1:
        (few, one), (many, other) = sorted(by_channels.items())[:2]
        raise UserError(
            "channels-differ",
            f"case {one} has {count(few, 'channel')}, case {other} has {many}",
            why="a network has a fixed number of input channels",
            hint="list the same channels for every case",
        )
    label = None if rules is None else rules.dtype.name
    layout = RowLayout(next(iter(by_channels)), image_dtype.name, label, patches.most_voxels)
    return PatchPlan(tuple(cases), patches, steps, layout, rules)


def _shapes(cases: Sequence[Case], surveyed: Survey, rule: PatchRule) -> tuple[Shape, ...]:
    shapes = tuple(boxed(case, surveyed.facts[case.id]).shape for case in cases)
    check_patch_fits(rule.patch, shapes, [case.id for case in cases], rule.small)
    return shapes


def _dtype(cases: Sequence[Case], surveyed: Survey) -> np.dtype[Any]:
    return image_dtype([surveyed.facts[case.id] for case in cases])


class PatchLoader(BatchLoader[PatchBatch]):
    """The loader of a split of volumes."""

    def __init__(
        self,
        plan: PatchPlan,
        reading: ReadingOptions,
        options: LoaderOptions,
        say: Say = lambda _line: None,
        follow: Follow | None = None,
    ) -> None:
        self.plan = plan
        options = replace(options, engine=choose_engine(options.engine, options.workers, volumes=True))
        # One bad volume may always be set aside: among fifty, it would already exceed the usual hundredth.
        allowed = max(options.max_bad_fraction, 1 / len(plan.cases))
        quarantine = Quarantine(options.quarantine_file, allowed, len(plan.cases))
        opens = partial(_open_maker, plan, reading, options.lookahead // options.readers)
        super().__init__(plan, opens, quarantine, options, say, follow)


def _open_maker(plan: PatchPlan, reading: ReadingOptions, lookahead: int) -> PatchMaker:
    return PatchMaker(plan, PatchReader(OpenVolumes(reading), plan.layout.row_bytes, lookahead))
