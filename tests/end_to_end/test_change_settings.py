"""A run that resumes with other settings: applied and recorded, replanned on request, or refused; never silent."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from stoker.config import load_config
from stoker.config.volume_keys import VolumeKeys
from stoker.core.errors import UserError
from stoker.profile import host
from stoker.tasks.images import classify
from stoker.tasks.images.decode import calibration
from stoker.tasks.images.decode.calibration import CalibrationResult
from stoker.train.checkpoint.changes import APPLIED, OTHER, SCHEDULE
from stoker.train.checkpoint.format import write_checkpoint
from stoker.train.schedule import Horizon, learning_rate
from tests.end_to_end.conftest import Ledger
from tests.support.tiny_training import assert_same_end, last_state, metrics, write_config
from tests.support.training_state import same

Train = Callable[..., Ledger]
# Another value for every key that applies on resume.
OTHER_VALUES: dict[str, Any] = {
    "max_bad_fraction": 0.5, "max_image_pixels": 10**6, "max_decoded_bytes": "9MB", "max_image_bytes": "1MB",
    "subset_val_per_class": 4, "seed": 3,
    "decoder": "pillow", "decode_mode": "faithful", "img_size": 48, "val_img_size": 40, "crop_ratio": 0.9,
    "interpolation": "bicubic", "limit_val_batches": 1, "crop_scale": [0.5, 1.0], "crop_aspect": [0.9, 1.1],
    "horizontal_flip": 0.0, "auto_augment": "randaugment", "randaugment_magnitude": 5, "randaugment_magnitude_std": 0.1,
    "randaugment_ops": 1, "random_erasing": 0.2, "repeated_augmentation": 2, "mixup_alpha": 0.2, "cutmix_alpha": 0.3,
    "mix_probability": 0.5, "mix_switch_probability": 0.4, "label_smoothing": 0.1, "compile_mode": "max-autotune",
    "channels_last": False, "precision": "bf16-mixed", "matmul_precision": "highest", "gradient_checkpointing": True,
    "drop_path": 0.1, "dropout": 0.1, "ema_decay": 0.5, "ema_every": 2, "ema_warmup": "none", "batch_size": 4,
    "gradient_accumulation": 3, "loss": "bce", "bce_target_threshold": 0.2, "momentum": 0.5, "nesterov": True,
    "betas": [0.8, 0.9], "weight_decay": 0.05, "decay_bias_and_norm": False, "clip_grad_norm": 1.0,
    "max_bad_steps": 3, "early_stopping": 9, "early_stopping_min_delta": 0.5,
}  # fmt: skip
OF_VOLUMES = set(VolumeKeys.model_fields)
"""test_volumes.py has these."""
# Compiling takes half a minute; a CPU has no synchronised batch norm; data_root: see below; lists are another way to
# say where the data is.
NOT_TRIED = OF_VOLUMES | {"compile_model", "sync_batchnorm", "data_root", "samples_csv", "train_csv", "val_csv"}
OTHER_SCHEDULE: dict[str, Any] = {
    "epochs": 5, "limit_train_batches": 3, "lr": 0.25, "scale_lr": False, "lr_reference_batch": 128,
    "lr_scheduler": "step", "lr_update": "epoch", "lr_step_epochs": 2, "lr_step_factor": 0.5, "min_lr": 0.001,
    "warmup_epochs": 1, "warmup_start": 0.1, "start_img_size": 16, "resize_epochs": 2,
}  # fmt: skip
ANOTHER_RUN: dict[str, Any] = {
    "model": "test_resnet", "optimizer": "adamw", "num_classes": 7, "subset_seed": 1, "subset_train_per_class": 10,
    "best_by": "loss",
}  # fmt: skip


@pytest.fixture
def refused(train_until: Train) -> Callable[..., UserError]:
    """Starts a run that is refused, and returns the error."""

    def start(config: Path, **options: Any) -> UserError:
        with pytest.raises(UserError) as caught:
            train_until(config, **options)
        return caught.value

    return start


def edit_last(run: Path, **parts: Any) -> None:
    """Changes parts of the last checkpoint."""
    state = last_state(run)
    for name, value in parts.items():
        state[name] = {**state[name], **value} if isinstance(value, dict) else value
    write_checkpoint(run / "checkpoints" / "last.ckpt", state)


def events(run: Path, name: str) -> list[dict[str, Any]]:
    return [line for line in metrics(run, "event") if line["event"] == name]


def test_every_setting_that_can_apply_from_here_on_does_and_is_recorded_with_its_step(
    tmp_path: Path, images: Path, train_until: Train, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "runs" / "tiny"
    train_until(write_config(tmp_path, images), stop_at=7)
    elsewhere = tmp_path / "moved"
    elsewhere.symlink_to(images)
    changed = OTHER_VALUES | {"data_root": str(elsewhere)}
    assert changed.keys() == APPLIED.keys() - NOT_TRIED | {"data_root"}
    config = write_config(tmp_path, images, **changed)
    train_until(config, stop_at=6)
    said = capsys.readouterr().err
    (event,) = events(run, "settings_changed")
    assert event["step"] == 5  # an update of twelve samples instead of eight: step 7 of 6 an epoch is step 5 of 4
    assert "an epoch now has 4 steps and had 6: the run is at step 5 in the new count; learning rate" in said
    recorded = event["changed"]
    assert recorded.keys() == changed.keys()
    assert recorded["weight_decay"] == [0.0001, 0.05]
    assert [key for key in changed if f"from step 5 on: {key} " not in said] == []
    assert "val_img_size 40, was none (validation is not comparable with that of earlier epochs)" in said
    state = last_state(run)
    weights, others = state["optimizer"]["param_groups"]
    assert (weights["momentum"], weights["nesterov"], weights["weight_decay"]) == (0.5, True, 0.05)
    assert others["weight_decay"] == 0.0
    assert state["progress"]["micro_batch"] == 4
    assert state["ema"]["updates"] == 6
    assert load_config(run / "config.yaml").config.weight_decay == 0.05
    # Once: from its next checkpoint on, these are the settings of the run.
    train_until(config)
    assert "from step" not in capsys.readouterr().err
    assert len(events(run, "settings_changed")) == 1
    assert last_state(run)["progress"]["finished"]


@pytest.mark.parametrize(
    "keys",
    [OTHER_SCHEDULE, {"steps_per_epoch": 2}, ANOTHER_RUN, {"weights": "other"}],
    ids=["schedule", "steps", "run", "weights"],
)
def test_another_schedule_and_another_run_are_refused_with_the_ways_to_do_it(
    keys: dict[str, Any], tmp_path: Path, images: Path, train_until: Train, refused: Callable[..., UserError]
) -> None:
    run = tmp_path / "runs" / "tiny"
    config = write_config(tmp_path, images, epochs=3)
    train_until(config, stop_at=2)
    # The error has to be about the run, not about a file that is missing.
    save_file({name: tensor.contiguous() for name, tensor in last_state(run)["model"].items()}, tmp_path / "other")
    before = (run / "checkpoints" / "last.ckpt").read_bytes(), (run / "config.yaml").read_text()
    error = refused(config, **keys)
    assert [key for key in keys if f"- {key}: " not in error.seen] == []
    assert "--from runs/tiny/checkpoints/last.ckpt run_name=NEW" in (error.hint or "")
    assert (error.name, "--replan" in (error.hint or "")) == (
        ("schedule-changed", True) if set(keys) <= set(SCHEDULE) else ("checkpoint-other", False)
    )
    assert ((run / "checkpoints" / "last.ckpt").read_bytes(), (run / "config.yaml").read_text()) == before
    # The command that made it still resumes it.
    train_until(config, stop_at=3)


def test_the_tables_of_this_file_name_every_key() -> None:
    assert OTHER_SCHEDULE.keys() | {"steps_per_epoch"} == set(SCHEDULE)
    assert ANOTHER_RUN.keys() | {"weights", "task", "subset_classes", "val_fraction"} == set(OTHER) - OF_VOLUMES


def test_replan_extends_a_finished_run_once_and_a_resume_is_exact(
    tmp_path: Path, images: Path, train_until: Train, refused: Callable[..., UserError],
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    keys: dict[str, Any] = {
        "batch_size": 16,
        "start_img_size": 32,
        "img_size": 64,
        "warmup_epochs": 1,
        "ema_decay": 0.9,
    }
    configs = []
    for name in ("whole", "killed"):
        (tmp_path / name).mkdir()
        configs.append(write_config(tmp_path / name, images, **keys))
        train_until(configs[-1])
    whole, killed = configs
    run = whole.parent / "runs" / "tiny"
    at_the_end = last_state(run)
    # Without --replan nothing happens, and that is not a success.
    assert refused(whole, epochs=8).name == "schedule-changed"
    for useless in ({"lr": 0.1}, {"weight_decay": 0.1}, {"epochs": 1, "warmup_epochs": 0}):
        error = refused(whole, **useless, replan=True)
        assert error.name == "run-is-finished", useless
        assert "epochs=3 --replan" in (error.hint or "")
    assert same(last_state(run), at_the_end)
    capsys.readouterr()
    train_until(whole, epochs=8, replan=True)
    said = capsys.readouterr().err
    # Three steps an epoch: the run is at step 6 of 24, and its rate is where the longer cosine is there.
    peak, horizon = 0.5 * 16 / 256, Horizon(steps_per_epoch=3, epochs=8, warmup_epochs=1)
    rate = learning_rate(6, horizon, peak)
    assert "replanned from step 6 on: epochs 8 (was 2)" in said
    last = learning_rate(5, replace(horizon, epochs=2), peak)
    assert f"learning rate {last:.4g} at the last step, {rate:.4g} at the next, 0 at the end" in said
    assert "the warmup (1 epoch) has passed, and is not repeated" in said
    assert "images of 32 px in epoch 2, instead of 64 px" in said
    (event,) = events(run, "replanned")
    assert (event["step"], event["changed"], event["lr_after"]) == (6, {"epochs": [2, 8]}, rate)
    rates = {line["step"]: line["train/lr"] for line in metrics(run, "step")}
    assert [rates[step + 1] for step in range(6, 24)] == [learning_rate(step, horizon, peak) for step in range(6, 24)]
    # Killed in the middle, twice: once resumed without --replan, and once by the very same command.
    train_until(killed, stop_at=10, epochs=8, replan=True)
    train_until(killed, stop_at=17, epochs=8)
    train_until(killed, epochs=8, replan=True)
    assert_same_end(killed.parent / "runs" / "tiny", run)
    assert len(events(killed.parent / "runs" / "tiny", "replanned")) == 1
    capsys.readouterr()
    train_until(killed, epochs=8, replan=True)
    assert "is finished: 24 steps" in capsys.readouterr().err
    # Another batch size is no reason to train, and changes nothing about the steps that were taken.
    train_until(killed, epochs=8, batch_size=4)
    said = capsys.readouterr().err
    assert "is finished: 24 steps" in said
    assert "from step" not in said


def test_shorter_epochs_end_the_current_one(tmp_path: Path, images: Path, train_until: Train) -> None:
    config = write_config(tmp_path, images, epochs=3)
    train_until(config, stop_at=10)  # four of six steps of the second epoch
    assert train_until(config, limit_train_batches=0.5, replan=True)[0][:2] == (2, 6)
    run = tmp_path / "runs" / "tiny"
    assert [(line["epoch"], line["step"]) for line in metrics(run, "epoch")] == [(0, 6), (1, 6), (2, 9)]
    assert last_state(run)["progress"]["finished"]


def test_pieces_of_a_batch_follow_its_size_unless_memory_forced_them(
    tmp_path: Path, images: Path, train_until: Train, capsys: pytest.CaptureFixture[str]
) -> None:
    config, run = write_config(tmp_path, images), tmp_path / "runs" / "tiny"
    train_until(config, stop_at=2)
    train_until(config, stop_at=2, batch_size=16)
    assert last_state(run)["progress"]["micro_batch"] == 16
    edit_last(run, progress={"micro_batch": 4})  # as if a batch of 16 had not fit
    capsys.readouterr()
    train_until(config, stop_at=5, batch_size=8)
    assert "pieces of 4 samples, as before: more did not fit into memory" in capsys.readouterr().err
    assert last_state(run)["progress"]["micro_batch"] == 4


def test_precision_can_change_in_any_direction(
    tmp_path: Path, images: Path, train_until: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A machine of which nobody knows whether it has a GPU: float16 is not replaced.
    machine = replace(host.read_machine(), accelerators=None)
    monkeypatch.setattr(host, "read_machine", lambda: machine)
    config, run = write_config(tmp_path, images, pin_memory=False), tmp_path / "runs" / "tiny"
    train_until(config, stop_at=2)
    assert last_state(run)["scaler"] == {}
    train_until(config, stop_at=4, precision="16-mixed")
    scaler = last_state(run)["scaler"]
    assert scaler["scale"] > 1
    edit_last(run, scaler={"scale": 32.0})
    train_until(config, stop_at=5, precision="16-mixed")
    assert last_state(run)["scaler"]["scale"] == 32.0, "it goes on with the scale that it had found"
    train_until(config, stop_at=6, precision="bf16-mixed")
    train_until(config, precision="32")
    assert [event["changed"]["precision"] for event in events(run, "settings_changed")] == [
        ["32", "16-mixed"], ["16-mixed", "bf16-mixed"], ["bf16-mixed", "32"],
    ]  # fmt: skip


def test_auto_chooses_a_decoder_once_for_the_whole_run(
    tmp_path: Path, images: Path, train_until: Train, refused: Callable[..., UserError],
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    # Measuring takes seconds, and is not what this is about.
    chosen = CalibrationResult(fastest := "simplejpeg", {}, remembered=False)
    monkeypatch.setattr(calibration, "choose_fastest", lambda *_: chosen)
    config, run = write_config(tmp_path, images, decoder="auto"), tmp_path / "runs" / "tiny"
    train_until(config, stop_at=2)
    assert last_state(run)["decoder"] == fastest
    other = "opencv"
    edit_last(run, decoder=other)  # as chosen on another machine
    capsys.readouterr()
    train_until(config, stop_at=3)
    assert f"decoded by {other}" in capsys.readouterr().err
    assert events(run, "settings_changed") == []
    monkeypatch.setattr(classify, "available_decoders", lambda: (fastest,))
    train_until(config, stop_at=4)
    assert f"{other}, which decoded the images of this run, is not available here" in capsys.readouterr().err
    assert [event["changed"] for event in events(run, "settings_changed")] == [{"decoder": [other, fastest]}]
    edit_last(run, decoder=other, config={"decode_mode": "draft"})
    error = refused(config, decode_mode="draft")
    assert (error.name, f"decoder={fastest}" in (error.hint or "")) == ("decoder-missing", True)
    train_until(config, decode_mode="draft", decoder=fastest)


def test_an_average_can_be_added_and_dropped(tmp_path: Path, images: Path, train_until: Train) -> None:
    config, run = write_config(tmp_path, images), tmp_path / "runs" / "tiny"
    train_until(config, stop_at=6)
    weights = last_state(run)["model"]
    train_until(config, stop_at=7, ema_decay=0.9, ema_warmup="none")
    state = last_state(run)
    name = next(iter(weights))
    expected = torch.lerp(weights[name], state["model"][name], 1 - 0.9)
    torch.testing.assert_close(state["ema"]["tensors"][name], expected)
    train_until(config)
    assert last_state(run)["ema"] is None
    assert events(run, "settings_changed")[-1]["changed"]["ema_decay"] == [0.9, None]
