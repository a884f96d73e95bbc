"""`stoker predict` segments volumes of any size and layout; a killed prediction resumes with the same files."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tifffile
import torch

from stoker.cli import main
from stoker.tasks.demo import write_scrolls
from stoker.tasks.volumes.formats.opening import VolumeRef, open_volume
from stoker.tasks.volumes.formats.volume import ArrayVolume, whole
from stoker.tasks.volumes.predict import output as volume_output
from stoker.tasks.volumes.predict import predict_folder as volume_folder
from stoker.tasks.volumes.predict.postprocess import parse_chain, post_processed
from stoker.tasks.volumes.predict.segmenter import predicted_mask, segmenter_of
from stoker.tasks.volumes.predict.windows import SlidingWindow
from stoker.tasks.volumes.segment import open_trained
from tests.support.trained_volumes import write_untrained_volumes

SHAPE = (28, 32, 24)


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint, another one, and a data set in the competition's layout with two volumes to predict."""
    folder = tmp_path_factory.mktemp("volumes")
    write_untrained_volumes(folder / "a.ckpt")
    write_untrained_volumes(folder / "b.ckpt", seed=1)
    write_scrolls(folder / "data", volumes=1, tests=2, shape=SHAPE)
    return folder


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def predicted(capsys: pytest.CaptureFixture[str], *arguments: str | Path, code: int = 0) -> dict[str, Any]:
    ended = main(["predict", *map(str, arguments), "--json"])
    captured = capsys.readouterr()
    assert ended == code, captured.err
    found = json.loads(captured.out)
    return found.get("error", found)


def wanted_mask(
    checkpoints: list[Path], image: Path, threshold: float | None = None, batch: int | None = None, **sliding: Any
) -> np.ndarray:
    segmenter = segmenter_of([open_trained(one) for one in checkpoints])
    segmenter = segmenter if batch is None else replace(segmenter, batch=batch)
    array = tifffile.imread(image)
    return predicted_mask(segmenter, [ArrayVolume("", array)], threshold=threshold, sliding=SlidingWindow(**sliding))


def contents(folder: Path) -> dict[str, bytes]:
    files = {str(one.relative_to(folder)): one.read_bytes() for one in folder.rglob("*") if one.is_file()}
    files.pop("prediction.json", None)
    return files


def test_a_competition_s_test_images_become_a_submission(
    places: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = predicted(
        capsys, places / "a.ckpt", places / "data", "--out", tmp_path, "--submission", "predict_threshold=0.49"
    )
    images = sorted((places / "data" / "test_images").iterdir())
    assert [one["id"] for one in found["volumes"]] == [one.stem for one in images]
    assert len(images) == 2
    with zipfile.ZipFile(found["submission"]) as archive:
        assert archive.namelist() == [one.name for one in images]
        assert archive.testzip() is None
        archive.extractall(tmp_path / "unzipped")
    for image, one in zip(images, found["volumes"], strict=True):
        mask = tifffile.imread(tmp_path / "unzipped" / image.name)
        assert mask.dtype == np.uint8
        assert mask.shape == SHAPE == tuple(one["shape"])
        assert np.array_equal(mask, wanted_mask([places / "a.ckpt"], image, 0.49))
        assert one["foreground"] == pytest.approx((mask > 0).mean())
        assert 0 < one["foreground"] < 1
    assert sorted(one.name for one in tmp_path.iterdir()) == sorted(
        [*(one.name for one in images), "prediction.json", "submission.zip", "unzipped"]
    )


def test_options_reach_the_prediction(places: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    image = next(iter(sorted((places / "data" / "test_images").iterdir())))
    both = [places / "a.ckpt", places / "b.ckpt"]
    predicted(
        capsys, both[0], image, "--checkpoint", both[1], "--out", tmp_path, "predict_overlap=0.25",
        "predict_flips=zx", "val_batch_size=3", "predict_postprocess=remove_small=20,fill_holes,closing=1",
    )  # fmt: skip
    raw = wanted_mask(both, image, overlap=0.25, flips="zx", batch=3)
    wanted = post_processed(raw, parse_chain("remove_small=20,fill_holes,closing=1"))
    assert not np.array_equal(raw, wanted)
    assert np.array_equal(tifffile.imread(tmp_path / image.name), wanted)


@pytest.mark.parametrize(("file_format", "kind"), [("tiff", "float16"), ("zarr", "uint8")])
def test_probabilities_are_stored_in_either_form(
    places: Path, tmp_path: Path, file_format: str, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    image = next(iter(sorted((places / "data" / "test_images").iterdir())))
    found = predicted(
        capsys, places / "a.ckpt", image, "--out", tmp_path, "--format", file_format, "--probabilities", kind
    )["volumes"][0]  # fmt: skip
    assert found["foreground"] is None
    volume = open_volume(VolumeRef(found["path"]))
    stored = volume.read(whole(volume.shape))
    assert stored.dtype == kind
    assert stored.std() > 0
    share = stored.astype(np.float32) / (1 if kind == "float16" else 255)
    clear = np.abs(share - 0.5) > 0.003
    assert clear.mean() > 0.5
    assert np.array_equal((share > 0.5)[clear], wanted_mask([places / "a.ckpt"], image)[clear] == 1)


def test_a_mask_as_zarr_has_every_chunk_and_opens_in_zarr_python(
    places: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import zarr

    monkeypatch.setattr(volume_output, "CHUNK", 16)
    image = next(iter(sorted((places / "data" / "test_images").iterdir())))
    # Nothing is that probable: a mask of zeros, whose chunks must be there all the same.
    for threshold in (1.0, 0.49):
        arguments = ["--out", tmp_path, "--format", "zarr", f"predict_threshold={threshold}", "--force"]
        found = predicted(capsys, places / "a.ckpt", image, *arguments)["volumes"][0]
        stored = zarr.open_array(found["path"], mode="r")
        assert (stored.metadata.zarr_format, stored.chunks) == (3, (16, 16, 16))
        wanted = wanted_mask([places / "a.ckpt"], image, threshold)
        assert np.array_equal(stored[...], wanted)
        if threshold == 1.0:  # our reader refuses missing chunks, and keeps those that it has seen
            volume = open_volume(VolumeRef(found["path"]))
            assert np.array_equal(volume.read(whole(SHAPE)), wanted)
    assert not (tmp_path / ".unfinished").exists()


def test_several_classes_and_channels(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint = write_untrained_volumes(tmp_path / "a.ckpt", channels=2, classes=4)
    rng = np.random.default_rng(0)
    for name in ("first", "second"):
        np.save(tmp_path / f"{name}.npy", rng.integers(0, 256, (20, 30, 24)).astype(np.uint8))
    (tmp_path / "cases.yaml").write_text("cases:\n  - {id: one, image: [first.npy, second.npy]}\n")
    predicted(capsys, checkpoint, tmp_path / "cases.yaml", "--out", tmp_path / "classes")
    found = predicted(
        capsys, checkpoint, tmp_path / "cases.yaml", "--out", tmp_path / "shares", "--probabilities", "float16",
        "--format", "zarr",
    )  # fmt: skip
    import zarr

    shares = zarr.open_array(found["volumes"][0]["path"], mode="r")[...].astype(np.float32)
    assert shares.shape == (3, 20, 30, 24)
    every = np.concatenate([1 - shares.sum(0, keepdims=True), shares])
    best = np.sort(every, axis=0)
    clear = best[-1] - best[-2] > 0.01
    assert np.array_equal(every.argmax(0)[clear], tifffile.imread(tmp_path / "classes" / "one.tif")[clear])
    for arguments, name in (
        ((tmp_path / "first.npy",), "channels-differ"),
        ((tmp_path / "cases.yaml", "predict_threshold=0.3"), "threshold-for-two-classes"),
        ((tmp_path / "cases.yaml", "--probabilities", "uint8"), "tiff-has-one-channel"),
        ((tmp_path / "cases.yaml", "predict_postprocess=fill_holes"), "post-step-for-two-classes"),
    ):
        code = 1 if name in ("channels-differ", "post-step-for-two-classes") else 2
        error = predicted(capsys, checkpoint, *arguments, "--out", tmp_path / "no", code=code)
        assert error["name"] == name
    assert not (tmp_path / "no").exists()


def test_data_may_be_files_folders_lists_and_small_volumes(
    places: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "scans"
    folder.mkdir()
    rng = np.random.default_rng(1)
    for name, shape in (("thin", (3, 40, 20)), ("small", (5, 6, 7))):
        np.save(folder / f"{name}.npy", rng.integers(0, 999, shape).astype(np.uint16))
    (folder / "notes.txt").write_text("not a volume")
    found = predicted(capsys, places / "a.ckpt", folder, "--out", tmp_path / "out")
    assert {one["id"]: one["shape"] for one in found["volumes"]} == {"small": [5, 6, 7], "thin": [3, 40, 20]}
    assert tifffile.imread(tmp_path / "out" / "small.tif").shape == (5, 6, 7)


def test_what_is_there_of_other_settings_is_never_mixed_or_lost(
    places: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    image = next(iter(sorted((places / "data" / "test_images").iterdir())))
    out = tmp_path / "out"
    first = predicted(capsys, places / "a.ckpt", image, "--out", out)
    before = contents(out)
    again = predicted(capsys, places / "a.ckpt", image, "--out", out)
    assert (again["volumes"][0]["seconds"], again["volumes"][0]["foreground"]) == (
        None,
        first["volumes"][0]["foreground"],
    )
    error = predicted(capsys, places / "b.ckpt", image, "--out", out, "predict_flips=x", code=1)
    assert error["name"] == "out-of-other-settings"
    assert "checkpoints: " in error["message"]
    assert "flips:  there, x now" in error["message"]
    assert contents(out) == before
    predicted(capsys, places / "b.ckpt", image, "--out", out, "--force")
    assert contents(out) != before

    strange = tmp_path / "strange"
    strange.mkdir()
    (strange / image.name).write_bytes(b"a file of the user")
    assert predicted(capsys, places / "a.ckpt", image, "--out", strange, code=1)["name"] == "out-exists"
    copied = tmp_path / "copied"
    shutil.copytree(image.parent, copied)
    error = predicted(capsys, places / "a.ckpt", copied, "--out", copied, "--force", code=1)
    assert error["name"] == "out-is-input"
    assert (copied / image.name).read_bytes() == image.read_bytes()
    (out / "prediction.json").write_text("{")
    assert predicted(capsys, places / "a.ckpt", image, "--out", out, code=1)["name"] == "bad-manifest"


def test_a_changed_volume_is_predicted_again(places: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    image = tmp_path / "scan.npy"
    for seed in (0, 1):
        np.save(image, np.random.default_rng(seed).integers(0, 256, (20, 20, 20)).astype(np.uint8))
        found = predicted(capsys, places / "a.ckpt", image, "--out", tmp_path / "out")["volumes"][0]
        assert found["seconds"] is not None


def test_a_bad_volume_is_named_and_the_others_are_predicted(
    places: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "scans"
    folder.mkdir()
    good = np.random.default_rng(0).normal(size=(20, 20, 40)).astype(np.float32)
    np.save(folder / "a.npy", good)
    np.save(folder / "d.npy", good)
    good[15, 0, 3] = np.nan
    np.save(folder / "b.npy", good)
    (folder / "c.tif").write_bytes(b"II*\0 and nothing else")
    out = tmp_path / "out"
    found = predicted(capsys, places / "a.ckpt", folder, "--out", out, "--submission", code=1)
    assert [one["id"] for one in found["volumes"]] == ["a", "d"]
    bad = {one["id"]: one["reason"] for one in found["bad"]}
    assert "NaN" in bad["b"]
    assert "c.tif" in bad["c"]
    assert found["submission"] is None
    assert sorted(one.name for one in out.iterdir()) == ["a.tif", "d.tif", "prediction.json"]


def test_a_disk_or_memory_that_is_too_small_is_noticed_before_the_work(
    places: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    image = next(iter(sorted((places / "data" / "test_images").iterdir())))
    with monkeypatch.context() as patched:
        patched.setattr(shutil, "disk_usage", lambda _folder: SimpleNamespace(free=100_000))
        error = predicted(capsys, places / "a.ckpt", image, "--out", tmp_path / "out", code=1)
        assert error["name"] == "disk-too-small"
    with monkeypatch.context() as patched:
        patched.setattr(volume_folder, "working_bytes", lambda _shape, _post: 10**15)
        arguments = ["--out", tmp_path / "out", "predict_postprocess=fill_holes"]
        assert predicted(capsys, places / "a.ckpt", image, *arguments, code=1)["name"] == "memory-too-small"

    def full(*_arguments: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "pwrite", full)
        error = predicted(capsys, places / "a.ckpt", image, "--out", tmp_path / "out", code=1)
        assert error["name"] == "disk-full"
    (tmp_path / "file").write_text("")
    error = predicted(capsys, places / "a.ckpt", image, "--out", tmp_path / "file" / "out", code=1)
    assert error["name"] == "out-not-writable"


def test_options_of_the_other_task_are_refused(
    places: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from tests.support.trained import write_untrained

    images = write_untrained(tmp_path / "images.ckpt", ["ant", "bee"])
    assert predicted(capsys, images, "a.jpg", "--out", tmp_path, code=2)["name"] == "option-of-other-task"
    assert predicted(capsys, places / "a.ckpt", "a.tif", "--top", 3, code=2)["name"] == "option-of-other-task"
    assert predicted(capsys, places / "a.ckpt", "a.tif", code=2)["name"] == "no-out"
    assert predicted(capsys, places / "a.ckpt", tmp_path, "--out", tmp_path / "x", code=1)["name"] == "no-volumes"
    patch = write_untrained_volumes(tmp_path / "patch.ckpt", patch=(16, 16, 24))
    arguments = [places / "data", "--checkpoint", patch, "--out", tmp_path / "x"]
    assert predicted(capsys, places / "a.ckpt", *arguments, code=1)["name"] == "checkpoints-differ"


def test_a_network_of_prepared_voxels_warns_about_raw_ones(
    places: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pack = tmp_path / "pack"
    assert main(["pack", str(places / "data"), str(pack), "--median", "3", "--layout", "raw"]) == 0
    checkpoint = write_untrained_volumes(tmp_path / "a.ckpt", data_root=pack)
    capsys.readouterr()
    warning = "whose voxels were changed when it was packed (median 3)"
    for data, is_raw in ((places / "data", True), (pack, False)):
        out = tmp_path / f"out {is_raw}"
        assert main(["predict", str(checkpoint), str(data), "--out", str(out)]) == 0
        assert (warning in capsys.readouterr().err) == is_raw
        assert len(list(out.glob("*.tif"))) == 2


KILLED = """# warm
import os, sys
from stoker.tasks.volumes.predict import segmenter as volume_prediction
from stoker.cli import main
import torch
torch.set_num_threads(1)
add, left = volume_prediction._RowSums.add, int(sys.argv[1])
def killed_add(*arguments):
    global left
    if left == 0:
        os.kill(os.getpid(), 9)
    left -= 1
    add(*arguments)
volume_prediction._RowSums.add = killed_add
sys.exit(main(sys.argv[2:]))
"""


@pytest.mark.parametrize("file_format", ["tiff", pytest.param("zarr", marks=pytest.mark.release)])
def test_a_prediction_that_is_killed_at_any_time_ends_with_the_same_files(
    places: Path, tmp_path: Path, file_format: str, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--format", file_format, "predict_postprocess=remove_small=20", "predict_overlap=0.6"]
    options += ["--submission"] if file_format == "tiff" else []
    predicted(capsys, places / "a.ckpt", places / "data", "--out", tmp_path / "whole", *options)
    wanted = contents(tmp_path / "whole")
    out = tmp_path / "killed"
    names = {*(name.split("/")[0] for name in wanted), "prediction.json", ".unfinished"}
    for windows in (3, 20):  # in the first volume, and after layers that are resumed
        command = [sys.executable, "-c", KILLED, windows, "predict", places / "a.ckpt", places / "data", "--out", out]
        ended = subprocess.run([*map(str, command), *options], capture_output=True)
        assert ended.returncode == -signal.SIGKILL
        assert {one.name for one in out.iterdir() if not one.name.endswith(".tmp")} <= names
        for path in out.glob("*.tif"):
            assert wanted[path.name] == path.read_bytes(), "a file appeared before it was whole"
    predicted(capsys, places / "a.ckpt", places / "data", "--out", out, *options)
    assert contents(out) == wanted
    assert not (out / ".unfinished").exists()


def test_ctrl_c_says_how_to_resume(
    places: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = 0
    decide = volume_folder.decided

    def interrupted(*arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 4:
            raise KeyboardInterrupt
        return decide(*arguments)

    image = next(iter(sorted((places / "data" / "test_images").iterdir())))
    with monkeypatch.context() as patched:
        patched.setattr(volume_folder, "decided", interrupted)
        error = predicted(capsys, places / "a.ckpt", image, "--out", tmp_path, code=130)
    assert (error["name"], error["hint"]) == ("interrupted", "the same command resumes")
    assert main(["predict", str(places / "a.ckpt"), str(image), "--out", str(tmp_path)]) == 0
    ended = capsys.readouterr()
    assert "resumed at layer 2 of " in ended.err
    assert image.stem in ended.out
    assert np.array_equal(tifffile.imread(tmp_path / image.name), wanted_mask([places / "a.ckpt"], image))
