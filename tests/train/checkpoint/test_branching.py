"""`stoker train --from`: a new run with somebody's weights, and what the other commands do with the same files."""

from __future__ import annotations

import argparse
import json
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from stoker.cli import main
from stoker.tasks.images.models import build_model
from stoker.train.checkpoint.format import read_checkpoint
from tests.support.tiny_training import last_state, metrics
from tests.support.trained import train_on_colours, write_colours

STEPS = 6
"""Of the run that others begin from."""


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run folder of a finished run, with an average beside its weights."""
    folder = tmp_path_factory.mktemp("source")
    write_colours(folder / "data")
    return train_on_colours(folder)


@pytest.fixture
def train(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Any:
    """Calls `stoker train` on the same config in other run folders; returns what it printed."""

    def call(name: str, *words: object, code: int = 0, runs: Path = tmp_path / "runs") -> str:
        config = source.parent.parent / "colours.yaml"
        keys = [f"run_name={name}", f"runs_dir={runs}", "epochs=1", "num_workers=0"]
        capsys.readouterr()
        assert main(["train", str(config), *keys, *map(str, words)]) == code
        captured = capsys.readouterr()
        return captured.out + captured.err

    return call


def origin_of(run: Path) -> dict[str, Any]:
    (event,) = [line for line in metrics(run) if line.get("event") == "branched"]
    found: dict[str, Any] = event["origin"]
    return found


def lightning(path: Path, tensors: dict[str, torch.Tensor]) -> Path:
    content = {
        "epoch": 4, "global_step": 99, "pytorch-lightning_version": "2.5.6", "loops": {}, "callbacks": {},
        "state_dict": {f"model._orig_mod.{name}": value for name, value in tensors.items()},
        "optimizer_states": [{}], "lr_schedulers": [], "hparams_name": "kwargs",
        "hyper_parameters": {"model_name": "test_resnet", "root": Path("/data"), "args": argparse.Namespace(a=1)},
    }  # fmt: skip
    torch.save(content, path)
    return path


def close(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> bool:
    """Whether weights are the same but for steps with a tiny learning rate; batch norm's statistics move anyway."""
    names = [name for name in theirs if "running" not in name and "num_batches" not in name]
    return all(torch.allclose(ours[name], theirs[name], atol=1e-6) for name in names)


STILL = ("lr=1e-9", "weight_decay=0", "optimizer=sgd")


def test_a_new_run_begins_with_the_average_and_its_own_schedule(train: Any, source: Path, tmp_path: Path) -> None:
    best = last_state(source)
    printed = train("new", "--from", source, *STILL)
    assert "the average (EMA), not the raw weights" in printed
    run = tmp_path / "runs" / "new"
    state = last_state(run)
    assert close(state["model"], best["ema"]["tensors"])
    assert not close(state["model"], best["model"])
    assert close(state["ema"]["tensors"], best["ema"]["tensors"]), "its own average begins there too"
    assert (state["progress"]["step"], state["horizon"]["epochs"]) == (3, 1)
    recorded = origin_of(run)
    assert recorded == {**state["branched_from"], "new": []}
    file = source / "checkpoints" / recorded["file"]
    assert (recorded["step"], recorded["weights"], recorded["bytes"]) == (STEPS, "ema", file.stat().st_size)
    assert len(recorded["xxh3_128"]) == 32


def test_the_raw_weights_are_taken_if_asked_for(train: Any, source: Path, tmp_path: Path) -> None:
    assert "the weights, not their average" in train("raw", "--from", source, "--raw", *STILL)
    assert close(last_state(tmp_path / "runs" / "raw")["model"], last_state(source)["model"])


def test_the_same_command_resumes_the_new_run_even_if_the_file_is_gone(
    train: Any, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from stoker.tasks import training
    from stoker.train.loop import train as real_train

    copy = tmp_path / "copy.ckpt"
    copy.write_bytes((source / "checkpoints" / "last.ckpt").read_bytes())

    def stopped_early(run: Any, observer: Any, saver: Any) -> Any:
        run.stop.signal = signal.SIGTERM  # seen after the first step
        return real_train(run, observer, saver)

    monkeypatch.setattr(training, "train", stopped_early)
    words = ("again", "--from", copy)
    train(*words, code=143)
    step = last_state(tmp_path / "runs" / "again")["progress"]["step"]
    assert 0 < step < 3
    copy.unlink()
    monkeypatch.setattr(training, "train", real_train)
    printed = train(*words)
    assert f"resuming from last.ckpt: epoch 0, step {step}" in printed
    assert f"already began from {copy}" in printed
    state = last_state(tmp_path / "runs" / "again")
    assert (state["progress"]["step"], state["branched_from"]["file"]) == (3, "copy.ckpt")
    origin_of(tmp_path / "runs" / "again")
    assert "is finished" in train(*words)


def test_the_optimizer_is_kept_where_it_is_the_same(train: Any, source: Path, tmp_path: Path) -> None:
    last = source / "checkpoints" / "last.ckpt"
    printed = train("kept", "--from", last, "--keep-optimizer", "weight_decay=0.03")
    assert "the weights, not their average" in printed, "momenta belong to the raw weights"
    state = last_state(tmp_path / "runs" / "kept")["optimizer"]
    assert float(state["state"][0]["step"]) == STEPS + 3
    assert state["param_groups"][0]["weight_decay"] == 0.03, "its settings are the new config's"
    train("fresh", "--from", last)
    assert float(last_state(tmp_path / "runs" / "fresh")["optimizer"]["state"][0]["step"]) == 3
    for words, reason in (
        (["optimizer=sgd"], "optimizer: adamw in the checkpoint, sgd in this run"),
        (["num_classes=9"], "fc.bias: 3 float32 in the checkpoint, 9 float32 in this run"),
    ):
        printed = train("refused", "--from", last, "--keep-optimizer", *words, code=1)
        assert "error: optimizer-differs" in printed
        assert reason in printed
    foreign = lightning(tmp_path / "l.ckpt", last_state(source)["model"])
    assert "a Lightning 2.5.6 checkpoint" in train("refused", "--from", foreign, "--keep-optimizer", code=1)


def test_a_lightning_checkpoint_with_other_classes_gets_a_new_classifier(train: Any, tmp_path: Path) -> None:
    theirs = build_model("test_resnet", 10, seed=5).state_dict()
    printed = train("fine", "--from", lightning(tmp_path / "l.ckpt", theirs), *STILL)
    assert "new, because the number of classes differs: fc.bias, fc.weight" in printed
    run = tmp_path / "runs" / "fine"
    recorded = origin_of(run)
    assert (recorded["file"], recorded["epoch"], recorded["step"]) == ("l.ckpt", 4, 99)
    assert recorded["new"] == ["fc.bias", "fc.weight"]
    ours = last_state(run)["model"]
    assert close(ours, {name: value for name, value in theirs.items() if not name.startswith("fc.")})
    assert ours["fc.weight"].shape[0] == 3


def test_a_run_that_began_elsewhere_is_not_replaced(train: Any, source: Path, tmp_path: Path) -> None:
    last = source / "checkpoints" / "last.ckpt"
    before, config = last.read_bytes(), (source / "config.yaml").read_text()
    printed = train(source.name, "--from", source, "lr=0.7", code=1, runs=source.parent)
    assert "error: run-began-elsewhere" in printed
    assert (last.read_bytes(), (source / "config.yaml").read_text()) == (before, config), "nothing was written"
    # With --fresh it is moved, and the new run begins from where it went.
    (tmp_path / "runs" / "own" / "checkpoints").mkdir(parents=True)
    own = tmp_path / "runs" / "own"
    (own / "checkpoints" / "last.ckpt").write_bytes(before)
    printed = train("own", "--from", own, "--fresh", *STILL)
    assert close(last_state(own)["model"], read_checkpoint(last)["ema"]["tensors"])
    assert (own / "before-fresh-1" / "checkpoints" / "last.ckpt").read_bytes() == before
    assert "is finished" in train("own", "--from", own, *STILL), "the same command without --fresh resumes"


@pytest.mark.parametrize(
    ("words", "code", "shown"),
    [
        (["--from", "a.ckpt", "--resume", "b.ckpt"], 2, "begins a new run, --resume b.ckpt continues one"),
        (["--from", "a.ckpt", "weights=b.pth"], 2, "both say where the weights come from"),
        (["--keep-optimizer"], 2, "--keep-optimizer says how to use the checkpoint of --from"),
        (["--raw"], 2, "--raw says how to use"),
        (["--from", "nowhere.ckpt"], 1, "--from nowhere.ckpt: no such file or folder"),
    ],
)
def test_what_contradicts_itself_is_refused_before_anything_is_written(
    train: Any, tmp_path: Path, words: list[str], code: int, shown: str
) -> None:
    assert shown in " ".join(train("none", *words, code=code).split())
    assert not (tmp_path / "runs").exists()


def test_our_own_checkpoint_is_a_weights_file_too(train: Any, source: Path, tmp_path: Path) -> None:
    printed = train("w", f"weights={source / 'checkpoints' / 'last.ckpt'}", *STILL)
    assert "the average (EMA), not the raw weights" in printed
    assert close(last_state(tmp_path / "runs" / "w")["model"], last_state(source)["ema"]["tensors"])


def test_a_foreign_file_is_named_and_never_advised_against(train: Any, source: Path, tmp_path: Path) -> None:
    theirs = lightning(tmp_path / "theirs.ckpt", last_state(source)["model"])
    damaged = tmp_path / "damaged.ckpt"
    damaged.write_bytes((source / "checkpoints" / "last.ckpt").read_bytes()[:-7])
    (tmp_path / "notes.txt").write_text("the best model is in another folder")
    for file, name, shown in (
        (theirs, "checkpoint-foreign", f"--from {theirs}"),
        (tmp_path / "notes.txt", "checkpoint-foreign", "is not a checkpoint of stoker"),
        (damaged, "checkpoint-corrupt", f"--resume {theirs}"),
    ):
        printed = train("r", "--resume", file, code=1)
        assert f"error: {name}" in printed
        assert shown in printed
        assert not any(word in printed.lower() for word in ("delete", "remove"))
        assert file.exists()


def test_eval_predict_and_export_take_a_lightning_file(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def answer(*words: object, code: int = 0) -> Any:
        capsys.readouterr()
        assert main([*map(str, words), "--json"]) == code
        return json.loads(capsys.readouterr().out)

    last, data = source / "checkpoints" / "last.ckpt", source.parent.parent / "data"
    theirs = lightning(tmp_path / "theirs.ckpt", last_state(source)["model"])
    settings = ["img_size=32", "decoder=pillow", "num_workers=1"]
    ours, found = answer("eval", last, data, "--raw"), answer("eval", theirs, data, *settings)
    assert (found["acc1"], found["loss"]) == (ours["acc1"], pytest.approx(ours["loss"]))
    assert (found["epoch"], found["step"], found["model"]) == (4, 99, "test_resnet")
    image = next((data / "val" / "red").iterdir())
    named = [f"data_root={data}"]
    top = [answer("predict", file, image, *more)["images"][0]["top"] for file, more in
           ((last, ["--raw"]), (theirs, [*settings, *named]), (theirs, settings))]  # fmt: skip
    assert top[1] == [{"class": one["class"], "probability": pytest.approx(one["probability"])} for one in top[0]]
    assert {one["class"] for one in top[2]} == {"class 0", "class 1", "class 2"}
    exported = tmp_path / "out.safetensors"
    assert answer("export", theirs, exported, "--to", "safetensors", *settings, *named)["format"] == "safetensors"
    # What we export says itself what it is.
    assert answer("eval", exported, data, *settings[1:])["acc1"] == ours["acc1"]
    bare = tmp_path / "bare.pth"
    torch.save(last_state(source)["model"], bare)
    error = answer("predict", bare, image, *settings, code=1)["error"]
    assert (error["name"], "model=NAME" in error["hint"]) == ("model-unknown", True)
    assert answer("predict", bare, image, *settings, "model=test_resnet")["weights"] == "raw"
