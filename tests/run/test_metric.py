"""The metric of a run: what is better, what a checkpoint is called, and runs from before it could be chosen."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from stoker.run.metrics import ACC1, Metric, checkpoint_name, read_checkpoint_name
from stoker.tasks.base import metric_of
from stoker.train.checkpoint.folder import Checkpoints
from stoker.train.schedule import EarlyStopping, Progress
from tests.support.training_state import training_state

LOSS, DICE = Metric("loss"), Metric("surface_dice")


def test_auto_is_the_metric_of_the_task_and_old_configs_name_none() -> None:
    assert metric_of({}) == metric_of({"task": "classify", "best_by": "auto"}) == ACC1
    assert metric_of({"task": "segment3d", "best_by": "auto"}) == Metric("dice")
    assert metric_of({"task": "segment3d", "best_by": "loss"}).key == "val/loss"
    assert metric_of({"task": "of-a-package-that-is-gone", "best_by": "auto"}) == LOSS


def test_a_smaller_loss_is_better_and_nan_never_is() -> None:
    assert LOSS.improves(0.4, 0.5)
    assert not LOSS.improves(0.5, 0.4)
    assert not LOSS.improves(0.45, 0.5, by=0.1)
    assert DICE.improves(81.0, 80.0)
    for metric in (LOSS, DICE):
        assert not metric.improves(math.nan, None)
        assert not metric.improves(math.nan, 1.0)
        assert metric.improves(1.0, None)
    assert (LOSS.text(0.43125), DICE.text(81.234)) == ("0.4313", "81.23%")


@pytest.mark.parametrize("metric", [ACC1, LOSS, DICE])
def test_a_checkpoint_name_says_everything_and_is_read_back(metric: Metric) -> None:
    name = checkpoint_name(3, metric, 81.2)
    assert read_checkpoint_name(name) == (3, metric, 81.2)
    assert name == f"epoch=3-val_{metric.name}=81.2000.ckpt"
    assert read_checkpoint_name("last.ckpt") is None
    assert read_checkpoint_name("epoch=3-val_=81.2000.ckpt") is None


def test_the_best_checkpoints_by_loss_are_those_with_the_smallest(tmp_path: Path) -> None:
    folder = Checkpoints(tmp_path, keep_best=2, metric=LOSS)
    for epoch, loss in enumerate((0.9, 0.5, 0.7, 0.8)):
        folder.save_best(training_state(1), epoch, loss)
    expected = ["epoch=1-val_loss=0.5000.ckpt", "epoch=2-val_loss=0.7000.ckpt"]
    assert [path.name for path in folder.best()] == expected
    # Whoever opens the folder later knows only the names.
    assert [path.name for path in Checkpoints(tmp_path).best()] == expected


def test_early_stopping_watches_a_loss_that_falls() -> None:
    progress, stopping = Progress(), EarlyStopping(patience=2, min_delta=0.01, metric=LOSS)
    for value in (0.5, 0.4, 0.395, math.nan):
        progress.add_score(value, stopping.min_delta, LOSS)
    assert progress.best == 0.395
    assert stopping.reason(progress) == (
        "val/loss has not improved by more than 0.01 on 0.4000 for 2 epochs (early_stopping: 2)"
    )
