"""`stoker pack` with volumes, as a user runs it: the same bytes for any workers, resumed, verified, refused."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import numpy as np
import pytest
import tifffile

from stoker.cli import main
from stoker.tasks.demo import write_scrolls
from stoker.tasks.volumes.cases.cases import open_cases
from stoker.tasks.volumes.formats.opening import open_volume
from stoker.tasks.volumes.formats.volume import whole
from tests.support.ready_process import ReadyProcess
from tests.support.tiny_training import metrics
from tests.support.tiny_volumes import write_volume_config
from tests.support.waiting import wait_until


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def source(tmp_path: Path) -> Path:
    write_scrolls(tmp_path / "scrolls", volumes=3, shape=(24, 30, 32), scrolls=2, seed=1)
    return tmp_path / "scrolls"


def content(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.name != "lock"
    }


def packs(source: Path | str, destination: Path, *options: str) -> int:
    return main(["pack", str(source), str(destination), *options])


@pytest.mark.parametrize("layout", ["raw", "zarr"])
def test_any_number_of_workers_writes_the_same_bytes_and_nothing_into_the_source(
    layout: str, source: Path, tmp_path: Path
) -> None:
    before = content(source)
    options = ("--layout", layout, "--clip", "1%,99%", "--median", "3", "--scale", "1,0.5,0.5")
    assert packs(source, tmp_path / "one", *options, "--workers", "1") == 0
    assert packs(source, tmp_path / "three", *options, "--workers", "3") == 0
    assert content(tmp_path / "one") == content(tmp_path / "three")
    assert content(source) == before
    assert open_volume(open_cases(tmp_path / "one").cases[0].images[0]).shape == (24, 15, 16)


def test_the_layout_is_tried_shown_and_kept(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert packs(source, tmp_path / "packed", "patch_size=[8,16,16]", "--json") == 0
    first = capsys.readouterr()
    document = json.loads(first.out)
    assert set(document["trial"]) == {"raw", "blocks32", "blocks64", "zarr"}
    assert (document["volumes"], document["kept"], document["skipped"]) == (4, 0, [])
    assert "time of a patch of 8 x 16 x 16" in first.err
    assert sum("chosen" in line for line in first.err.splitlines()) == 1
    before = content(tmp_path / "packed")
    assert packs(source, tmp_path / "packed", "--json") == 0
    again = json.loads(capsys.readouterr().out)
    assert (again["trial"], again["kept"], again["layout"]) == (None, 4, document["layout"])
    assert content(tmp_path / "packed") == before


def test_a_killed_pack_is_no_pack_and_continues_where_it_was(ready: ReadyProcess, source: Path, tmp_path: Path) -> None:
    records = tmp_path / "packed" / ".pack" / "cases"
    running = ready.start("pack", source, "packed", "--layout", "raw", "--workers", "1", cwd=tmp_path)
    wait_until(lambda: list(records.rglob("*.json")))
    running.send(signal.SIGKILL)
    running.wait()
    (tmp_path / "packed" / "volumes.json").unlink(missing_ok=True)  # it may have been faster than us
    done = {path: path.stat().st_mtime_ns for path in records.rglob("*.json")}
    (tmp_path / "packed" / "train" / "images" / ".x.npy.tmp").write_bytes(b"half a volume")
    assert packs(source, tmp_path / "packed", "--layout", "raw") == 0
    assert {path: path.stat().st_mtime_ns for path in done} == done
    assert packs(source, tmp_path / "whole", "--layout", "raw") == 0
    assert content(tmp_path / "packed") == content(tmp_path / "whole")


def test_verify_makes_a_damaged_volume_anew(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert packs(source, tmp_path / "packed", "--layout", "blocks32") == 0
    before = content(tmp_path / "packed")
    damaged = sorted((tmp_path / "packed" / "train" / "images").iterdir())[1]
    voxels = bytearray(damaged.read_bytes())
    voxels[-1] ^= 0xFF
    damaged.write_bytes(voxels)
    capsys.readouterr()
    assert packs(source, tmp_path / "packed", "--layout", "blocks32", "--verify", "--json") == 0
    assert json.loads(capsys.readouterr().out)["kept"] == 3
    assert content(tmp_path / "packed") == before


def test_a_volume_that_changed_is_packed_again(source: Path, tmp_path: Path) -> None:
    assert packs(source, tmp_path / "packed", "--layout", "raw") == 0
    case = open_cases(source).cases[0]
    tifffile.imwrite(case.images[0].location, np.zeros((24, 30, 32), np.uint8), photometric="minisblack")
    assert packs(source, tmp_path / "packed", "--layout", "raw") == 0
    volume = open_volume(open_cases(tmp_path / "packed").cases[0].images[0])
    assert not volume.read(whole(volume.shape)).any()


def test_bad_volumes_are_told_together_and_the_good_ones_are_kept(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second, third = open_cases(source).cases
    Path(first.images[0].location).write_bytes(b"II*\0 cut off")
    assert packs(source, tmp_path / "packed", "--layout", "raw") == 0
    assert f"warning: {first.id} is left out" in capsys.readouterr().err
    opened = open_cases(tmp_path / "packed")
    assert [case.id for case in opened.cases] == [second.id, third.id]
    assert any(first.id in note for note in opened.notes)
    assert second.label is not None
    tifffile.imwrite(second.label.location, np.full((24, 30, 32), 7, np.uint8), photometric="minisblack")
    assert packs(source, tmp_path / "packed", "--layout", "raw") == 1
    told = capsys.readouterr().err
    assert "error: bad-volumes" in told
    assert first.id in told
    assert f"{second.id}: " in told
    assert "the labels 7" in told
    assert not (tmp_path / "packed" / "volumes.json").exists()


def test_other_options_are_refused_until_fresh_removes_the_pack(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert packs(source, tmp_path / "packed", "--layout", "raw") == 0
    (tmp_path / "packed" / "train" / "notes.txt").write_text("mine")
    assert packs(source, tmp_path / "packed", "--layout", "raw", "--median", "3") == 1
    assert "error: pack-options-differ" in capsys.readouterr().err
    assert packs(source, tmp_path / "packed", "--layout", "zarr", "--fresh") == 0
    assert (tmp_path / "packed" / "train" / "notes.txt").read_text() == "mine"
    assert not list((tmp_path / "packed").rglob("*.npy"))
    assert open_cases(tmp_path / "packed").cases[0].images[0].location.endswith(".zarr")


def test_a_config_a_list_and_a_pack_can_be_packed(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    case = open_cases(source).cases[0]
    assert case.label is not None
    listed = tmp_path / "list.yaml"
    listed.write_text(
        f"- {{id: a/b, group: g, image: [{case.images[0].location}, {case.images[0].location}],"
        f" label: {case.label.location}}}\n"
    )
    assert packs(listed, tmp_path / "listed", "--layout", "raw", "num_classes=2", "ignore_label=2") == 0
    (found,) = open_cases(tmp_path / "listed").cases
    assert (found.id, found.group, len(found.images)) == ("a/b", "g", 2)
    config = tmp_path / "config.yaml"
    config.write_text(f"task: segment3d\ndata_root: {source}\npatch_size: [8, 16, 16]\nnum_classes: 2\n")
    assert packs(config, tmp_path / "first", "--layout", "blocks32") == 0
    assert packs(tmp_path / "first", tmp_path / "second", "--layout", "raw") == 0
    for one, other in zip(open_cases(source).cases, open_cases(tmp_path / "second").cases, strict=True):
        before, after = open_volume(one.images[0]), open_volume(other.images[0])
        np.testing.assert_array_equal(before.read(whole(before.shape)), after.read(whole(after.shape)))
    assert capsys.readouterr().err.count("error") == 0


def test_training_on_a_pack_is_training_on_its_source(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert packs(source, tmp_path / "packed", "--layout", "raw") == 0
    ended = []
    for name, data in (("from-source", source), ("from-pack", tmp_path / "packed")):
        config = write_volume_config(tmp_path, data, folds=2, run_name=name, epochs=1)
        capsys.readouterr()
        assert main(["train", str(config), "--json"]) == 0
        (epoch,) = metrics(tmp_path / "runs" / name, "epoch")
        ended.append([epoch[score] for score in ("train/loss", "val/loss", "val/dice")])
    # The source's statistics are of blocks, a pack's of whole planes: their sums round differently.
    assert ended[0] == pytest.approx(ended[1], rel=1e-5)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--median", "4"], "--median 4"),
        (["--clip", "9"], "--clip 9"),
        (["--scale", "1,2"], "--scale 1,2"),
        (["--scale", "0.5", "--spacing", "1"], "exclude each other"),
        (["--dtype", "int8"], "--dtype int8"),
    ],
)
def test_wrong_options_exit_2_and_write_nothing(
    options: list[str], expected: str, source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert packs(source, tmp_path / "packed", *options) == 2
    told = capsys.readouterr().err
    assert expected in told
    assert "hint:" in told
    assert not (tmp_path / "packed").exists()


def test_a_full_disk_names_the_volume_and_leaves_no_partial_file(
    source: Path, tmp_path: Path, ready: ReadyProcess
) -> None:
    words = ("pack", source, "packed", "--layout", "raw")
    done = ready.run(*words, cwd=tmp_path, before="tests.support.training_faults:small_files")
    assert (done.code, "error: pack-failed" in done.err) == (1, True), done.err
    assert not [path for path in (tmp_path / "packed").rglob("*") if path.suffix in (".npy", ".tmp")]
    assert not (tmp_path / "packed" / "volumes.json").exists()


def test_a_disk_that_is_too_small_is_refused_before_the_first_byte(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from collections import namedtuple

    usage = namedtuple("usage", ["total", "used", "free"])
    monkeypatch.setattr("stoker.tasks.packing.shutil.disk_usage", lambda _path: usage(0, 0, 100_000))
    assert packs(source, tmp_path / "packed", "--layout", "raw") == 1
    assert "disk-too-small" in capsys.readouterr().err
    assert not (tmp_path / "packed" / "train").exists()
