"""`stoker predict` classifies images with a checkpoint."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision import transforms

from stoker.cli import main
from stoker.tasks.images.models import restore_model
from tests.support.trained import SIZE, write_images, write_untrained

CLASSES = ["ant", "bee", "cat", "dog", "elk", "fox", "gnu"]


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    torch.set_num_threads(1)
    return write_untrained(tmp_path / "a.ckpt", CLASSES)


def predicted(capsys: pytest.CaptureFixture[str], *arguments: str | Path, code: int = 0) -> dict:
    assert main(["predict", *map(str, arguments), "--json"]) == code
    return json.loads(capsys.readouterr().out)


def test_it_prepares_images_as_torchvision_does(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_images(tmp_path / "images", 1, name="{}.png")
    (one,) = predicted(capsys, checkpoint, tmp_path / "images" / "1.png")["images"]
    prepare = transforms.Compose(
        [
            transforms.Resize(int(SIZE / 0.875), transforms.InterpolationMode.BICUBIC),
            transforms.CenterCrop(SIZE),
            transforms.ToTensor(),
            transforms.Normalize((0.5, 0.5, 0.5), (0.5, 0.5, 0.5)),  # those of test_resnet
        ]
    )
    model = restore_model(checkpoint).model
    with Image.open(tmp_path / "images" / "1.png") as image, torch.inference_mode():
        wanted = model(prepare(image.convert("RGB"))[None]).softmax(1)[0]
    found = {guess["class"]: guess["probability"] for guess in one["top"]}
    assert len(found) == 5
    assert list(found.values()) == sorted(found.values(), reverse=True)
    for name, probability in found.items():
        assert probability == pytest.approx(float(wanted[CLASSES.index(name)]), abs=1e-5)


def test_folders_stand_for_their_images(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_images(tmp_path / "images" / "deep" / "deeper", 40, name="{:02d}.jpg")
    write_images(tmp_path / "images", 2, name="b{}.JPG")
    (tmp_path / "images" / "notes.txt").write_text("no image")
    found = predicted(capsys, checkpoint, tmp_path / "images", "--top", "1")
    assert found["bad"] == []
    names = [os.path.relpath(one["path"], tmp_path / "images") for one in found["images"]]
    assert names == ["b1.JPG", "b2.JPG", *(f"deep/deeper/{number:02d}.jpg" for number in range(1, 41))]
    assert all(len(one["top"]) == 1 for one in found["images"])


def test_a_bad_image_is_named_and_the_others_are_classified(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_images(tmp_path, 2)
    (tmp_path / "bad.jpg").write_bytes((tmp_path / "001.jpg").read_bytes()[:200])
    (tmp_path / "empty").mkdir()
    os.mkfifo(tmp_path / "pipe.jpg")
    paths = [tmp_path / name for name in ("001.jpg", "bad.jpg", "nowhere.jpg", "pipe.jpg", "empty", "002.jpg")]
    found = predicted(capsys, checkpoint, *paths, code=1)
    assert [Path(one["path"]).name for one in found["images"]] == ["001.jpg", "002.jpg"]
    bad = {Path(one["path"]).name: one["reason"] for one in found["bad"]}
    assert set(bad) == {"bad.jpg", "nowhere.jpg", "pipe.jpg", "empty"}
    assert bad["nowhere.jpg"] == "no such file"
    assert main(["predict", str(checkpoint), *map(str, paths)]) == 1
    ended = capsys.readouterr()
    assert f"bad image: {tmp_path / 'nowhere.jpg'}: no such file" in ended.err
    assert "%  " in ended.out


def test_each_class_has_its_own_probability_after_bce(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint = write_untrained(tmp_path / "a.ckpt", CLASSES, always=[2, 4], loss="bce")
    write_images(tmp_path, 1)
    (one,) = predicted(capsys, checkpoint, tmp_path / "001.jpg")["images"]
    # With softmax they could not both be certain, nor the others at one half.
    assert [guess["class"] for guess in one["top"]][:2] == ["cat", "elk"]
    assert np.allclose([guess["probability"] for guess in one["top"]], [1, 1, 0.5, 0.5, 0.5])


def test_the_averaged_weights_are_used_unless_raw_is_requested(tmp_path: Path) -> None:
    from stoker.train.checkpoint.format import read_checkpoint, write_checkpoint

    path = write_untrained(tmp_path / "a.ckpt", CLASSES, ema=True)
    state = read_checkpoint(path)
    state["ema"]["tensors"] = {
        name: value + 1 if value.is_floating_point() else value.clone() for name, value in state["model"].items()
    }
    write_checkpoint(path, state)
    averaged, raw = restore_model(path), restore_model(path, raw=True)
    assert (averaged.averaged, raw.averaged) == (True, False)
    for name, value in raw.model.state_dict().items():
        assert torch.equal(value, state["model"][name])
        assert torch.equal(averaged.model.state_dict()[name], state["ema"]["tensors"][name])


def test_another_size_works_for_a_network_with_positions(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint = write_untrained(tmp_path / "a.ckpt", CLASSES, model="test_vit")
    write_images(tmp_path, 1)
    small = predicted(capsys, checkpoint, tmp_path / "001.jpg")
    large = predicted(capsys, checkpoint, tmp_path / "001.jpg", "val_img_size=64")
    assert small["images"] != large["images"]
