"""`stoker preview` of volumes shows the very patches that the first steps train on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from stoker.cli import main
from stoker.config import load_config
from stoker.loader.rng import sample_keys
from stoker.profile.host import HostConfig, fit_to_machine, read_machine
from stoker.tasks.volumes.augment import build_volume_augment
from stoker.tasks.volumes.data import open_data, open_training_loader, training_plan
from stoker.tasks.volumes.formats.volume import ArrayVolume
from stoker.tasks.volumes.patches.patches import TransformRange, draw_transforms
from stoker.tasks.volumes.pictures import as_grey, worst_cuts
from stoker.tasks.volumes.volume_preview import look, placed
from stoker.train.transfers import Uploader
from tests.support.volumes import write_scroll_config

EVERYTHING = {
    "volume_elastic": 0.5, "volume_cutout": 0.5, "volume_turns": 0.5, "volume_rotation": 0.5, "volume_scaling": 0.5,
    "volume_noise": 0.5,
}  # fmt: skip


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_scroll_config(tmp_path_factory.mktemp("scrolls"), **EVERYTHING)


def fitted(config: Path) -> HostConfig:
    return fit_to_machine(load_config(config).config, read_machine())[0]


def test_the_pictures_are_the_first_batches_of_training(config: Path) -> None:
    settings = fitted(config)
    data = open_data(settings, lambda _line: None)
    before = torch.get_rng_state(), np.random.get_state()[1].tolist()
    seen = look(settings, data, count=5)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert np.random.get_state()[1].tolist() == before[1]
    plan = training_plan(settings, data)
    augment = build_volume_augment(settings, *data.statistics(data.train), torch.float32)
    loader = open_training_loader(settings, data)
    patches = []
    for batch, _ in zip(loader.epoch(0), range(3), strict=False):
        inputs, labels = augment.prepare(batch, Uploader(None).copy)
        patches += [(plan.cases[case].id, *pair) for case, *pair in zip(batch.cases, inputs, labels, strict=True)]
    loader.close()
    assert [one.step for one in seen.training] == [0, 0, 1, 1, 2]
    for one, (case, image, label) in zip(seen.training, patches, strict=False):
        assert one.case == case
        assert np.array_equal(one.image, as_grey(image[0, one.cut].numpy()))
        assert np.array_equal(one.label, label[one.cut].numpy())
        known = label.numpy() != 2
        assert one.labelled == pytest.approx(known.mean())
        assert one.foreground == pytest.approx((label.numpy()[known] == 1).mean())
    assert seen.validation is not None
    assert len({one.case for one in seen.validation}) == 2
    assert all(one.changes == () for one in seen.validation)


def test_words_about_a_patch_follow_from_its_transform() -> None:
    class Drawn:
        """The parts of a batch that say how its patches lie."""

        def __init__(self, count: int) -> None:
            keys = sample_keys(0, 0, np.arange(count), np.zeros(count, np.int64))
            bounds = TransformRange(flips=(0.5, 0.5, 0.5), turns=0.5, rotation=0.5, scaling=0.5)
            self.made = draw_transforms(keys, bounds, (16, 16, 16))
            self.orders = np.array([one.order for one in self.made])
            self.flips = np.array([one.flips for one in self.made])
            self.plain = np.array([one.is_plain for one in self.made])
            self.matrices = np.array([one.matrix for one in self.made])
            self.elastic = np.zeros(count)

    drawn: Any = Drawn(40)
    kinds = set()
    for slot, one in enumerate(drawn.made):
        words = placed(drawn, slot)
        assert any(word.startswith("mirrored") for word in words) == any(one.flips)
        assert any(word.startswith("axes") for word in words) == (one.order != (0, 1, 2))
        scaled = [word for word in words if "voxels in one" in word]
        assert scaled == ([f"{one.scale:.2f} voxels in one"] if one.scale != 1 else [])
        largest = np.degrees(np.abs(one.angles).max())
        if largest > 1:
            (word,) = [word for word in words if word.startswith("rotated")]
            assert float(word.removeprefix("rotated by ").removesuffix("°")) >= np.floor(largest / 2)
        kinds |= {word.split()[0] for word in words if not word[0].isdigit()}
    assert kinds == {"mirrored", "axes", "rotated"}


def test_the_command_writes_one_picture_and_says_what_is_on_it(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["preview", str(config), "--count", "3", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [path.name for path in tmp_path.iterdir()] == ["preview.png"]
    assert len(found["training"]["patches"]) == 3
    assert any(one["changes"] for one in found["training"]["patches"])
    with Image.open(tmp_path / "preview.png") as sheet:
        assert sheet.size == (found["width"], found["height"])
        pixels = np.asarray(sheet.convert("RGB")).astype(int)
    for one in found["training"]["patches"]:
        left, top, right, bottom = one["label_box"]
        label = pixels[top:bottom, left:right]
        left, top, right, bottom = one["box"]
        image = pixels[top:bottom, left:right]
        assert (image.max(2) == image.min(2)).all(), "the image itself is grey"
        if one["foreground"] > 0.02:
            assert (label[..., 1] > label[..., 0] + 20).any(), "foreground is green"


def test_a_run_keeps_its_preview(scroll_run: Path) -> None:
    with Image.open(scroll_run / "preview.jpg") as sheet:
        assert sheet.width > 900


def test_the_worst_planes_of_a_volume_are_those_with_the_most_errors() -> None:
    label = np.zeros((6, 7, 8), np.uint8)
    label[:, :, 5] = 1
    label[5, 6, :] = 2
    prediction = label.copy()
    prediction[3, 2:4, 5] = 0
    prediction[5, 6, 1] = 1  # where nothing is labelled
    image = ArrayVolume("scan", np.arange(6 * 7 * 8, dtype=np.uint16).reshape(6, 7, 8))
    z, y, x = worst_cuts(image, label, prediction, 2)
    assert (z.position, z.wrong, x.position, x.wrong) == (3, 2, 5, 2)
    assert y.position in (2, 3)
    assert z.image.shape == (7, 8)
    assert not worst_cuts(image, label, label, 2)[0].wrong
