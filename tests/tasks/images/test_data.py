"""From a config to samples and crops: the classes of a subset, `interpolation`, epochs shorter than the data."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stoker.config import load_config
from stoker.tasks.images.classify import checked_training_plan
from stoker.tasks.images.data import open_data, open_loader, open_samples, training_plan, validation_view
from stoker.tasks.images.decode.crops import Decoding, RandomCrop
from stoker.train.ranks import Ranks
from tests.conftest import Run
from tests.loader.test_loader import make_images
from tests.support.tiny_training import metrics, write_config, write_images


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
    assert chosen == {
        "seed": 42, "classes": chosen["classes"], "samples": {"train": 12, "val": 6},
        "per_class": {"train": [6, 6], "val": [3, 3]},
    }  # fmt: skip
    assert f"classes: {', '.join(chosen['classes'])}" in ended.err


def test_interpolation_holds_for_training_and_validation(tmp_path: Path) -> None:
    make_images(tmp_path, "train", 4)
    cases = ("null", "bilinear", "bicubic"), ("bilinear", "bilinear", "bilinear"), ("bicubic", "bicubic", "bicubic")
    for setting, *expected in cases:
        config = load_config(None, [f"data_root={tmp_path}", f"interpolation={setting}"]).config
        view = training_plan(config, open_samples(config, "train"), Decoding()).view
        assert isinstance(view, RandomCrop)
        assert [view.interpolation, validation_view(config, Decoding()).interpolation] == expected


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


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """48 training images: six batches of eight."""
    return write_images(tmp_path_factory.mktemp("images"))


def test_a_run_has_as_many_steps_an_epoch_as_the_config_says(stoker: Run, tmp_path: Path, images: Path) -> None:
    keys: dict[str, Any] = {"epochs": 3, "steps_per_epoch": 2, "batch_size": 4, "gradient_accumulation": 2}
    ended = stoker("train", write_config(tmp_path, images, **keys, warmup_epochs=1))
    assert ended.code == 0, ended.err
    assert "2 steps an epoch, 3 epochs" in ended.err
    run = tmp_path / "runs" / "tiny"
    assert [(line["epoch"], line["step"]) for line in metrics(run, "epoch")] == [(0, 2), (1, 4), (2, 6)]
    # The schedule is that of six steps: a warmup of two, then the cosine of four, the last of them 0.
    peak = 0.5 * 8 / 256
    rates = [line["train/lr"] for line in metrics(run, "step")]
    assert rates == pytest.approx([0.01 * peak, 0.505 * peak, peak, 0.75 * peak, 0.25 * peak, 0.0], abs=1e-12)


def test_more_steps_than_the_data_has_are_refused(stoker: Run, tmp_path: Path, images: Path) -> None:
    ended = stoker("train", write_config(tmp_path, images, steps_per_epoch=7))
    assert ended.code == 1
    for words in ("epoch-longer-than-data", "48 training images are 6 updates of 8", "steps_per_epoch=6"):
        assert words in ended.err
    config = load_config(write_config(tmp_path, images, steps_per_epoch=6)).config
    assert checked_training_plan(config, open_data(config, lambda _text: None), Ranks()).steps.count() == 6


def test_every_epoch_draws_from_all_images_and_ranks_share_the_limit(tmp_path: Path, images: Path) -> None:
    config = load_config(write_config(tmp_path, images, steps_per_epoch=2), ["batch_size=4"]).config
    data = open_data(config, lambda _text: None)
    drawn = []
    for epoch in range(30):
        both = []
        for rank in range(2):
            plan = training_plan(config, data.train, data.decoding, Ranks(rank=rank, world=2))
            assert plan.steps.count() == 2
            both += [plan.sampler.at(epoch, plan.steps.positions(step))[0] for step in range(2)]
        members = np.concatenate(both)
        assert len(set(members.tolist())) == 2 * 2 * 4
        drawn.append(members)
    assert set(np.concatenate(drawn).tolist()) == set(range(48))
