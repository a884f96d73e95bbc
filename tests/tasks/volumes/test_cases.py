"""Layouts: the cases, groups and labels that each of them means, and what is wrong with an incomplete one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import pytest
import tifffile

from stoker.core.errors import UserError
from stoker.tasks.demo import write_scrolls
from stoker.tasks.volumes.cases.cases import Case, open_cases
from stoker.tasks.volumes.cases.survey import survey
from stoker.tasks.volumes.formats.opening import OpenVolumes, VolumeRef
from stoker.tasks.volumes.formats.volume import ArrayVolume
from stoker.tasks.volumes.patches.labels import BadLabels, LabelRules, check_pair


@pytest.fixture
def scrolls(tmp_path: Path) -> Path:
    write_scrolls(tmp_path / "scrolls", volumes=6, shape=(16, 16, 16), scrolls=3)
    return tmp_path / "scrolls"


def touch(path: Path, content: bytes = b"x") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


def test_the_competitions_layout_gives_cases_by_scroll(scrolls: Path) -> None:
    found = open_cases(scrolls)
    assert len(found.cases) == 6
    assert sorted({case.group for case in found.cases}) == ["10000", "10001", "10002"]
    assert found.rules == LabelRules(2, ignore=2)
    assert found.notes == ()
    for case in found.cases:
        assert case.images == (VolumeRef(str(scrolls / "train_images" / f"{case.id}.tif")),)
        assert case.label == VolumeRef(str(scrolls / "train_labels" / f"{case.id}.tif"))
    (test,) = open_cases(scrolls, "test").cases
    assert test.label is None


def test_retired_ids_are_reported_and_lost_ones_refused(scrolls: Path) -> None:
    first, second, *_ = [case.id for case in open_cases(scrolls).cases]
    for kind in ("images", "labels"):
        (scrolls / f"deprecated_train_{kind}").mkdir()
        (scrolls / f"train_{kind}" / f"{first}.tif").rename(scrolls / f"deprecated_train_{kind}" / f"{first}.tif")
    found = open_cases(scrolls)
    assert len(found.cases) == 5
    assert len(found.notes) == 1
    assert first in found.notes[0]
    (scrolls / "train_labels" / f"{second}.tif").unlink()
    with pytest.raises(UserError, match=second) as caught:
        open_cases(scrolls)
    assert caught.value.name == "volumes-missing"


@pytest.mark.parametrize("is_old", [True, False])
def test_nnunets_raw_folders_are_read_in_both_forms(is_old: bool, tmp_path: Path) -> None:
    old: dict[str, Any] = {"modality": {"0": "T1", "1": "T2"}, "labels": {"0": "background", "1": "tumour"}}
    new: dict[str, Any] = {"channel_names": {"0": "T1", "1": "T2"}, "file_ending": ".nii.gz", "numTraining": 3,
                           "labels": {"background": 0, "tumour": 1, "ignore": 2}}  # fmt: skip
    touch(tmp_path / "dataset.json", json.dumps(old if is_old else new).encode())
    for name in ("case_b", "case_a"):
        for channel in range(2):
            touch(tmp_path / "imagesTr" / f"{name}_{channel:04d}.nii.gz")
        touch(tmp_path / "labelsTr" / f"{name}.nii.gz")
    found = open_cases(tmp_path)
    assert [case.id for case in found.cases] == ["case_a", "case_b"]
    assert [Path(ref.location).name for ref in found.cases[0].images] == ["case_a_0000.nii.gz", "case_a_0001.nii.gz"]
    assert found.rules == (LabelRules(2) if is_old else LabelRules(2, ignore=2))
    assert found.notes == (() if is_old else ("dataset.json announces 3 training cases; there are 2",))
    (tmp_path / "imagesTr" / "case_a_0001.nii.gz").unlink()
    with pytest.raises(UserError, match="case_a"):
        open_cases(tmp_path)


LAUGHS = "a: &a [x, x]\n" + "".join(f"{c}: &{c} [*{p}, *{p}]\n" for p, c in zip("abcdefg", "bcdefgh", strict=True))
NESTED = "[*a, *a]"


def test_ids_are_the_names_of_files_or_where_these_repeat_of_their_folders(tmp_path: Path) -> None:
    for name in ("patient0/t1.nii.gz", "patient1/t1.nii.gz", "x/a/1.npy", "x/b/1.npy", "x/a/2.npy"):
        touch(tmp_path / name)

    def ids(*images: str) -> list[str]:
        (tmp_path / "cases.yaml").write_text("".join(f"- {{image: {image}}}\n" for image in images))
        return [case.id for case in open_cases(tmp_path / "cases.yaml").cases]

    assert ids("patient0/t1.nii.gz") == ["t1"]
    assert ids("patient0/t1.nii.gz", "patient1/t1.nii.gz") == ["patient0", "patient1"]
    assert ids("x/a/1.npy", "x/b/1.npy", "x/a/2.npy") == ["a_1", "a_2", "b_1"]
    assert ids("s3://bucket/a%20b/1.zarr/", "s3://bucket/c/1.zarr/") == ["a b", "c"]


def test_a_list_of_pairs_is_read_relative_to_its_file(tmp_path: Path) -> None:
    for name in ("a/one.nii.gz", "b/one.nii.gz", "0.npy", "1.npy", "l.npy"):
        touch(tmp_path / name)
    (tmp_path / "cases.yaml").write_text(
        "classes: 3\nignore_label: 255\ncases:\n"
        "- {image: a/one.nii.gz, label: b/one.nii.gz, group: left}\n"
        f"- {{id: two, image: [{tmp_path}/0.npy, {tmp_path}/1.npy], label: l.npy}}\n"
        "- {image: s3://bucket/three.zarr, level: 2}\n"
    )
    found = open_cases(tmp_path / "cases.yaml")
    assert found.rules == LabelRules(3, ignore=255)
    assert found.cases == (
        Case("one", "left", (VolumeRef(str(tmp_path / "a/one.nii.gz")),), VolumeRef(str(tmp_path / "b/one.nii.gz"))),
        Case("three", "three", (VolumeRef("s3://bucket/three.zarr", 2),), None),
        Case(
            "two",
            "two",
            (VolumeRef(str(tmp_path / "0.npy")), VolumeRef(str(tmp_path / "1.npy"))),
            VolumeRef(str(tmp_path / "l.npy")),
        ),
    )


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("cases: []", "list-empty"),
        ("- {label: a.tif}", "bad-case"),
        ("- {image: a.tif, lable: b.tif}", "unknown-key"),
        ("- {image: a.tif}\n- {id: a, image: b/a.tif}", "case-twice"),
        (f"- {{image: a.tif, id: {'[' * 5000}}}", "list-unreadable"),
        (LAUGHS + "cases: [{image: a.tif, id: *h}]", "unknown-key"),
        (f"- {{image: a.tif, id: &a [x, x], group: {NESTED}}}", "bad-case"),
        ("classes: 3\nignore_label: [1]\ncases: [{image: a.tif}]", "bad-number"),
        ("classes: 3\nignore_label: 2020-01-01\ncases: [{image: a.tif}]", "bad-number"),
        ("classes: 3\nignore_label: other\ncases: [{image: a.tif}]", "bad-number"),
        (f"- {{image: {'a' * 5000}.tif}}", "bad-case"),
        ("- {image: ~nosuchuser/a.tif}", "bad-case"),
        ('- {image: "a\\0.tif"}', "volumes-missing"),
        ("- {id: x, image: a.tif}\n- {id: y, image: b/../a.tif}", "volume-twice"),
        ("- {image: a.tif, level: x}", "bad-number"),
        ("- [", "list-unreadable"),
        ("classes: 3\nignore_label: 1\ncases: [{image: a.tif}]", "bad-ignore-label"),
        ("- {image: a.tif, label: labels/a.tif}", "volumes-missing"),
        ("- {image: a.tif, group: x}\n- {image: linked.tif, group: y}", "volume-twice"),
    ],
)
def test_a_list_that_cannot_be_meant_is_refused(text: str, name: str, tmp_path: Path) -> None:
    for place in ("a.tif", "b/a.tif"):
        touch(tmp_path / place)
    (tmp_path / "linked.tif").symlink_to(tmp_path / "a.tif")
    (tmp_path / "cases.yaml").write_text(text)
    with pytest.raises(UserError) as caught:
        open_cases(tmp_path / "cases.yaml")
    assert caught.value.name == name


def test_a_folder_without_a_layout_is_refused(tmp_path: Path) -> None:
    for place, name in ((tmp_path, "layout-unknown"), (tmp_path / "gone", "data-not-found")):
        with pytest.raises(UserError) as caught:
            open_cases(place)
        assert caught.value.name == name


def test_a_bad_volume_is_set_aside_and_several_are_refused(scrolls: Path) -> None:
    cases = open_cases(scrolls).cases
    Path(cases[2].images[0].location).write_bytes(b"II*\0broken")
    found = survey(cases, OpenVolumes())
    assert found.bad.keys() == {cases[2].id}
    assert cases[2].images[0].location in found.bad[cases[2].id]
    assert len(found.cases) == 5
    assert set(found.shapes.values()) == {(16, 16, 16)}
    Path(cases[3].images[0].location).unlink()
    with pytest.raises(UserError) as caught:
        survey(cases, OpenVolumes())
    assert caught.value.name == "too-many-bad-volumes"
    assert cases[3].id in str(caught.value)


def test_a_survey_is_kept_until_a_file_changes(scrolls: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cases = open_cases(scrolls).cases
    first = survey(cases, OpenVolumes())
    opened: list[VolumeRef] = []
    monkeypatch.setattr("stoker.tasks.volumes.formats.opening.open_volume", lambda ref, _options: opened.append(ref))
    assert survey(cases, OpenVolumes()) == first
    assert opened == []
    monkeypatch.undo()
    for case in cases:
        for ref in (case.images[0], case.label):
            assert ref is not None
            tifffile.imwrite(ref.location, np.zeros((8, 9, 10), np.uint16))
    again = survey(cases, OpenVolumes()).facts[cases[0].id]
    assert (again.shape, again.dtype) == ((8, 9, 10), "uint16")


def volume(shape: tuple[int, ...], **more: Any) -> ArrayVolume:
    return ArrayVolume("x.nii", np.zeros(shape, np.uint8), **more)


def test_images_and_labels_that_do_not_fit_are_refused_with_the_id(tmp_path: Path) -> None:
    image = volume((4, 5, 6), affine=np.eye(4))
    check_pair("c7", (image, image), image)
    for other, name in [
        (volume((4, 5, 7)), "shapes-differ"),
        (volume((4, 5, 6), affine=np.diag([-1.0, 1, 1, 1])), "orientations-differ"),
    ]:
        with pytest.raises(BadLabels, match="c7") as caught:
            check_pair("c7", (image,), other)
        assert caught.value.name == name
    with pytest.raises(BadLabels) as caught:
        check_pair("c7", (image,), volume((6, 5, 4)))
    assert "axes" in str(caught.value.why)
    # The orientation is what the files say.
    for name, side in (("image", 1.0), ("label", -1.0)):
        picture = nibabel.Nifti1Image(np.zeros((6, 5, 4), np.uint8), np.diag([side, 1, 1, 1]))
        nibabel.save(picture, tmp_path / f"{name}.nii.gz")
    case = Case("c7", "c7", (VolumeRef(str(tmp_path / "image.nii.gz")),), VolumeRef(str(tmp_path / "label.nii.gz")))
    with pytest.raises(BadLabels, match="c7") as caught:
        survey([case], OpenVolumes())
    assert caught.value.name == "orientations-differ"


def test_written_scrolls_are_the_same_for_the_same_seed(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_scrolls(tmp_path / name, volumes=2, shape=(8, 24, 24), seed=3)
    first = sorted(path for path in (tmp_path / "a").rglob("*") if path.is_file())
    assert len(first) == 2 * 2 + 1 + 1
    for path in first:
        assert path.read_bytes() == (tmp_path / "b" / path.relative_to(tmp_path / "a")).read_bytes()
