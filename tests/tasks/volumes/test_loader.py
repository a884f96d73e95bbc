"""The stream of patches is the same with any engine, any number of workers and ranks, and after any resume."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zarr

from stoker.core.errors import UserError
from stoker.loader.batch import TooManyBad
from stoker.loader.loader import LoaderOptions
from stoker.loader.sampler import Steps
from stoker.tasks.demo import write_scrolls
from stoker.tasks.volumes.augment import turned
from stoker.tasks.volumes.cases.cases import Case, open_cases
from stoker.tasks.volumes.cases.split import SplitRule, divide
from stoker.tasks.volumes.cases.survey import survey
from stoker.tasks.volumes.data import PatchLoader, PatchRule, plan_patches, plan_training, plan_validation
from stoker.tasks.volumes.formats.opening import OpenVolumes, VolumeRef, open_volume
from stoker.tasks.volumes.formats.volume import ReadingOptions, Region, whole
from stoker.tasks.volumes.patches.labels import LabelRules
from stoker.tasks.volumes.patches.patch_collate import PatchBatch, PatchPlan
from stoker.tasks.volumes.patches.patches import GridPatches, TransformRange, training_steps
from tests.tasks.volumes.writing import FORMATS

PATCH = (10, 12, 14)
PLAIN = TransformRange()
EVERYTHING = TransformRange(flips=(0.5, 0.5, 0.5), turns=0.5, rotation=0.4, scaling=0.4)
READING = ReadingOptions()


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> tuple[Case, ...]:
    root = tmp_path_factory.mktemp("scrolls")
    write_scrolls(root, volumes=5, shape=(20, 28, 30), scrolls=2, seed=1)
    return open_cases(root).cases


def training(
    cases: tuple[Case, ...], steps: Steps, transforms: TransformRange, rules: LabelRules | None = None
) -> PatchPlan:
    rule = PatchRule(PATCH, seed=7, small="pad", transforms=transforms)
    return plan_training(cases, survey(cases, OpenVolumes()), rules or LabelRules(2, ignore=2), rule, steps)


def patch_of(batch: PatchBatch, slot: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The patch of a plain sample."""
    assert batch.plain[slot]
    image, label = batch.region(slot)
    order, flips = batch.orders[slot].tolist(), batch.flips[slot].tolist()
    return turned(image, order, flips), turned(label, order, flips)


def digest(batch: PatchBatch) -> str:
    """A hash of everything that a batch trains on; rows are longer than what was read into them."""
    found = hashlib.blake2b()
    for slot in range(len(batch)):
        for part in batch.region(slot):
            found.update(np.ascontiguousarray(part.numpy()).tobytes())
    for array in (batch.matrices, batch.offsets, batch.flips, batch.orders, batch.cases, batch.keys):
        found.update(array.tobytes())
    return f"{batch.next_position} {found.hexdigest()}"


def stream(plan: PatchPlan, epoch: int = 2, start: int = 0, **options: Any) -> list[str]:
    loader = PatchLoader(plan, READING, LoaderOptions(**options))
    try:
        return [digest(batch) for batch in loader.epoch(epoch, start)]
    finally:
        loader.close()


def test_the_stream_is_the_same_for_any_engine_and_after_any_resume(cases: tuple[Case, ...]) -> None:
    plan = training(cases, training_steps(6, 3), EVERYTHING)
    expected = stream(plan)
    assert len(set(expected)) == 6
    assert stream(plan, engine="thread", workers=3) == expected
    assert stream(plan, engine="process", workers=2) == expected
    assert stream(plan, epoch=3) != expected
    for step in (1, 4):
        assert [one.split()[1] for one in stream(plan, start=3 * step)] == [one.split()[1] for one in expected[step:]]


@pytest.mark.parametrize(("name", "kind"), [("tiff lzw", "uint8"), ("nii", "float32"), ("zarr v3 sharded", "uint8")])
def test_patches_are_slices_of_the_array(name: str, kind: str, tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    image = (random.random((26, 27, 29)) * 200).astype(kind)
    label = random.integers(0, 3, image.shape, dtype=np.uint8)
    refs = []
    for part, content in (("image", image), ("label", label)):
        (tmp_path / part).mkdir()
        refs.append(FORMATS[name](tmp_path / part, content))
    case = Case("c", "c", (refs[0], refs[0]), refs[1])
    flips = TransformRange(flips=(0.5, 0.5, 0.5), turns=0.5)
    for batch in PatchLoader(training((case,), training_steps(4, 4), flips), READING, LoaderOptions()).epoch(0):
        for slot in range(4):
            region = Region(tuple(batch.starts[slot]), tuple(batch.starts[slot] + batch.shapes[slot]))
            axes = [axis for axis in range(3) if batch.flips[slot][axis]]
            for found, source in zip(patch_of(batch, slot), (image, label), strict=True):
                expected = np.flip(source[region.slices].transpose(batch.orders[slot]), axes)
                assert found.shape[-3:] == PATCH
                assert found.numpy().dtype == source.dtype
                assert np.array_equal(found.numpy()[0] if found.ndim == 4 else found.numpy(), expected)


def test_a_grid_puts_every_volume_together_again(cases: tuple[Case, ...]) -> None:
    surveyed = survey(cases, OpenVolumes())
    shapes = tuple(surveyed.shapes[case.id] for case in cases)
    plan = plan_validation(cases, surveyed, LabelRules(2, 2), PatchRule(PATCH))
    plan = replace(plan, steps=replace(plan.steps, batch_size=4))
    made = [(np.zeros(shape, np.uint8), np.zeros(shape, np.uint8)) for shape in shapes]
    for batch in PatchLoader(plan, READING, LoaderOptions(workers=2)).epoch(0):
        assert batch.valid.all()
        for slot in range(len(batch)):
            place = Region(tuple(batch.starts[slot]), tuple(batch.starts[slot] + PATCH)).slices
            image, label = patch_of(batch, slot)
            made[batch.cases[slot]][0][place] = image[0]
            made[batch.cases[slot]][1][place] = label
    for case, shape, (image, label) in zip(cases, shapes, made, strict=True):
        assert case.label is not None
        assert np.array_equal(image, open_volume(case.images[0]).read(whole(shape)))
        assert np.array_equal(label, open_volume(case.label).read(whole(shape)))


def test_what_lies_outside_a_volume_is_never_trained_on(tmp_path: Path) -> None:
    for dtype, rules in ((np.uint8, LabelRules(2, ignore=2)), (np.int32, LabelRules(2, ignore=-1))):
        np.save(tmp_path / "image.npy", np.full((6, 40, 40), 9, np.uint8))
        np.save(tmp_path / "label.npy", np.ones((6, 40, 40), dtype))
        case = Case("c", "c", (VolumeRef(str(tmp_path / "image.npy")),), VolumeRef(str(tmp_path / "label.npy")))
        plan = training((case,), training_steps(3, 4), PLAIN, rules)
        for batch in PatchLoader(plan, READING, LoaderOptions()).epoch(0):
            for slot in range(4):
                image, label = patch_of(batch, slot)
                assert (image[0, 2:8] == 9).all()
                assert (label[2:8] == 1).all()
                assert rules.outside not in (0, 1)
                assert (label[:2] == rules.outside).all()
                assert (label[8:] == rules.outside).all()
                assert not image[0, :2].any()


def damaged(how: str, folder: Path) -> VolumeRef:
    voxels = np.random.default_rng(0).random((20, 28, 30)).astype(np.float32)
    if how == "NaN":
        voxels[:] = np.nan
        np.save(folder / "bad.npy", voxels)
        return VolumeRef(str(folder / "bad.npy"))
    made = zarr.create_array(folder / "bad.zarr", shape=voxels.shape, chunks=(4, 4, 4), dtype="f4")
    made[:2] = voxels[:2]
    return VolumeRef(str(folder / "bad.zarr"))


@pytest.mark.parametrize("how", ["NaN", "missing chunk"])
def test_a_bad_volume_is_quarantined_and_replaced(how: str, cases: tuple[Case, ...], tmp_path: Path) -> None:
    bad = Case("broken", "x", (damaged(how, tmp_path),), cases[0].label)
    several = (*cases, bad)
    plan = training(several, training_steps(6, 2), PLAIN)
    loader = PatchLoader(plan, READING, LoaderOptions(quarantine_file=tmp_path / "quarantine.jsonl"))
    batches = list(loader.epoch(0))
    assert 5 not in np.concatenate([batch.cases for batch in batches])
    assert all(torch.isfinite(batch.region(slot)[0].float()).all() for batch in batches for slot in range(2))
    (line,) = map(json.loads, (tmp_path / "quarantine.jsonl").read_text().splitlines())
    assert (line["sample"], line["name"]) == (5, "broken")
    assert bad.images[0].location in line["reason"]
    assert stream(plan, engine="thread", workers=2) == stream(plan)
    worse = (*cases[:2], bad, Case("worse", "x", bad.images, cases[0].label))
    with pytest.raises((TooManyBad, UserError)) as caught:
        list(PatchLoader(training(worse, training_steps(9, 2), PLAIN), READING, LoaderOptions()).epoch(0))
    assert caught.value.name == "too-many-bad-samples"


def test_a_bad_volume_of_a_grid_is_marked_and_not_replaced(cases: tuple[Case, ...], tmp_path: Path) -> None:
    mixed = (cases[0], Case("broken", "x", (damaged("missing chunk", tmp_path),), cases[0].label))
    grid = GridPatches(PATCH, ((20, 28, 30),) * 2)
    plan = plan_patches(mixed, grid, Steps(len(grid), 2, drop_last=False), np.dtype("float32"), LabelRules(2, 2))
    for batch in PatchLoader(plan, READING, LoaderOptions()).epoch(0):
        assert (batch.valid == (batch.cases == 0)).all()
        assert not batch.images[torch.from_numpy(~batch.valid)].any()


def test_a_run_divided_by_region_never_reads_the_validation_slab(cases: tuple[Case, ...], tmp_path: Path) -> None:
    # The value of a voxel is its z, which shows where it was read.
    depth = np.broadcast_to(np.arange(60, dtype=np.uint8)[:, None, None], (60, 30, 30))
    np.save(tmp_path / "image.npy", depth)
    np.save(tmp_path / "label.npy", np.ones(depth.shape, np.uint8))
    case = Case("c", "c", (VolumeRef(str(tmp_path / "image.npy")),), VolumeRef(str(tmp_path / "label.npy")))
    surveyed = survey([case], OpenVolumes())
    parts = divide(surveyed.cases, surveyed.shapes, SplitRule(by="region", folds=3, fold=1, margin=3))
    rule = PatchRule(PATCH, transforms=EVERYTHING)
    plan = plan_training(parts.train, surveyed, LabelRules(2), rule, training_steps(40, 4))
    seen: set[int] = set()
    for batch in PatchLoader(plan, READING, LoaderOptions()).epoch(0):
        for slot in range(4):
            seen |= set(np.unique(batch.region(slot)[0].numpy()).tolist())
    # Zero is also what lies outside the parts.
    assert seen == set(range(17)) | set(range(43, 60))


def test_cases_that_cannot_be_trained_on_are_left_out_or_refused(cases: tuple[Case, ...], tmp_path: Path) -> None:
    np.save(tmp_path / "blank.npy", np.full((20, 28, 30), 2, np.uint8))
    blank = Case("blank", "x", cases[0].images, VolumeRef(str(tmp_path / "blank.npy")))
    several, said, rules, steps = (*cases, blank), list[str](), LabelRules(2, 2), training_steps(1, 1)
    surveyed = survey(several, OpenVolumes())
    plan = plan_training(several, surveyed, rules, PatchRule(PATCH), steps, say=said.append)
    assert plan.cases == cases
    assert said == ["1 volume without a labelled voxel left out: blank"]
    blind = Case(cases[0].id, "x", cases[0].images, None)
    for wrong, rule, name in (
        ((blind,), PatchRule(PATCH), "labels-missing"),
        ((blank,), PatchRule(PATCH), "no-labelled-voxel"),
        (cases, PatchRule((64, 8, 8)), "patch-larger-than-volume"),
    ):
        with pytest.raises(UserError, match=wrong[0].id) as caught:
            plan_training(wrong, surveyed, rules, rule, steps)
        assert caught.value.name == name
    odd = Case("odd", "x", cases[0].images * 2, cases[0].label)
    with pytest.raises(UserError, match="odd") as caught:
        plan_patches((*cases, odd), GridPatches(PATCH, ()), Steps(1, 1), np.dtype("uint8"), LabelRules(2))
    assert caught.value.name == "channels-differ"


def test_threads_share_one_reader_and_batches_carry_their_cost(
    cases: tuple[Case, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[VolumeRef] = []

    def counted(ref: VolumeRef, options: ReadingOptions) -> Any:
        opened.append(ref)
        return open_volume(ref, options)

    plan = training(cases, training_steps(20, 2), PLAIN)
    monkeypatch.setattr("stoker.tasks.volumes.formats.opening.open_volume", counted)
    loader = PatchLoader(plan, READING, LoaderOptions(engine="thread", workers=2))
    costs = [(batch.cost, batch.images.nbytes) for batch in loader.epoch(0)]
    loader.close()
    assert len(opened) == len(set(opened)) == 2 * len(cases)
    for cost, batch_bytes in costs:
        assert (cost.samples, cost.bytes_read, cost.batch_bytes) == (2, 2 * 2 * 10 * 12 * 14, batch_bytes)
        assert cost.fetch_s > 0
