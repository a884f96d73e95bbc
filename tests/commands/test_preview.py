"""`stoker preview` shows exactly what the network gets, and leaves no other trace."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

import stoker.tasks.images.classify
from stoker.cli import main
from stoker.config import load_config
from stoker.profile.host import HostConfig, fit_to_machine, read_machine
from stoker.tasks.contact_sheet import LARGEST_SIDE, drawable, fitting, regular, shown_side
from stoker.tasks.images.classify import build_network, colours_of, colours_of_name
from stoker.tasks.images.data import open_data
from stoker.tasks.images.image_preview import caption_of, look, sheet_of, spread_over_classes
from stoker.tasks.images.layouts.imagenet import spoken
from stoker.tasks.images.models import build_loss, build_model
from tests.support.images import encode, noise
from tests.support.tiny_training import write_config, write_images

EVERYTHING = {
    "auto_augment": "randaugment", "random_erasing": 0.5, "mixup_alpha": 0.8, "cutmix_alpha": 1.0,
    "label_smoothing": 0.1, "val_img_size": 40, "crop_ratio": 0.8,
}  # fmt: skip
CASES: dict[str, dict[str, Any]] = {
    "mixed and accumulated": EVERYTHING | {"gradient_accumulation": 2},
    "the second epoch, of larger images": EVERYTHING | {"start_img_size": 32, "img_size": 64, "resize_epochs": 1},
    "binary targets, an odd batch, repeats": EVERYTHING
    | {"batch_size": 15, "loss": "bce", "bce_target_threshold": 0.3, "repeated_augmentation": 3},
    "nothing but crops, in whole batches": {"batch_size": 4, "horizontal_flip": 0.0},
}


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_images(tmp_path_factory.mktemp("images"))


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder to be in, apart from where the config is and the index of the data is kept."""
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    return work


@pytest.fixture
def tapped(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[Tensor]]:
    """What any network that is trained from now on gets: its inputs, and the targets of its loss."""
    seen: dict[str, list[Tensor]] = {"train": [], "val": [], "targets": []}

    def network(*arguments: Any) -> torch.nn.Module:
        model = build_network(*arguments)
        model.register_forward_pre_hook(
            lambda module, inputs: seen["train" if module.training else "val"].append(inputs[0].clone())
        )
        return model

    def loss(config: Any) -> Callable[[Tensor, Tensor], Tensor]:
        whole = build_loss(config)

        def compute(logits: Tensor, targets: Tensor) -> Tensor:
            seen["targets"].append(targets.clone())
            return whole(logits, targets)

        return compute

    monkeypatch.setattr(stoker.tasks.images.classify, "build_network", network)
    monkeypatch.setattr(stoker.tasks.images.classify, "build_loss", loss)
    return seen


def host_config(path: Path, *overrides: str) -> HostConfig:
    return fit_to_machine(load_config(path, overrides).config, read_machine())[0]


def preview(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> tuple[dict[str, Any], np.ndarray]:
    """What the command says it shows, and the sheet's pixels."""
    capsys.readouterr()
    assert main(["preview", *map(str, arguments), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    with Image.open(shown["path"]) as image:
        assert image.size == (shown["width"], shown["height"])
        return shown, np.asarray(image.convert("RGB"))


def on_sheet(sheet: np.ndarray, sample: dict[str, Any], size: int) -> np.ndarray:
    """The pixels of a picture on the sheet, where each is enlarged to a square of one colour."""
    left, top, right, bottom = sample["box"]
    large = sheet[top:bottom, left:right]
    factor = LARGEST_SIDE // size
    assert large.shape == (size * factor, size * factor, 3)
    small = large[::factor, ::factor]
    assert np.array_equal(np.kron(small, np.ones((factor, factor, 1), np.uint8)), large)
    return small


def as_bytes(inputs: Tensor) -> np.ndarray:
    """A network's input with the normalisation of test_convnext undone: mean and deviation are one half."""
    pixels = inputs.permute(1, 2, 0).numpy() * np.float32(127.5) + np.float32(127.5)
    return np.rint(pixels).clip(0, 255).astype(np.uint8)


@pytest.mark.parametrize("case", CASES)
def test_the_sheet_shows_the_very_inputs_and_targets_of_a_real_run(
    case: str, images: Path, tmp_path: Path, tapped: dict[str, list[Tensor]], capsys: pytest.CaptureFixture[str]
) -> None:
    config = write_config(tmp_path, images, **CASES[case])
    keys = load_config(config).config
    epoch = 1 if keys.start_img_size else 0
    shown, sheet = preview(capsys, config, "--epoch", str(epoch), "--count", "12")
    assert main(["train", str(config)]) == 0
    steps = shown["training"]["steps"]
    assert sum(len(step["samples"]) for step in steps) == 12
    assert {step["mixed"] for step in steps} <= ({"mixup", "cutmix"} if keys.mixup_alpha else {None})
    for step in steps:
        batch = step["step"] * keys.gradient_accumulation
        inputs, targets = tapped["train"][batch], tapped["targets"][batch]
        if keys.bce_target_threshold is not None:
            targets = (targets > keys.bce_target_threshold).float()
        assert shown["training"]["img_size"] == inputs.shape[-1]
        for place, sample in enumerate(step["samples"]):
            assert np.array_equal(on_sheet(sheet, sample, inputs.shape[-1]), as_bytes(inputs[place])), (step, place)
            for label in sample["labels"]:
                assert targets[place][int(label["class"].removeprefix("class"))] == pytest.approx(label["weight"])
    (validation,) = tapped["val"][:1]
    assert shown["validation"]["img_size"] == validation.shape[-1]
    chosen = shown["validation"]["samples"]
    assert [sample["labels"][0]["class"] for sample in chosen] == ["class0"] * 2 + ["class1"] * 2 + ["class2"] * 2
    every = torch.cat(tapped["val"])
    for sample in chosen:
        position = sample["images"][0]["position"]
        assert np.array_equal(on_sheet(sheet, sample, every.shape[-1]), as_bytes(every[position]))
        assert sample["images"][0]["name"].startswith(sample["labels"][0]["class"])


def test_only_the_picture_is_written_and_no_random_state_changes(
    images: Path, tmp_path: Path, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = write_config(tmp_path, images, index_dir=str(tmp_path / "index"), **EVERYTHING)
    data = {path: path.stat().st_mtime_ns for path in images.rglob("*")}
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    assert main(["preview", str(config)]) == 0
    assert capsys.readouterr().out == "preview.png\n"
    assert (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()) == before
    assert list(here.iterdir()) == [here / "preview.png"]
    assert {path: path.stat().st_mtime_ns for path in images.rglob("*")} == data


def test_a_run_keeps_its_preview_once_and_trains_alike_without_it(
    images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tapped: dict[str, list[Tensor]]
) -> None:
    config = write_config(tmp_path, images, **EVERYTHING)
    assert main(["train", str(config), "epochs=1"]) == 0
    file = Path("runs/tiny/preview.jpg")
    with Image.open(file) as image:
        assert (image.format, image.width > 1000) == ("JPEG", True)
    assert file.stat().st_size < 300_000
    with_preview = tapped["train"][:]
    tapped["train"].clear()

    def broken(*arguments: Any, **options: Any) -> None:
        raise ValueError("cannot be drawn")

    monkeypatch.setattr("stoker.tasks.images.image_preview.look", broken)
    assert main(["train", str(config), "epochs=1", "--fresh"]) == 0
    assert not file.exists(), "the earlier one belongs to the earlier run"
    assert all(map(torch.equal, with_preview, tapped["train"]))
    assert "no preview.jpg: cannot be drawn" in next(Path("runs/tiny/logs").iterdir()).read_text()


def test_reading_stops_when_patience_ends_and_the_sheet_says_so(images: Path, tmp_path: Path) -> None:
    config = host_config(write_config(tmp_path, images))
    seen = look(config, open_data(config, lambda _text: None), patience_s=0.0)
    assert (len(seen.training), seen.validation) == (1, None)
    assert "took too long" in sheet_of(seen, "tiny", LARGEST_SIDE).sections[1].notes[0]


def test_with_several_ranks_the_samples_of_the_first_are_shown(images: Path, tmp_path: Path) -> None:
    config = host_config(write_config(tmp_path, images))
    first, _ = look(config, open_data(config, lambda _text: None), world=3).training
    assert [sample.parts[0].position for sample in first.samples] == [0, 3, 6, 9, 12, 15]


def test_data_without_validation_shows_training_samples_and_says_so(tmp_path: Path) -> None:
    data = write_images(tmp_path / "data", val=0)
    for folder in (data / "val").iterdir():
        folder.rmdir()
    (data / "val").rmdir()
    config = host_config(write_config(tmp_path, data))
    seen = look(config, open_data(config, lambda _text: None))
    training, validation = sheet_of(seen, "tiny", LARGEST_SIDE).sections
    assert len(training.rows) == 2
    assert (validation.title, validation.rows) == ("No validation", ())


def test_a_bad_file_is_shown_as_what_training_takes_instead(tmp_path: Path) -> None:
    data = write_images(tmp_path / "data")
    config = host_config(write_config(tmp_path, data, max_bad_fraction=0.9))
    opened = open_data(config, lambda _text: None)
    (first, *_), *_ = (step.samples for step in look(config, opened).training)
    (data / "train" / first.parts[0].name).write_bytes(b"not an image")
    (now, *_), *_ = (step.samples for step in look(config, opened).training)
    assert (first.parts[0].replaced, now.parts[0].replaced) == (False, True)
    assert now.parts[0].name.startswith(now.labels[0][0])
    assert now.parts[0].name != first.parts[0].name
    assert "in place of a bad file" in sheet_of(look(config, opened), "x", 224).sections[0].rows[0].pictures[0].small[0]


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["data_root=null"], 2, "data_root is not set"),
        (["batch_size=4096"], 1, "batch-larger-than-data"),
        (["model=resnet51"], 1, "model-unknown"),
        (["--epoch", "2"], 2, "after the last of 2 epochs"),
        (["--out", "nowhere/preview.png"], 2, "--out nowhere/preview.png"),
        (["--out", "preview.gif"], 2, "--out preview.gif"),
    ],
)
def test_what_cannot_be_shown_is_refused_with_the_reason(
    arguments: list[str], code: int, said: str, images: Path, tmp_path: Path, here: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    config = write_config(tmp_path, images)
    assert main(["preview", str(config), *arguments]) == code
    assert said in capsys.readouterr().err
    assert list(here.iterdir()) == []


def test_open_says_where_the_picture_is_if_there_is_no_desktop(
    images: Path, tmp_path: Path, here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[str] = []
    monkeypatch.setattr("webbrowser.open", lambda url: bool(asked.append(url)))
    assert main(["preview", str(write_config(tmp_path, images)), "--open"]) == 0
    assert asked == [(here / "preview.png").as_uri()]
    assert f"the picture is {here / 'preview.png'}" in capsys.readouterr().err


def test_validation_samples_are_spread_evenly_over_the_classes(tmp_path: Path) -> None:
    config = host_config(write_config(tmp_path, write_images(tmp_path / "data", train=1, val=3, classes=20)))
    val = open_data(config, lambda _text: None).val
    assert val is not None
    labels = val.labels(spread_over_classes(val, 6))
    assert labels.tolist() == [0, 4, 8, 11, 15, 19]
    assert len(set(spread_over_classes(val, 99).tolist())) == len(val) == 60
    assert np.bincount(val.labels(spread_over_classes(val, 40))).tolist() == [2] * 20


def test_classes_of_imagenet_are_named_in_words_and_mixed_ones_with_their_weights(images: Path, tmp_path: Path) -> None:
    assert spoken("n01440764") == "n01440764 tench"
    assert spoken("n99999999") == "n99999999"
    assert spoken("tench") == "tench"
    config = host_config(write_config(tmp_path, images, mixup_alpha=0.8, batch_size=9))
    for step in look(config, open_data(config, lambda _text: None)).training:
        for sample in step.samples:
            weights = [
                float(line.removeprefix("+ ").split()[0]) for line in caption_of(sample) if len(sample.labels) > 1
            ]
            assert weights == sorted(weights, reverse=True)
            assert not weights or sum(weights) == pytest.approx(1, abs=0.011)
            assert sum(part.share for part in sample.parts) == pytest.approx(1)


def test_names_are_cut_to_their_picture_and_letters_without_a_shape_are_spelt_out() -> None:
    font = regular(12)
    cut = fitting("n01440764 " + "very " * 40 + "long", font, 190)
    assert cut.endswith("…")
    assert 150 < font.getlength(cut) <= 190
    assert fitting("short", font, 190) == "short"
    assert drawable("Žluťoučký кот 'quoted'", font) == "Žluťoučký кот 'quoted'"
    assert drawable("a\ncat 猫", font) == "a\\u000acat \\u732b"


def test_small_pictures_are_enlarged_by_a_whole_factor_and_large_ones_reduced(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert [shown_side(side) for side in (8, 32, 64, 96, 128, 224, 225, 512)] == [
        224,
        224,
        192,
        192,
        128,
        224,
        224,
        224,
    ]
    data = write_images(tmp_path / "data", train=4, val=1)
    (data / "val" / "class0" / "000.jpg").write_bytes(encode(noise(300, 300), "PNG"))
    shown, sheet = preview(capsys, write_config(tmp_path, data), "img_size=256", "--count", "2")
    left, top, right, bottom = shown["validation"]["samples"][0]["box"]
    assert (right - left, bottom - top) == (224, 224)
    assert sheet[top:bottom, left:right].std() > 30


@pytest.mark.parametrize("name", ["test_convnext", "resnet10t", "test_vit.r160_in1k", "test_efficientnet"])
def test_the_colours_of_a_network_are_known_without_building_it(name: str) -> None:
    assert colours_of_name(name) == colours_of(build_model(name, 10))
