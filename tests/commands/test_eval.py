"""`stoker eval` measures a checkpoint's accuracy and counts every image once."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from stoker.cli import main
from stoker.tasks.images.image_evaluation import Evaluation
from tests.support.trained import COLOURS, train_on_colours, write_colours, write_images, write_untrained

IMAGENET = [f"n{number:08d}" for number in range(1000)]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("trained")
    write_colours(folder / "data")
    return train_on_colours(folder)


def evaluated(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> dict:
    code = main(["eval", *map(str, arguments), "--json"])
    ended = capsys.readouterr()
    assert code == 0, ended.err
    return json.loads(ended.out)


def refused(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> dict:
    assert main(["eval", *map(str, arguments), "--json"]) in (1, 2)
    return json.loads(capsys.readouterr().out)["error"]


def test_it_agrees_with_validation(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [json.loads(line) for line in (trained / "metrics.jsonl").read_text().splitlines()]
    last = next(line for line in reversed(lines) if "val/acc1" in line)
    found = evaluated(capsys, trained / "checkpoints" / "last.ckpt", "val_batch_size=5")
    assert found["images"] == 19
    assert found["weights"] == "averaged"
    assert found["acc1"] == pytest.approx(last["val/acc1"])
    assert found["loss"] == pytest.approx(last["val/loss"], rel=1e-4)
    assert found["acc5"] == 100.0
    raw = evaluated(capsys, trained / "checkpoints" / "last.ckpt", "--raw")
    assert raw["weights"] == "raw"
    assert raw["loss"] != pytest.approx(found["loss"], rel=1e-6)


def test_matrix_and_classes_add_up(trained: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    picture = tmp_path / "plots" / "confusion.png"
    found = evaluated(capsys, trained, "--split", "train", "--plot", picture)
    assert found["images"] == 24
    matrix = np.array(found["confusion"]["matrix"])
    assert found["confusion"]["classes"] == sorted(COLOURS)
    assert matrix.sum(axis=1).tolist() == [8, 8, 8]
    assert found["acc1"] == pytest.approx(100 * matrix.trace() / 24)
    assert [one["acc1"] for one in found["per_class"]] == sorted(one["acc1"] for one in found["per_class"])
    with Image.open(picture) as image:
        assert image.format == "PNG"
        assert min(image.size) > 300
    assert main(["eval", str(trained), "--plot", str(picture / "below-a-file.png")]) == 1
    ended = capsys.readouterr()
    assert "top-1" in ended.out
    assert "could not be written" in ended.err


def test_the_text_output(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", str(trained), "--per-class"]) == 0
    ended = capsys.readouterr()
    assert "test_resnet after 2 epochs (6 steps), averaged weights" in ended.out
    assert "19 images" in ended.out
    assert "top-1 " in ended.out
    assert all(name in ended.out for name in COLOURS)
    assert "checkpoint: " in ended.err


def test_an_unreadable_image_is_left_out_and_named(
    trained: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    whole = evaluated(capsys, trained)
    data = tmp_path / "data"
    shutil.copytree(trained.parents[1] / "data" / "val", data / "val")
    (data / "val" / "blue" / "000.jpg").write_bytes(b"no image")
    found = evaluated(capsys, trained, data, "max_bad_fraction=0.5")
    assert found["images"] == 19
    assert found["acc1"] == pytest.approx(whole["acc1"])
    assert [bad["name"] for bad in found["unreadable"]] == ["blue/000.jpg"]
    assert refused(capsys, trained, data, "max_bad_fraction=0")["name"] == "too-many-bad-samples"


def test_classes_are_matched_by_name(trained: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    # Only two of the classes, so that numbers and names disagree; and no val/ folder.
    for name in ("green", "red"):
        shutil.copytree(trained.parents[1] / "data" / "val" / name, tmp_path / name)
    found = evaluated(capsys, trained, tmp_path)
    whole = {one["class"]: one["acc1"] for one in evaluated(capsys, trained)["per_class"]}
    assert {one["class"]: one["acc1"] for one in found["per_class"]} == {name: whole[name] for name in ("green", "red")}
    write_images(tmp_path / "gren", 2)
    error = refused(capsys, trained, tmp_path)
    assert error["name"] == "classes-differ"
    assert "gren" in error["message"]
    assert error["hint"] == "did you mean green?"


def test_imagenet_v2_folders_are_numbers(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    checkpoint = write_untrained(tmp_path / "a.ckpt", IMAGENET, always=[10, 9, 2])
    # Sorted as text, 10 comes before 2: taken by position, the classes would be wrong.
    for name, count in (("10", 4), ("2", 3), ("999", 1)):
        write_images(tmp_path / "v2" / name, count)
    found = evaluated(capsys, checkpoint, tmp_path / "v2")
    assert found["images"] == 8
    assert found["acc1"] == 50.0
    assert found["acc5"] == 87.5
    assert found["confused"][0] == {"class": IMAGENET[2], "taken_for": IMAGENET[10], "wrong": 3, "images": 3}


def test_real_labels_count_any_of_several(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    checkpoint = write_untrained(tmp_path / "a.ckpt", IMAGENET, always=[10])
    write_images(tmp_path / "data" / "val" / IMAGENET[5], 4, name="ILSVRC2012_val_{:08d}.jpg")
    labels = tmp_path / "real.json"
    labels.write_text("[[5, 10], [], [10], [5]]")
    found = evaluated(capsys, checkpoint, tmp_path / "data", "--real-labels", labels)
    assert found["acc1"] == 0.0
    assert found["real"] == {"acc1": pytest.approx(200 / 3), "images": 3, "left_out": 1}
    labels.write_text("[[5], [5]]")
    error = refused(capsys, checkpoint, tmp_path / "data", "--real-labels", labels)
    assert error["name"] == "real-labels-other-images"
    for wrong in ("{", "{}", "[3]", "[[1000]]", '[["a"]]'):
        labels.write_text(wrong)
        error = refused(capsys, checkpoint, tmp_path / "data", "--real-labels", labels)
        assert error["name"] == "real-labels-wrong"


def test_real_labels_need_imagenet(trained: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert refused(capsys, trained, "--real-labels", tmp_path / "real.json")["name"] == "real-labels-need-imagenet"


def test_bad_input_is_named(trained: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    checkpoint = trained / "checkpoints" / "last.ckpt"
    (tmp_path / "zip.ckpt").write_bytes(b"PK\x03\x04 something")
    broken = tmp_path / "broken.ckpt"
    broken.write_bytes(checkpoint.read_bytes()[:-1])
    for path, name in (
        (tmp_path / "nowhere.ckpt", "checkpoint-unreadable"),
        (tmp_path / "zip.ckpt", "weights-damaged"),
        (broken, "checkpoint-corrupt"),
        (tmp_path, "no-checkpoint"),
    ):
        error = refused(capsys, path)
        assert error["name"] == name
        assert "remove" not in str(error["hint"])
    assert refused(capsys, checkpoint, tmp_path / "no-data")["name"] == "data-not-found"
    other = refused(capsys, checkpoint, "model=test_vit")
    assert other["name"] == "weights-do-not-fit"
    assert "trained as test_resnet" in other["hint"]
    assert refused(capsys, checkpoint, "batch_sise=3")["name"] == "config-invalid"
    assert refused(capsys, checkpoint, tmp_path, tmp_path)["name"] == "usage"


def test_a_checkpoint_without_classes_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    from stoker.train.checkpoint.format import write_checkpoint

    write_checkpoint(tmp_path / "old.ckpt", {"config": {}, "model": {}, "ema": None, "progress": {}})
    error = refused(capsys, tmp_path / "old.ckpt")
    assert error["name"] == "checkpoint-incomplete"
    assert "classes" in error["message"]


def test_outputs_without_a_class_have_a_name(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    checkpoint = write_untrained(tmp_path / "a.ckpt", ["a", "b"], always=[3], num_classes=4)
    write_images(tmp_path / "val" / "b", 2)
    found = evaluated(capsys, checkpoint, tmp_path)
    assert found["confused"] == [{"class": "b", "taken_for": "output 3", "wrong": 2, "images": 2}]


def test_a_run_does_not_resume_with_other_classes(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    write_colours(tmp_path / "data", train=3, val=1)
    train_on_colours(tmp_path, epochs=1)
    for split in ("train", "val"):
        (tmp_path / "data" / split / "green").rename(tmp_path / "data" / split / "yellow")
    capsys.readouterr()
    assert main(["train", str(tmp_path / "colours.yaml"), "epochs=2"]) == 1
    assert "class 1: green in the checkpoint, red in this run" in capsys.readouterr().err


def test_no_images_is_not_zero_accuracy() -> None:
    empty = Evaluation("", "", False, 0, 0, "", ("a", "b"), np.zeros(0, np.int64), np.zeros((0, 2), np.int64), None)
    assert empty.acc1 is None
    assert empty.per_class() == []
    assert empty.confused() == []


def test_worst_classes_and_confused_pairs_come_first() -> None:
    labels = np.array([0, 0, 0, 1, 1, 2])
    best = np.array([[0, 1], [1, 0], [1, 2], [1, 0], [2, 1], [2, 0]])
    found = Evaluation("", "", False, 0, 0, "", ("a", "b", "c"), labels, best, None)
    assert found.acc1 == 50.0
    assert found.acc5 == pytest.approx(500 / 6)
    assert [(score.name, score.images) for score in found.per_class()] == [("a", 3), ("b", 2), ("c", 1)]
    assert found.per_class()[0].acc1 == pytest.approx(100 / 3)
    assert [(pair.name, pair.taken_for, pair.wrong) for pair in found.confused()] == [("a", "b", 2), ("b", "c", 1)]
    assert found.matrix().tolist() == [[1, 2, 0], [0, 1, 1], [0, 0, 1]]
