"""A run that was interrupted, in any way and any number of times, ends bit-identical to one that was not."""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from stoker.commands import train as command
from stoker.config import load_config
from stoker.core.errors import Preempted
from stoker.profile.clock_reading import read_observed
from stoker.run.metrics import MetricsFile
from stoker.tasks import training
from tests.end_to_end.conftest import Ledger
from tests.support.ready_process import ReadyProcess
from tests.support.tiny_training import assert_same_end, last_state, metrics, steps_done, write_config

# Everything that has a state or draws random numbers.
RECIPES: dict[str, dict[str, Any]] = {
    "adamw": {
        "model": "test_efficientnet", "batch_size": 4, "gradient_accumulation": 2, "optimizer": "adamw", "lr": 0.01,
        "drop_path": 0.3, "dropout": 0.2, "ema_decay": 0.9, "mixup_alpha": 0.8, "cutmix_alpha": 1.0,
        "mix_probability": 0.7, "label_smoothing": 0.1, "random_erasing": 0.3, "auto_augment": "randaugment",
        "clip_grad_norm": 1.0, "warmup_epochs": 1,
    },
    "sgd": {
        "model": "test_resnet", "nesterov": True, "drop_path": 0.2, "loader": "process", "num_workers": 2,
        "repeated_augmentation": 2, "start_img_size": 24, "resize_epochs": 1, "loss": "bce", "log_every": 4,
    },
    "lamb": {
        "optimizer": "lamb", "lr": 0.05, "lr_update": "epoch", "precision": "bf16-mixed", "epochs": 3,
        "steps_per_epoch": 4, "warmup_epochs": 1, "ema_decay": 0.5, "ema_every": 3, "ema_warmup": "copy",
    },
}  # fmt: skip
STEPS = 12  # of all epochs


@pytest.mark.parametrize("recipe", RECIPES)
def test_an_interrupted_run_ends_bit_identical(
    recipe: str, tmp_path: Path, images: Path, train_until: Callable[..., Ledger]
) -> None:
    def config(name: str) -> Path:
        (tmp_path / name).mkdir()
        return write_config(tmp_path / name, images, **RECIPES[recipe])

    whole = config("whole")
    ledger = train_until(whole)
    assert last_state(whole.parent / "runs" / "tiny")["progress"]["step"] == STEPS
    # Twice within an epoch, and at its last step; at the very last step.
    for stops in ([2, 4, 6], [STEPS]) if recipe == "adamw" else ([5],):
        again = config("-".join(map(str, stops)))
        numbers = [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2]
        parts = [train_until(again, stop, numbers[i]) for i, stop in enumerate(stops)]
        parts.append(train_until(again))
        assert [entry for part in parts for entry in part] == ledger
        assert_same_end(again.parent / "runs" / "tiny", whole.parent / "runs" / "tiny")
        assert len([line for line in metrics(again.parent / "runs" / "tiny") if line.get("event") == "resumed"]) == len(
            stops
        )


def test_a_named_checkpoint_is_used_for_the_first_start_only(
    tmp_path: Path, images: Path, train_until: Callable[..., Ledger]
) -> None:
    config = write_config(tmp_path, images, run_name="first", epochs=1)
    train_until(config, stop_at=2)
    named = tmp_path / "runs" / "first" / "checkpoints" / "last.ckpt"
    config = write_config(tmp_path, images, run_name="second", epochs=1)
    begun = train_until(config, stop_at=4, checkpoint=named)
    assert [entry[1] for entry in begun] == [2, 3]
    # A scheduler restarts the job with the same command.
    assert [entry[1] for entry in train_until(config, checkpoint=named)] == [4, 5]


def test_a_signal_during_validation_exits_at_once_and_validates_after_the_resume(
    tmp_path: Path, images: Path, train_until: Callable[..., Ledger], monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = {"ema_decay": 0.5, "val_batch_size": 1}
    for name in ("whole", "stopped"):
        (tmp_path / name).mkdir()
    train_until(write_config(tmp_path / "whole", images, **keys))
    config = write_config(tmp_path / "stopped", images, **keys)
    seen: list[int] = []
    validation_step = training.RunObserver.validation_step

    def note(observer: Any) -> None:
        seen.append(1)
        if len(seen) == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        validation_step(observer)

    monkeypatch.setattr(training.RunObserver, "validation_step", note)
    monkeypatch.chdir(config.parent)
    with pytest.raises(Preempted, match="saved at step 6"):
        command.train_from_config(config, [], None, False)
    assert len(seen) == 3
    train_until(config)
    assert_same_end(tmp_path / "stopped" / "runs" / "tiny", tmp_path / "whole" / "runs" / "tiny")


def test_signals_end_real_processes_with_their_codes_and_the_same_command_resumes(
    ready: ReadyProcess, tmp_path: Path, images: Path
) -> None:
    config = write_config(tmp_path, images, epochs=3, batch_size=4, drop_path=0.2, mixup_alpha=0.5)
    whole = ready.run("train", config, "run_name=whole", cwd=tmp_path)
    assert whole.code == 0, whole.err
    stopped = tmp_path / "runs" / "stopped"
    for after, number, code, word in (
        (2, signal.SIGTERM, 143, "SIGTERM"), (7, signal.SIGINT, 130, "Ctrl-C"), (12, signal.SIGUSR1, 143, "SIGUSR1"),
    ):  # fmt: skip
        run = ready.start("train", config, "run_name=stopped", cwd=tmp_path)
        run.wait_for(lambda after=after: steps_done(stopped) >= after)  # type: ignore[misc]
        run.send(number)
        assert run.wait() == code, run.err
        step = last_state(stopped)["progress"]["step"]
        assert f"{word}: saved at step {step}" in run.err
        assert "the same command resumes from there" in run.err
        assert step == steps_done(stopped), "no step was lost, and none is told that was not saved"
    rest = ready.run("train", config, "run_name=stopped", cwd=tmp_path)
    assert rest.code == 0, rest.err
    assert "resuming from last.ckpt" in rest.err
    assert_same_end(stopped, tmp_path / "runs" / "whole")
    before = (stopped / "metrics.jsonl").read_bytes()
    again = ready.run("train", config, "run_name=stopped", "--json", cwd=tmp_path)
    assert again.code == 0
    assert "is finished: 36 steps" in again.err
    assert '"finished": true' in again.out
    assert (stopped / "metrics.jsonl").read_bytes() == before


def test_kills_at_any_moment_lose_nothing_but_time(ready: ReadyProcess, tmp_path: Path, images: Path) -> None:
    config = write_config(tmp_path, images, batch_size=4, ema_decay=0.9, checkpoint_every_steps=1, csv=True)
    assert ready.run("train", config, "run_name=whole", cwd=tmp_path).code == 0
    killed = tmp_path / "runs" / "killed"
    rng = random.Random(time.time_ns())
    for after in (1, 11, 18):
        run = ready.start("train", config, "run_name=killed", cwd=tmp_path)
        run.wait_for(lambda after=after: steps_done(killed) >= after)  # type: ignore[misc]
        time.sleep(rng.random() * 0.1)
        run.send(signal.SIGKILL)
        assert run.wait() in (-signal.SIGKILL, 0)
    assert ready.run("train", config, "run_name=killed", cwd=tmp_path).code == 0
    assert_same_end(killed, tmp_path / "runs" / "whole")
    rows = [
        (killed / "metrics.csv").read_text().splitlines(),
        (tmp_path / "runs/whole/metrics.csv").read_text().splitlines(),
    ]
    assert [len(lines) for lines in rows] == [3, 3]


def test_fresh_starts_over_and_keeps_the_earlier_run(ready: ReadyProcess, tmp_path: Path, images: Path) -> None:
    config = write_config(tmp_path, images, epochs=1, csv=True, tensorboard=True)
    assert ready.run("train", config, cwd=tmp_path).code == 0
    run = tmp_path / "runs" / "tiny"
    # Its folder has these too if it is tracked.
    (run / "wandb").mkdir()
    (run / "wandb_id.txt").write_text("abc")
    names = {
        "checkpoints", "config.yaml", "environment.json", "logs", "metrics.csv", "metrics.jsonl", "tensorboard",
        "wandb", "wandb_id.txt",
    }  # fmt: skip
    assert names <= {path.name for path in run.iterdir()}
    old = (run / "metrics.jsonl").read_bytes(), (run / "wandb_id.txt").read_text()
    fresh = ready.run("train", config, "--fresh", "seed=1", cwd=tmp_path)
    assert fresh.code == 0, fresh.err
    kept = run / "before-fresh-1"
    assert f"the earlier run is kept in {kept.relative_to(tmp_path)}" in fresh.err
    assert names <= {path.name for path in kept.iterdir()}
    assert ((kept / "metrics.jsonl").read_bytes(), (kept / "wandb_id.txt").read_text()) == old
    assert "seed: 0" in (kept / "config.yaml").read_text()
    assert "seed: 1" in (run / "config.yaml").read_text()
    assert not (run / "wandb_id.txt").exists()
    assert len(metrics(run, "epoch")) == 1
    assert metrics(run, "epoch")[0]["train/loss"] != metrics(kept, "epoch")[0]["train/loss"]


def test_a_second_process_is_refused_while_the_first_runs(ready: ReadyProcess, tmp_path: Path, images: Path) -> None:
    config = write_config(tmp_path, images, epochs=50)
    first = ready.start("train", config, cwd=tmp_path)
    first.wait_for(lambda: steps_done(tmp_path / "runs" / "tiny") >= 1)
    second = ready.run("train", config, "--fresh", cwd=tmp_path)
    assert second.code == 1
    assert f"runs/tiny is in use by process {first.pid}" in second.err
    assert not list((tmp_path / "runs" / "tiny").glob("before-fresh*"))
    assert first.poll() is None
    first.send(signal.SIGTERM)
    assert first.wait() == 143


@pytest.mark.parametrize("how", ["deleted", "renamed"])
def test_a_run_folder_that_disappears_while_training_is_made_again(
    tmp_path: Path, images: Path, train_until: Callable[..., Ledger], monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    run, epoch = tmp_path / "runs" / "tiny", MetricsFile.epoch

    def disturbed(self: MetricsFile, step: int, number: int, values: Mapping[str, Any]) -> Any:
        record = epoch(self, step, number, values)
        if (self._path.name, number) == ("metrics.jsonl", 0):
            shutil.rmtree(run) if how == "deleted" else run.rename(tmp_path / "elsewhere")
        return record

    monkeypatch.setattr(MetricsFile, "epoch", disturbed)
    config = write_config(tmp_path, images, epochs=3)
    train_until(config)
    monkeypatch.undo()
    assert [line["epoch"] for line in metrics(run, "epoch")] == [0, 1, 2]
    assert [line["step"] for line in metrics(run, "step")] == list(range(1, 19))
    assert last_state(run)["progress"]["finished"]
    assert load_config(run / "config.yaml").config.epochs == 3
    assert read_observed(run).steps == 18 - 3  # the first of each epoch counts separately
