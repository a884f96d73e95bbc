"""A pack gives the voxels and patches of its source in every layout, and notices when a file is not what it wrote."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest

from stoker.config import load_config
from stoker.core.errors import UserError
from stoker.io.stores import ReadFailure
from stoker.loader.loader import LoaderOptions
from stoker.tasks.demo import write_scrolls
from stoker.tasks.volumes.cases.cases import open_cases
from stoker.tasks.volumes.cases.survey import statistics_of, survey
from stoker.tasks.volumes.data import PatchLoader, PatchRule, plan_training
from stoker.tasks.volumes.formats.opening import OpenVolumes, VolumeRef, open_volume
from stoker.tasks.volumes.formats.volume import ArrayVolume, ReadingOptions, whole
from stoker.tasks.volumes.pack import layout_trial
from stoker.tasks.volumes.pack.cases_packing import open_source, pack_volumes
from stoker.tasks.volumes.pack.index import file_names, read_index
from stoker.tasks.volumes.pack.layout_trial import Tried, choose, try_layouts
from stoker.tasks.volumes.pack.make_case import VolumePack, VolumeSource
from stoker.tasks.volumes.pack.preprocessing import VoxelChanges, prepare_image
from stoker.tasks.volumes.pack.write_volume import LAYOUTS, write_volume
from stoker.tasks.volumes.patches.labels import BadLabels, LabelRules
from stoker.tasks.volumes.patches.patches import TransformRange, training_steps
from tests.conftest import PROJECT
from tests.support.s3_server import S3Server
from tests.tasks.volumes.test_formats import some_regions
from tests.tasks.volumes.test_loader import digest

READING = ReadingOptions()
EVERYTHING = TransformRange(flips=(0.5, 0.5, 0.5), turns=0.5, rotation=0.4, scaling=0.4)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("scrolls")
    write_scrolls(root, volumes=3, shape=(20, 34, 70), scrolls=2, seed=1)
    retired = (root / "train.csv").read_text() + "777,10000\n"
    (root / "train.csv").write_text(retired)
    (root / "deprecated_train_images").mkdir()
    (root / "deprecated_train_images" / "777.tif").write_bytes(b"retired")
    return root


def opened(source: Path) -> VolumeSource:
    config = load_config(None, ["task=segment3d", "patch_size=[16,16,16]", f"data_root={source}"]).config
    return open_source(config, VoxelChanges())


@pytest.fixture(scope="module")
def packs(source: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The source in each layout."""
    roots = {layout: tmp_path_factory.mktemp("packs") / layout for layout in LAYOUTS}
    for layout, root in roots.items():
        (root / ".pack").mkdir(parents=True)
        pack_volumes(VolumePack(root, opened(source), LAYOUTS[layout]), workers=1)
    return roots


@pytest.fixture
def own_pack(packs: dict[str, Path], tmp_path: Path) -> Path:
    """A pack that a test may damage."""
    return Path(shutil.copytree(packs["raw"], tmp_path / "packed"))


def patches(root: Path | str) -> list[str]:
    listed = open_cases(root)
    assert listed.rules is not None
    rule = PatchRule((10, 12, 14), seed=5, small="pad", transforms=EVERYTHING)
    surveyed = survey(listed.cases, OpenVolumes(READING))
    plan = plan_training(listed.cases, surveyed, listed.rules, rule, training_steps(4, 3))
    return [digest(batch) for batch in PatchLoader(plan, READING, LoaderOptions()).epoch(1)]


@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_a_pack_gives_the_cases_and_the_patches_of_its_source(
    layout: str, source: Path, packs: dict[str, Path]
) -> None:
    root = packs[layout]
    before, after = open_cases(source), open_cases(root)
    assert [(case.id, case.group) for case in after.cases] == [(case.id, case.group) for case in before.cases]
    assert after.rules == before.rules
    assert any("777" in note for note in after.notes)
    tests = [[case.id for case in open_cases(place, "test").cases] for place in (source, root)]
    assert tests[0] == tests[1] != []
    assert patches(root) == patches(source)
    # The whole volume's, without reading it again.
    means, deviations = statistics_of(after.cases, OpenVolumes(READING), "volume")
    for number, case in enumerate(before.cases):
        volume = open_volume(case.images[0])
        voxels = volume.read(whole(volume.shape)).astype(np.float64)
        assert (means[number, 0], deviations[number, 0]) == pytest.approx((voxels.mean(), voxels.std()), rel=1e-6)


@pytest.mark.parametrize(
    ("layout", "kind"),
    [("raw", "uint8"), ("raw", "float32"), ("blocks32", "int16"), ("blocks64", "uint8"), ("zarr", "float32")],
)
def test_any_region_of_any_kind_of_voxels_is_a_slice(layout: str, kind: str, tmp_path: Path) -> None:
    voxels = (np.random.default_rng(3).random((70, 40, 65)) * 250).astype(kind)
    path = tmp_path / f"a{LAYOUTS[layout].suffix}"
    facts = write_volume(path, prepare_image(ArrayVolume("a", voxels), VoxelChanges()), LAYOUTS[layout], is_label=False)
    with path.open("rb") if path.is_file() else nullcontext() as stream:
        if stream is not None:  # what is not in memory is asked for ahead
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    volume = open_volume(VolumeRef(str(path), packed=facts))
    assert (volume.shape, volume.dtype) == (voxels.shape, voxels.dtype)
    for region in some_regions(voxels.shape):
        np.testing.assert_array_equal(volume.read(region), voxels[region.slices])
        wide = np.zeros((*region.shape[:2], region.shape[2] + 3), np.float64)
        volume.read(region, wide[:, :, 1:-2])  # another kind, with gaps between its rows
        np.testing.assert_array_equal(wide[:, :, 1:-2], voxels[region.slices])
    if layout == "raw":
        np.testing.assert_array_equal(np.load(path), voxels)


def test_damage_is_found_when_a_volume_is_opened(own_pack: Path) -> None:
    first, second, _ = open_cases(own_pack).cases
    file = Path(first.images[0].location)
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(ReadFailure, match="the pack's index says"):
        open_volume(first.images[0])
    # One bad volume is set aside; the survey of the whole pack must not be remembered for it.
    assert survey(open_cases(own_pack).cases, OpenVolumes(READING)).bad.keys() == {first.id}
    other = Path(second.images[0].location)
    other.write_bytes(b"\x93NUMPY\x02" + other.read_bytes()[7:])
    with pytest.raises(ReadFailure, match="header"):
        open_volume(second.images[0])


SHRINKS = """
import os, sys
from pathlib import Path
from tests.tasks.volumes.test_packed import *
path, layout = Path(sys.argv[1]), LAYOUTS[sys.argv[2]]
voxels = ArrayVolume("a", np.full((40, 40, 40), 3, np.uint8))
facts = write_volume(path, prepare_image(voxels, VoxelChanges()), layout, is_label=False)
volume = open_volume(VolumeRef(str(path), packed=facts))
os.truncate(path, 4096)
try:
    volume.read(whole(volume.shape))
except ReadFailure as failure:
    print(failure.reason)
"""


@pytest.mark.parametrize("layout", ["raw", "blocks32"])
def test_a_packed_volume_that_shrinks_while_it_is_mapped_is_refused(layout: str, tmp_path: Path) -> None:
    command = [sys.executable, "-c", SHRINKS, str(tmp_path / "a.npy"), layout]
    done = subprocess.run(command, capture_output=True, text=True, cwd=PROJECT)
    assert (done.returncode, done.stdout) == (0, "short\n"), done.stderr


def test_an_index_that_was_changed_is_refused(own_pack: Path) -> None:
    text = (own_pack / "volumes.json").read_text()
    for wrong in (text.replace('"group": "10000"', '"group": "10001"', 1), text[:-10], "[]", "{}"):
        (own_pack / "volumes.json").write_text(wrong)
        with pytest.raises(UserError, match="cannot be used") as caught:
            open_cases(own_pack)
        assert caught.value.name == "pack-damaged"
    (own_pack / "volumes.json").write_text(text)
    document = json.loads(text)
    document["cases"][0]["images"][0]["path"] = "../../secret.npy"
    (own_pack / "volumes.json").write_text(json.dumps(document))
    with pytest.raises(UserError, match="cannot be used"):
        read_index(own_pack)


def test_labels_that_packing_has_seen_are_checked_against_other_rules(packs: dict[str, Path]) -> None:
    case = open_cases(packs["raw"]).cases[0]
    assert case.label is not None
    assert case.label.packed is not None
    assert case.label.packed.labels == (0, 1, 2)
    assert case.label.packed.has_only(2, 2)
    assert case.label.packed.has_only(3, None)
    assert not case.label.packed.has_only(2, None)
    surveyed = survey((case,), OpenVolumes(READING))
    with pytest.raises(BadLabels, match="has the labels 2"):
        plan = plan_training((case,), surveyed, LabelRules(2), PatchRule((8, 8, 8)), training_steps(2, 2))
        list(PatchLoader(plan, READING, LoaderOptions()).epoch(0))


def test_file_names_never_collide_and_never_leave_their_folder() -> None:
    ids = ["a", "A", "a/b", "a_b", "../a", ".a", "ä", "x" * 300, "x" * 301]
    names = file_names(ids)
    assert len({name.lower() for name in names.values()}) == len(ids)
    assert all("/" not in name and not name.startswith(".") for name in names.values())
    assert names["a"] == "a"


def test_the_layout_is_chosen_by_where_the_pack_will_be_read_from() -> None:
    raw, blocks, zarr = LAYOUTS["raw"], LAYOUTS["blocks64"], LAYOUTS["zarr"]
    first = (Tried(raw, 0.5, 9.0, 100), Tried(blocks, 0.8, 4.0, 110))
    assert choose((*first, Tried(zarr, 3.0, 4.2, 60)), fits_in_memory=True) is raw
    # About as fast from the disk: then the smaller one.
    assert choose((*first, Tried(zarr, 3.0, 4.2, 60)), fits_in_memory=False) is zarr
    assert choose((*first, Tried(zarr, 3.0, 8.0, 60)), fits_in_memory=False) is blocks
    assert choose((Tried(raw, 0.5, None, 100), Tried(zarr, 3.0, None, 60)), fits_in_memory=False) is raw


def test_the_trial_measures_every_layout_and_leaves_nothing_behind(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layout_trial, "TRIAL_VOXELS", 20_000)  # a slab of the volume
    dropped: list[str] = []
    monkeypatch.setattr(layout_trial, "drop_from_cache", lambda path: not dropped.append(path))
    found = try_layouts(opened(source), tmp_path / "trial", (64, 16, 16))
    assert [one.layout.name for one in found.tried] == list(LAYOUTS)
    assert found.patch == (8, 16, 16)
    assert found.fits_in_memory
    assert all(one.warm_s > 0 and one.cold_s is not None and one.cold_s > 0 for one in found.tried)
    by_name = {one.layout.name: one for one in found.tried}
    assert by_name["raw"].bytes >= 3 * 2 * 20 * 34 * 70
    assert by_name["zarr"].bytes < by_name["blocks64"].bytes
    assert len(dropped) >= 2 * len(LAYOUTS)
    assert not (tmp_path / "trial").exists()


def test_a_pack_in_s3_gives_the_same_patches(source: Path, packs: dict[str, Path], s3: S3Server) -> None:
    for layout in ("raw", "zarr"):
        assert patches(s3.put_folder(packs[layout], f"packs/{layout}")) == patches(source)
    with pytest.raises(UserError, match="read from a local disk"):
        open_cases(s3.put_folder(packs["blocks32"], "packs/blocks32"))
