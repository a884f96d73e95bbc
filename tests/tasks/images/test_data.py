"""From a config to samples and crops: the classes of a subset are shown and saved; `interpolation` holds everywhere."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from stoker.config import load_config
from stoker.tasks.images.data import open_loader, open_samples, training_plan, validation_view
from stoker.tasks.images.decode.decoding import Decoding, RandomCrop
from tests.conftest import Run
from tests.loader.test_loader import make_images


def test_the_chosen_classes_are_shown_and_saved(stoker: Run, tmp_path: Path) -> None:
    data = tmp_path / "data"
    make_images(data, "train", 40, classes=4)
    make_images(data, "val", 20, classes=4)
    config = tmp_path / "small.yaml"
    config.write_text(
        f"data_root: {data}\nmodel: test_resnet\nimg_size: 32\nbatch_size: 4\nepochs: 1\nnum_workers: 1\n"
        "subset_classes: 2\nsubset_train_per_class: 6\nsubset_val_per_class: 3\nsubset_seed: 42\n"
    )
    ended = stoker("train", config)
    assert ended.code == 0, ended.err
    chosen = json.loads((tmp_path / "runs" / "small" / "subset.json").read_text())
    assert len(chosen["classes"]) == 2
    assert chosen["samples"] == {"train": 12, "val": 6}
    assert chosen["seed"] == 42
    assert f"classes: {', '.join(chosen['classes'])}" in ended.err


@pytest.mark.parametrize(
    ("settings", "training", "validation"),
    [
        ([], "bilinear", "bicubic"),
        (["interpolation=bilinear"], "bilinear", "bilinear"),
        (["interpolation=bicubic"], "bicubic", "bicubic"),
    ],
)
def test_interpolation_holds_for_training_and_validation(
    tmp_path: Path, settings: list[str], training: str, validation: str
) -> None:
    make_images(tmp_path, "train", 4)
    config = load_config(None, [f"data_root={tmp_path}", *settings]).config
    plan = training_plan(config, open_samples(config, "train"), Decoding())
    assert isinstance(plan.view, RandomCrop)
    assert plan.view.interpolation == training
    assert validation_view(config, Decoding()).interpolation == validation


def test_each_decode_mode_and_interpolation_gives_other_training_pixels(tmp_path: Path) -> None:
    make_images(tmp_path, "train", 8)
    found = set()
    for mode in ("decode_mode=fast", "decode_mode=draft"):
        for interpolation in ("interpolation=bilinear", "interpolation=bicubic"):
            words = [f"data_root={tmp_path}", "batch_size=8", "img_size=24", "pin_memory=false", mode, interpolation]
            config = load_config(None, words).config
            plan = training_plan(config, open_samples(config, "train"), Decoding())
            (batch,) = open_loader(config, plan, workers=0).epoch(0)
            found.add(np.asarray(batch.images).tobytes())
    assert len(found) == 3  # a draft is always bilinear
