"""Runs that end early, or look at part of the data: `early_stopping`, `limit_…_batches`, `fast_dev_run`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from stoker.config import load_config
from stoker.core.errors import UserError
from stoker.plan.budget import Hardware, PlannedRun
from stoker.report.document import read_document
from stoker.tasks.building import trial_run, updates_per_epoch
from stoker.tasks.images.data import open_data, validation_plan
from stoker.tasks.images.models import restore_model
from stoker.tasks.plan_facts import DataFacts
from stoker.train.ranks import Ranks
from tests.end_to_end.conftest import Ledger
from tests.support.ready_process import ReadyProcess
from tests.support.tiny_training import assert_same_end, last_state, metrics, write_config

Train = Callable[..., Ledger]
# The model hardly changes, so val/acc1 stays the same in every epoch.
STANDSTILL = {"lr": 1e-12, "epochs": 9, "early_stopping": 2}


def test_early_stopping_ends_a_run_that_no_longer_improves_and_a_resume_is_exact(
    tmp_path: Path, images: Path, train_until: Train, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("whole", "killed"):
        (tmp_path / name).mkdir()
    whole, killed = (write_config(tmp_path / name, images, **STANDSTILL) for name in ("whole", "killed"))
    train_until(whole)
    run = whole.parent / "runs" / "tiny"
    assert [line["epoch"] for line in metrics(run, "epoch")] == [0, 1, 2]
    state = last_state(run)["progress"]
    assert (state["finished"], state["epoch"], state["stale_epochs"]) == (True, 3, 2)
    why = f"val/acc1 has not improved on {state['best']:.2f}% for 2 epochs (early_stopping: 2)"
    assert f"stopped after epoch 2: {why}" in capsys.readouterr().err
    (event,) = (line for line in metrics(run, "event") if line["event"] == "stopped_early")
    assert (event["step"], event["epoch"], event["why"]) == (18, 2, why)
    assert read_document(run)[1]["state"] == "finished"
    for stop in (7, 17):
        train_until(killed, stop_at=stop)
    train_until(killed)
    assert_same_end(killed.parent / "runs" / "tiny", run)
    # The same command leaves it alone; more patience continues it.
    capsys.readouterr()
    train_until(whole)
    assert f"is finished: 18 steps, best val/acc1 {state['best']:.2f}%; {why}" in capsys.readouterr().err
    with pytest.raises(UserError, match="the run is over: val/acc1 has not improved") as caught:
        train_until(whole, epochs=20, replan=True)
    assert "early_stopping=null continues it" in (caught.value.hint or "")
    train_until(whole, early_stopping=4)
    assert last_state(run)["progress"]["epoch"] == 5


def test_an_improvement_has_to_exceed_the_smallest_that_counts() -> None:
    from stoker.train.schedule import EarlyStopping, Progress

    progress, stopping, stale = Progress(), EarlyStopping(patience=2, min_delta=0.5), []
    for score in (10.0, 10.4, 10.5, 10.6, 10.9, 11.05, 11.2):
        progress.add_score(score, stopping.min_delta)
        stale.append((progress.stale_epochs, stopping.reason(progress) is not None))
    # 10.4 and 10.5 do not exceed 10 by more than 0.5, 10.6 does; slow steps add up to an improvement.
    assert stale == [(0, False), (1, False), (2, True), (0, False), (1, False), (2, True), (0, False)]
    assert progress.best == 11.2


def test_early_stopping_without_validation_images_is_refused(ready: ReadyProcess, tmp_path: Path, images: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train").symlink_to(images / "train")
    ended = ready.run("train", write_config(tmp_path, tmp_path / "data", early_stopping=2), cwd=tmp_path)
    assert ended.code == 1
    assert "error: early-stopping-without-validation" in ended.err


@pytest.mark.parametrize(
    ("keys", "updates"),
    [
        ({}, 12), ({"limit_train_batches": 5}, 5), ({"limit_train_batches": 1}, 1), ({"limit_train_batches": 1.0}, 12),
        ({"limit_train_batches": 0.3}, 3), ({"limit_train_batches": 0.01}, 1), ({"limit_train_batches": 99}, 12),
        ({"limit_train_batches": 7, "gradient_accumulation": 3}, 2), ({"steps_per_epoch": 4}, 4),
        ({"limit_train_batches": 0.1, "gradient_accumulation": 3}, 1), ({"fast_dev_run": True}, 1),
        ({"fast_dev_run": 2, "gradient_accumulation": 3}, 2),
    ],
)  # fmt: skip
def test_an_epoch_has_the_limited_number_of_updates_and_the_plan_counts_them(
    keys: dict[str, object], updates: int
) -> None:
    settings = [f"{key}={value}".replace("True", "true") for key, value in {"batch_size": 4, **keys}.items()]
    config = trial_run(load_config(None, settings).config)
    assert updates_per_epoch(config, samples=99, world=2) == updates  # 12 whole batches of two times four
    job = PlannedRun(config, Hardware(gpus=2, nodes=1, cpus=2), DataFacts(1, 1, samples=99))
    assert job.steps_per_epoch == updates


def test_limited_validation_takes_the_same_images_of_all_classes_on_any_number_of_ranks(
    tmp_path: Path, images: Path
) -> None:
    config = load_config(write_config(tmp_path, images, limit_val_batches=2, val_batch_size=3)).config
    data = open_data(config, lambda _text: None)
    assert data.val is not None
    chosen = []
    for world, batch in ((1, 4), (2, 2)):
        sized = config.model_copy(update={"val_batch_size": batch})
        plans = [validation_plan(sized, data.val, data.decoding, Ranks(rank=r, world=world)) for r in range(world)]
        steps = [(plan, step) for plan in plans for step in range(plan.steps.count())]
        members = [plan.sampler.at(0, plan.steps.positions(step))[0] for plan, step in steps]
        chosen.append(set(np.concatenate(members).tolist()))
    assert chosen[0] == chosen[1]
    assert len(chosen[0]) == 8
    assert set(data.val.labels(np.array(sorted(chosen[0])))) == {0, 1, 2}


def test_limits_shorten_a_run_but_not_the_evaluation_of_its_model(
    tmp_path: Path, images: Path, train_until: Train
) -> None:
    config = write_config(tmp_path, images, limit_train_batches=0.5, limit_val_batches=1, val_batch_size=4)
    train_until(config)
    run = tmp_path / "runs" / "tiny"
    assert [(line["epoch"], line["step"]) for line in metrics(run, "epoch")] == [(0, 3), (1, 6)]
    assert {line["val/acc1"] % 25 for line in metrics(run, "epoch")} == {0.0}, "four images"
    assert restore_model(run).config.limit_val_batches is None
    assert train_until(write_config(tmp_path, images, run_name="none", epochs=1, limit_val_batches=0))
    assert "val/acc1" not in metrics(tmp_path / "runs" / "none", "epoch")[0]


def test_fast_dev_run_trains_and_validates_and_leaves_nothing_behind(
    tmp_path: Path, images: Path, train_until: Train, capsys: pytest.CaptureFixture[str]
) -> None:
    config = write_config(tmp_path, images, warmup_epochs=1, resize_epochs=2, start_img_size=32, csv=True)
    assert [entry[:2] for entry in train_until(config, fast_dev_run=True)] == [(0, 0)]
    said = capsys.readouterr().err
    assert "fast_dev_run: 1 training step and validation ran; nothing was kept" in said
    assert "learning rate 0.00015625" in said, "that of the first step: a hundredth of the peak, as in the warmup"
    assert not (tmp_path / "runs").exists()
    # Beside a real run, which it neither resumes nor touches.
    train_until(config, stop_at=4)
    before = {path: path.read_bytes() for path in (tmp_path / "runs").rglob("*") if path.is_file()}
    assert [entry[:2] for entry in train_until(config, fast_dev_run=3)] == [(0, 0), (0, 1), (0, 2)]
    assert {path: path.read_bytes() for path in (tmp_path / "runs").rglob("*") if path.is_file()} == before
    assert train_until(config)[0][1] == 4
