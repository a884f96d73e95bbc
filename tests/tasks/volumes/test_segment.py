"""The run of volumes: what validation counts, which patches it takes, and what the labels are said to mean."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from stoker.config import load_config
from stoker.core.errors import ConfigError, UserError
from stoker.profile.host import HostConfig, fit_to_machine, read_machine
from stoker.tasks.building import RunContext
from stoker.tasks.volumes.cases.cases import CaseList
from stoker.tasks.volumes.data import label_rules, open_data, updates_per_epoch, validation_plan
from stoker.tasks.volumes.patches.labels import LabelRules
from stoker.tasks.volumes.segment import VolumeScoring, build_run, open_trained
from stoker.train.ranks import Ranks
from stoker.trial.process import KINDS
from tests.support.tiny_volumes import write_volume_config, write_volumes

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def scrolls(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_volumes(tmp_path_factory.mktemp("scrolls"))


def configured(folder: Path, data: Path, **keys: Any) -> HostConfig:
    return fit_to_machine(load_config(write_volume_config(folder, data, **keys)).config, read_machine())[0]


class Patches:
    """What scoring reads of a batch."""

    def __init__(self, cases: list[int], valid: list[bool]) -> None:
        self.cases = np.array(cases)
        self.valid = np.array(valid)


def test_patches_that_were_not_read_and_patches_without_labels_do_not_count(tmp_path: Path, scrolls: Path) -> None:
    data = open_data(configured(tmp_path, scrolls, fold=1), lambda _text: None)
    labels = torch.zeros(3, 4, 4, 4, dtype=torch.int64)
    labels[:, :2] = 1
    labels[1] = labels[2] = 2  # not read: as prepare_val_batch leaves it; unlabelled
    logits = torch.zeros(3, 2, 4, 4, 4)
    logits[:, 1, :2] = 1.0
    scoring = VolumeScoring(data.val, LabelRules(2, 2), CPU, 2.0)
    batch: Any = Patches([0, 0, 0], [True, False, True])
    # The mean over three samples, of which two have the loss 0.
    scoring.add(logits, labels, torch.tensor(0.2), batch, slice(0, None))
    assert scoring.result() == {"loss": pytest.approx(0.6), "dice": 100.0, "iou": 100.0, "surface_dice": 100.0}
    scoring.reset()
    assert scoring.result() == {}


def test_nothing_of_an_unreadable_patch_reaches_a_score(tmp_path: Path, scrolls: Path) -> None:
    config = configured(tmp_path, scrolls)
    run = build_run(config, open_data(config, lambda _text: None), RunContext(Ranks(), CPU))
    try:
        assert run.input.val_loader is not None
        batch = next(run.input.val_loader.epoch(0))
        assert (run.input.prepare_val(batch).labels != 2).any()
        batch.valid[:] = [True, False]
        labels = run.input.prepare_val(batch).labels
        assert (labels[0] != 2).any()
        assert (labels[1] == 2).all()
    finally:
        run.input.close()


@pytest.mark.parametrize(("limit", "world", "expected"), [(None, 1, 8), (1, 2, 4), (0.5, 1, 4), (9, 1, 8)])
def test_a_limited_validation_is_spread_over_the_grid_and_the_same_in_every_epoch(
    limit: Any, world: int, expected: int, tmp_path: Path, scrolls: Path
) -> None:
    keys = {} if limit is None else {"limit_val_batches": limit}
    config = configured(tmp_path, scrolls, **keys)
    data = open_data(config, lambda _text: None)
    starts = []
    for rank in range(world):
        plan = validation_plan(config, data, Ranks(rank=rank, world=world))
        assert plan is not None
        for step in range(plan.steps.count()):
            starts += [place.start for place in plan.placements(0, step, 0)[0]]
    assert len(set(starts)) == len(starts) == expected
    assert len({z for z, _, _ in starts}) == 2, "both ends of the volume"


def test_an_epoch_counts_updates_whatever_the_batch(tmp_path: Path, scrolls: Path) -> None:
    def updates(**keys: Any) -> int:
        return updates_per_epoch(configured(tmp_path, scrolls, **keys))

    assert updates(steps_per_epoch=7, batch_size=5, gradient_accumulation=3) == 7
    assert updates(steps_per_epoch=None) == 250
    assert updates(steps_per_epoch=None, limit_train_batches=9, gradient_accumulation=2) == 4
    assert updates(steps_per_epoch=None, limit_train_batches=0.25) == 62


def test_the_config_names_the_classes_where_the_data_does_not(tmp_path: Path, scrolls: Path) -> None:
    def rules(known: LabelRules | None, **keys: Any) -> LabelRules:
        return label_rules(configured(tmp_path, scrolls, **keys), CaseList((), known))

    assert rules(LabelRules(2, 2)) == LabelRules(2, 2)
    assert rules(LabelRules(2, 2), ignore_label=7) == LabelRules(2, 7)
    assert rules(LabelRules(3), num_classes=5) == LabelRules(5)
    assert rules(None, num_classes=2, ignore_label=255) == LabelRules(2, 255)
    with pytest.raises(ConfigError, match="num_classes is not set"):
        rules(None)
    with pytest.raises(UserError, match="the ignore label is 2, and there are 3 classes"):
        rules(LabelRules(2, 2), num_classes=3)


def test_the_trials_of_the_doctor_read_patches(tmp_path: Path, scrolls: Path) -> None:
    config = configured(tmp_path, scrolls)
    job = {"seconds": 0.1, "cpus": 1, "pace_s": 0.01, "keep": 9, "whole": True}
    assert KINDS["loader"](config, job, lambda _s: None)["images_per_second"] > 0
    storage = KINDS["storage"](config, job, lambda _s: None)
    assert storage["storage"]["dataset_bytes"] > 2 * 2 * 24 * 32 * 28
    assert storage["storage"]["bytes_per_sample"] == 2 * 16**3
    header, line = KINDS["together"](config, job, lambda _s: None)["lines"]
    assert header["loader"]["samples"] == 6, "patches of an epoch"
    assert line["samples"] > 0


def test_a_checkpoint_of_images_is_not_taken_for_one_of_volumes(tmp_path: Path) -> None:
    from stoker.train.checkpoint.format import write_checkpoint

    values: dict[str, Any] = {"model": "resnet18"}
    state = {
        "config": values, "model": {}, "ema": None, "progress": {"epoch": 0, "step": 0}, "classes": ("a", "b"),
    }  # fmt: skip
    write_checkpoint(tmp_path / "last.ckpt", state)
    with pytest.raises(UserError, match="was trained with task: classify"):
        open_trained(tmp_path / "last.ckpt")
