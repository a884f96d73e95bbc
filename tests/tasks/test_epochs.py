"""`steps_per_epoch`: an epoch of images that ends before the data does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stoker.config import load_config
from stoker.tasks.images.classify import checked_training_plan
from stoker.tasks.images.data import open_data, training_plan
from stoker.train.ranks import Ranks
from tests.conftest import Run
from tests.support.tiny_training import metrics, write_config, write_images


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
