"""No voxel of a validation set is ever trained on, however the cases are divided."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.core.errors import UserError
from stoker.tasks.volumes.cases.cases import Case
from stoker.tasks.volumes.cases.split import SplitRule, assign_folds, divide
from stoker.tasks.volumes.formats.opening import VolumeRef
from stoker.tasks.volumes.formats.volume import Region, Shape, whole

SIZES = st.tuples(*[st.integers(1, 60)] * 3)


def case(name: str, group: str) -> Case:
    return Case(name, group, (VolumeRef(f"{name}.tif"),), VolumeRef(f"{name}-label.tif"))


@st.composite
def data_sets(draw: st.DrawFn) -> tuple[list[Case], dict[str, Shape]]:
    groups = draw(st.lists(st.sampled_from("abcdef"), min_size=1, max_size=14))
    cases = [case(f"case{number}", group) for number, group in enumerate(groups)]
    return cases, {one.id: draw(SIZES) for one in cases}


@given(data=data_sets(), folds=st.integers(2, 6), seed=st.integers(0, 9), by=st.sampled_from(["group", "volume"]))
@settings(max_examples=30, deadline=None)
def test_groups_and_volumes_are_never_divided(
    data: tuple[list[Case], dict[str, Shape]], folds: int, seed: int, by: str
) -> None:
    cases, shapes = data
    validated: list[str] = []
    refused: list[str] = []
    for fold in range(folds):
        try:
            parts = divide(cases, shapes, SplitRule(by=by, folds=folds, fold=fold, seed=seed))  # type: ignore[arg-type]
        except UserError as error:
            refused.append(error.name)
            continue
        assert {one.id for one in parts.train} | {one.id for one in parts.val} == {one.id for one in cases}
        assert not {one.id for one in parts.train} & {one.id for one in parts.val}
        if by == "group":
            assert not {one.group for one in parts.train} & {one.group for one in parts.val}
        validated += [one.id for one in parts.val]
    assert len(validated) == len(set(validated))
    assert set(refused) <= {"empty-fold"}
    units = {one.group if by == "group" else one.id for one in cases}
    if len(units) >= folds:
        assert len(validated) == len(cases)


@given(data=data_sets(), folds=st.integers(2, 5), margin=st.integers(0, 12))
@settings(max_examples=30, deadline=None)
def test_regions_keep_their_margin_and_folds_cover_everything(
    data: tuple[list[Case], dict[str, Shape]], folds: int, margin: int
) -> None:
    cases, shapes = data
    validated = dict.fromkeys(shapes, 0)
    for fold in range(folds):
        try:
            parts = divide(cases, shapes, SplitRule(by="region", folds=folds, fold=fold, margin=margin))
        except UserError:
            # Slabs that a margin or the number of folds leaves nothing of; test_a_fold_without_validation_is_refused.
            return
        for one in parts.val:
            box = one.box or whole(shapes[one.id])
            validated[one.id] += box.voxels
            # Grown by the margin on every side it must still not touch what is trained on.
            wide = Region(
                tuple(a - margin for a in box.start),  # type: ignore[arg-type]
                tuple(a + margin for a in box.stop),  # type: ignore[arg-type]
            )
            for other in parts.train:
                if other.id == one.id:
                    assert other.box is not None
                    assert any(
                        wide.stop[axis] <= other.box.start[axis] or other.box.stop[axis] <= wide.start[axis]
                        for axis in range(3)
                    )
    assert validated == {name: whole(shape).voxels for name, shape in shapes.items()}


def test_folds_are_balanced_by_voxels_and_the_same_in_any_order() -> None:
    voxels = {f"scroll{number}": size for number, size in enumerate([500, 90, 80, 300, 200, 100, 150, 60, 20, 10])}
    folds = assign_folds(voxels, 3, seed=0)
    assert assign_folds(dict(reversed(voxels.items())), 3, seed=0) == folds
    sums = [sum(size for name, size in voxels.items() if folds[name] == fold) for fold in range(3)]
    assert max(sums) - min(sums) <= 20
    equal = {f"volume{number}": 8 for number in range(12)}
    assert assign_folds(equal, 3, seed=0) != assign_folds(equal, 3, seed=1)


@pytest.mark.parametrize(
    ("rule", "name", "hint"),
    [
        (SplitRule(folds=5, fold=1), "empty-fold", "fold=all"),
        (SplitRule(folds=5, fold=5), "unknown-fold", "fold=0"),
        (SplitRule(by="volume", folds=3, fold=2), "empty-fold", "folds=2"),
        (SplitRule(by="region", folds=4, margin=60), "empty-fold", "margin"),
    ],
)
def test_a_fold_without_validation_is_refused(rule: SplitRule, name: str, hint: str) -> None:
    cases, shapes = [case("a", "s"), case("b", "s")], {"a": (32, 40, 60), "b": (32, 40, 60)}
    with pytest.raises(UserError) as caught:
        divide(cases, shapes, rule)  # type: ignore[arg-type]
    assert caught.value.name == name
    assert hint in str(caught.value.hint)
    parts = divide(cases, shapes, SplitRule(fold="all"))  # type: ignore[arg-type]
    assert (parts.train, parts.val) == (tuple(cases), ())
