"""`task: segment3d` from the command line: the same run for any workers, engines, ranks and after any interruption;
checkpoints by the metric that the config names; what cannot be trained on is refused before anything is written."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from stoker.cli import main
from stoker.config import load_config
from stoker.report.document import RunReader
from stoker.report.live_view import frame_lines
from stoker.tasks.demo import scroll_volume
from stoker.tasks.volumes.cases.cases import open_cases
from stoker.tasks.volumes.cases.split import divide
from stoker.tasks.volumes.cases.survey import survey
from stoker.tasks.volumes.data import split_rule
from stoker.tasks.volumes.formats.opening import OpenVolumes
from stoker.tasks.volumes.segment import open_trained
from tests.end_to_end.conftest import Ledger
from tests.end_to_end.test_distributed import start_ranks
from tests.support.ready_process import ReadyProcess
from tests.support.tiny_training import assert_same_end, largest_difference, last_state, metrics, steps_done
from tests.support.tiny_volumes import write_list, write_volume_config, write_volumes

Train = Callable[..., Ledger]
SCORES = ("val/loss", "val/dice", "val/iou", "val/surface_dice")


@pytest.fixture(scope="session")
def scrolls(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_volumes(tmp_path_factory.mktemp("scrolls"))


def validated(folder: Path, cases: Path, **keys: Any) -> list[str]:
    """The ids of the volumes that a config validates on."""
    config = load_config(write_volume_config(folder, cases, **keys), []).config
    listed, volumes = open_cases(cases), OpenVolumes()
    surveyed = survey(listed.cases, volumes)
    return [case.id for case in divide(surveyed.cases, surveyed.shapes, split_rule(config)).val]


def checkpoint_names(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "checkpoints").iterdir())


def test_an_interrupted_run_ends_bit_identical_whatever_makes_its_batches(
    tmp_path: Path, scrolls: Path, train_until: Train, capsys: pytest.CaptureFixture[str]
) -> None:
    # Everything that has a state or draws random numbers.
    keys = {
        "gradient_accumulation": 2, "batch_size": 1, "ema_decay": 0.9, "precision": "bf16-mixed", "dropout": 0.2,
        "deep_supervision": True, "volume_rotation": 0.5, "volume_elastic": 0.5,
        "volume_noise": 0.5, "clip_grad_norm": 1.0,
    }  # fmt: skip
    runs = []
    for name in ("whole", "stopped"):
        (tmp_path / name).mkdir()
        runs.append(write_volume_config(tmp_path / name, scrolls, **keys))
    whole, stopped = runs
    ledger = train_until(whole)
    said = capsys.readouterr().err
    assert "2 training volumes, 1 validation volume (8 patches), fold 0 of 3 by group" in said
    assert "total batch 2 (1 x 2 accumulated), 3 steps an epoch, 2 epochs" in said
    assert "patches_per_second" in said
    assert len(ledger) == 2 * 3 * 2
    parts = train_until(stopped, 2, signal.SIGTERM, num_workers=2, loader="thread")
    parts += train_until(stopped, 4, signal.SIGINT, num_workers=2, loader="process")
    parts += train_until(stopped)
    assert parts == ledger
    assert_same_end(stopped.parent / "runs" / "tiny", whole.parent / "runs" / "tiny")
    first, second = metrics(whole.parent / "runs" / "tiny", "epoch")
    assert all(0 <= epoch[name] <= 100 for epoch in (first, second) for name in SCORES)
    assert "train/acc1" not in first
    names = {f"epoch={number}-val_dice={epoch['val/dice']:.4f}.ckpt" for number, epoch in enumerate((first, second))}
    assert names | {"last.ckpt", "previous.ckpt"} == set(checkpoint_names(whole.parent / "runs" / "tiny"))


@pytest.mark.release
def test_a_killed_run_ends_bit_identical(ready: ReadyProcess, tmp_path: Path, scrolls: Path) -> None:
    keys = {"ema_decay": 0.9, "checkpoint_every_steps": 1, "volume_elastic": 0.5, "num_workers": 1}
    config = write_volume_config(tmp_path, scrolls, **keys)
    assert ready.run("train", config, "run_name=whole", cwd=tmp_path).code == 0
    killed = tmp_path / "runs" / "killed"
    for after in (1, 3, 4):  # within an epoch, at its end, within the next
        run = ready.start("train", config, "run_name=killed", cwd=tmp_path)
        run.wait_for(lambda after=after: steps_done(killed) >= after)  # type: ignore[misc]
        run.send(signal.SIGKILL)
        assert run.wait() in (-signal.SIGKILL, 0)
    assert ready.run("train", config, "run_name=killed", cwd=tmp_path).code == 0
    assert_same_end(killed, tmp_path / "runs" / "whole")


def test_two_ranks_equal_one_process_which_can_continue_for_them(
    ready: ReadyProcess, tmp_path: Path, scrolls: Path
) -> None:
    keys = {"ema_decay": 0.8, "clip_grad_norm": 5.0, "val_batch_size": 3, "lr_scheduler": "constant"}
    for name in ("alone", "together"):
        (tmp_path / name).mkdir()
    config = write_volume_config(tmp_path / "alone", scrolls, batch_size=4, epochs=3, **keys)
    done = ready.run("train", config, cwd=config.parent)
    assert done.code == 0, done.err
    config = write_volume_config(tmp_path / "together", scrolls, batch_size=2, **keys)
    ranks = start_ranks(ready, config)
    assert [rank.wait() for rank in ranks] == [0, 0], ranks[0].err + ranks[1].err
    assert "total batch 4 (2 x 2 ranks), 3 steps an epoch" in ranks[0].err
    assert ranks[1].err == "", "one rank speaks for all"
    done = ready.run("train", config, "batch_size=4", "epochs=3", "--replan", cwd=config.parent)
    assert done.code == 0, done.err
    runs = [tmp_path / name / "runs" / "tiny" for name in ("together", "alone")]
    assert [epoch["step"] for epoch in metrics(runs[0], "epoch")] == [3, 6, 9]
    for ours, theirs in zip(*(metrics(run, "epoch") for run in runs), strict=True):
        for score in ("train/loss", *SCORES):
            assert ours[score] == pytest.approx(theirs[score], rel=1e-3), score
    for part in ("model", "ema"):
        ours, theirs = (last_state(run)[part] for run in runs)
        if part == "ema":
            ours, theirs = ours["tensors"], theirs["tensors"]
        # Adam divides by the root of squares that are close to zero: rounding shows more than in SGD.
        assert largest_difference(ours, theirs) < 1e-3, part


def test_checkpoints_are_named_and_ranked_by_the_metric_of_the_config(
    tmp_path: Path, scrolls: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    config = write_volume_config(tmp_path, scrolls, best_by="loss", save_top_k=1, epochs=3, csv=True)
    assert main(["train", str(config), "--json"]) == 0
    done = capsys.readouterr()
    run = tmp_path / "runs" / "tiny"
    losses = [epoch["val/loss"] for epoch in metrics(run, "epoch")]
    best = f"epoch={int(np.argmin(losses))}-val_loss={min(losses):.4f}.ckpt"
    assert checkpoint_names(run) == [best, "last.ckpt", "previous.ckpt"]
    summary = json.loads(done.out)
    assert summary["best_by"] == "loss"
    assert summary["best_val_loss"] == min(losses)
    assert f"val/loss={losses[0]:.4g}" in done.err.split("Epoch 1:", 1)[1]
    header = (run / "metrics.csv").read_text().splitlines()[0].split(",")
    assert {*SCORES, "train/loss"} <= set(header)
    assert "val/acc1" not in header
    (run / "clock.jsonl").unlink()  # what the doctor thinks of it takes seconds, and has tests of its own
    document = RunReader(run).document()
    figures = document["figures"]
    assert (figures["metric"], figures["best"]) == ("val/loss", pytest.approx(min(losses), rel=1e-4))
    assert document["checkpoints"][0]["score_text"] == f"val/loss {min(losses):.4f}"
    assert len(document["epochs"]["val/dice"]) == 3
    shown = "\n".join(line for line, _ in frame_lines(document))
    assert f"best        val/loss {min(losses):.4f}" in shown
    assert figures["unit"] == "patches"
    # The best one is what everybody gets who asks for the run.
    said: list[str] = []
    trained = open_trained(run, said.append)
    assert said == [f"checkpoint: {run / 'checkpoints' / best}"]
    assert (trained.classes, trained.rules.ignore, trained.channels, trained.averaged) == (2, 2, 1, False)
    with torch.inference_mode():
        assert trained.model(torch.zeros(1, 1, 16, 16, 16)).shape == (1, 2, 16, 16, 16)


def test_without_a_fold_everything_is_trained_on_and_nothing_validated(
    tmp_path: Path, scrolls: Path, train_until: Train, capsys: pytest.CaptureFixture[str]
) -> None:
    ledger = train_until(write_volume_config(tmp_path, scrolls, fold="all", epochs=1))
    assert "3 training volumes, no validation, all of it" in capsys.readouterr().err
    assert {case for _, _, cases, _ in ledger for case in cases} == {0, 1, 2}
    run = tmp_path / "runs" / "tiny"
    assert not [name for name in metrics(run, "epoch")[0] if name.startswith("val/")]
    assert checkpoint_names(run) == ["last.ckpt"]


def test_a_bad_volume_is_quarantined_and_named(
    tmp_path: Path, train_until: Train, capsys: pytest.CaptureFixture[str]
) -> None:
    image = scroll_volume((20, 20, 20), 3)[0].astype(np.float32)
    image[:] = np.nan
    cases = write_list(tmp_path / "data", image=image)
    train_until(write_volume_config(tmp_path, cases, split_by="volume", folds=4, fold=0, epochs=1))
    run = tmp_path / "runs" / "tiny"
    # Which fold a case is in is drawn: it is either trained or validated on.
    (record,) = [json.loads(line) for line in (run / "quarantine.jsonl").read_text().splitlines()]
    assert record["name"] == "case3"
    assert "NaN" in record["reason"]
    assert all(np.isfinite(line["train/loss"]) for line in metrics(run, "step"))


def test_a_run_whose_only_validation_volume_is_bad_says_once_that_nothing_is_validated(
    tmp_path: Path, train_until: Train, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = np.full((20, 20, 20), np.nan, np.float32)
    cases = write_list(tmp_path / "data", image=bad)
    keys = {"split_by": "volume", "folds": 4, "fold": 0}
    # Which fold a case is in is drawn.
    fold = next(fold for fold in range(4) if validated(tmp_path, cases, **keys | {"fold": fold}) == ["case3"])
    train_until(write_volume_config(tmp_path, cases, **keys | {"fold": fold}, epochs=2))
    said = capsys.readouterr().err
    assert said.count("warning: no validation metrics: no validation patch could be read") == 1
    assert [event["event"] for event in metrics(tmp_path / "runs" / "tiny", "event")].count("nothing_validated") == 1


def test_a_volume_that_cannot_be_opened_is_left_out_and_named(
    tmp_path: Path, train_until: Train, capsys: pytest.CaptureFixture[str]
) -> None:
    cases = write_list(tmp_path / "data")
    (cases.parent / "3-image.npy").write_bytes(b"\x93NUMPY not really")
    train_until(write_volume_config(tmp_path, cases, split_by="volume", folds=3, epochs=1))
    assert "warning: case3 is left out, it cannot be read" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("keys", "of_the_last", "code", "words"),
    [
        ({"patch_size": [16, 32, 16]}, {}, 1, ["patch-larger-than-volume", "16 x 32 x 16"]),
        ({"patch_size": [18, 16, 16]}, {}, 1, ["18"]),
        ({"fold": 7}, {}, 2, ["fold: 7, but with folds: 3 there are 0 to 2"]),
        ({"folds": 9, "fold": 8}, {}, 1, ["empty-fold", "fold 8 leaves nothing to validate on"]),
        ({}, {"label": np.full((20, 20, 20), 3, np.uint8)}, 1, ["label-out-of-range", "case case3"]),
        ({}, {"label": np.full((20, 20, 20), 0.5, np.float32)}, 1, ["float-labels", "case case3"]),
        ({}, {"label": np.zeros((20, 20, 24), np.uint8)}, 1, ["shapes-differ", "case case3"]),
        ({"model": "smal_unet"}, {}, 1, ["small_unet"]),
        ({"volume_loss": "dise + ce"}, {}, 1, ["dice"]),
        ({"surface_tolerance": 40.0}, {}, 1, ["surface_tolerance"]),
    ],
    ids=["patch", "divisor", "fold", "empty", "values", "floats", "shape", "model", "loss", "tolerance"],
)
def test_what_cannot_be_trained_is_refused_and_leaves_nothing_behind(
    keys: dict[str, Any], of_the_last: dict[str, Any], code: int, words: list[str], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    cases = write_list(tmp_path / "data", **of_the_last)
    config = write_volume_config(tmp_path, cases, **{"split_by": "volume"} | keys)
    assert main(["train", str(config)]) == code
    said = capsys.readouterr().err
    assert [word for word in words if word not in said] == []
    assert not (tmp_path / "runs" / "tiny").exists()


def test_volumes_without_any_label_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    cases = write_list(tmp_path / "data", volumes=1, label=np.full((20, 20, 20), 2, np.uint8))
    config = write_volume_config(tmp_path, cases, fold="all")
    assert main(["train", str(config)]) == 1
    assert "no-labelled-voxel" in capsys.readouterr().err
    assert not (tmp_path / "runs" / "tiny").exists()


def test_a_resumed_run_refuses_another_split_and_applies_other_changes_of_patches(
    tmp_path: Path, scrolls: Path, train_until: Train, capsys: pytest.CaptureFixture[str]
) -> None:
    config = write_volume_config(tmp_path, scrolls)
    train_until(config, stop_at=1)
    for key, value in (("fold", 1), ("deep_supervision", "true"), ("best_by", "iou"), ("split_by", "volume")):
        model = [] if key != "deep_supervision" else ["model=small_unet"]
        assert main(["train", str(config), f"{key}={value}", *model]) == 1
        assert f"{key}: " in capsys.readouterr().err
    train_until(config, volume_noise=0.9, foreground_patches=1.0)
    said = capsys.readouterr().err
    assert "from step 1 on: volume_noise 0.9, was 0.1" in said
    assert "from step 1 on: foreground_patches 1.0, was 0.333" in said


def test_fast_dev_run_trains_and_validates_and_leaves_nothing_behind(
    tmp_path: Path, scrolls: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    config = write_volume_config(tmp_path, scrolls, fast_dev_run=True)
    assert main(["train", str(config)]) == 0
    assert "1 training step and validation ran; nothing was kept" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["tiny.yaml"]


def test_a_config_of_volumes_is_verified_measured_and_searched_for_a_learning_rate(
    tmp_path: Path, scrolls: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    config = str(write_volume_config(tmp_path, scrolls))
    assert main(["verify", config, "--json", "--out", str(tmp_path)]) == 0
    checks = {check["name"]: check for check in json.loads(capsys.readouterr().out)["checks"]}
    for name in (
        "steps",
        "schedule",
        "volumes",
        "volume-split",
        "labelled-voxels",
        "model-builds",
        "checkpoint",
        "ram",
    ):
        assert checks[name]["status"] == "passed", checks[name]
    assert "class-counts" not in checks
    assert checks["labelled-voxels"]["facts"]["labelled"] < 0.5 * checks["labelled-voxels"]["facts"]["voxels"]
    assert main(["bench", "data", config, "--seconds", "0.2", "--workers", "1", "--json"]) == 0
    bench = json.loads(capsys.readouterr().out)
    assert bench["images_per_second"] > 0
    assert bench["patch_size"] == [16, 16, 16]
    assert main(["lr-find", config, "--steps", "12", "--json"]) in (0, 1)
    assert json.loads(capsys.readouterr().out)["total_batch"] == 2
    assert not (tmp_path / "runs").exists()
