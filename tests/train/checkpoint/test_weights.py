"""Weights from files, valid and hostile."""

from __future__ import annotations

import argparse
import contextlib
import pickle
import random
import zipfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import torchvision
from torch import nn

from stoker.core.errors import UserError
from stoker.tasks.images.models import build_model
from stoker.train.checkpoint.weights import load_weights, open_weights

Tensors = dict[str, torch.Tensor]


def network(classes: int = 4, seed: int = 0) -> nn.Module:
    return build_model("resnet10t", classes, seed=seed)


@pytest.fixture(scope="module")
def source() -> Tensors:
    return dict(network(seed=1).state_dict())


def holds(model: nn.Module, tensors: Tensors, but: tuple[str, ...] = ()) -> bool:
    return all(torch.equal(value, tensors[name]) for name, value in model.state_dict().items() if name not in but)


def averaged(tensors: Tensors) -> dict[str, Any]:
    return {"n_averaged": torch.tensor(3)} | {f"module.{name}": value for name, value in tensors.items()}


def test_safetensors_are_read_whatever_their_name(tmp_path: Path, source: Tensors) -> None:
    for name in ("weights.safetensors", "weights.bin"):
        safetensors.torch.save_file(source, tmp_path / name)
        model = network()
        report = load_weights(model, tmp_path / name)
        assert holds(model, source)
        assert (report.skipped, report.others) == ((), ())


@pytest.mark.parametrize(
    ("average", "wrap"),
    [
        (False, lambda t: t),
        (False, lambda t: {"epoch": 3, "arch": "resnet10t", "state_dict": t, "optimizer": {"state": {}}}),
        (False, lambda t: {"state_dict": t, "args": argparse.Namespace(lr=0.5, opt="lamb", betas=(0.9, 0.99))}),
        (True, lambda t: {"state_dict": {"fc.weight": t["fc.weight"]}, "state_dict_ema": t}),
        (True, lambda t: {"model": {}, "model_ema": averaged(t)}),
        (False, lambda t: {"state_dict": {f"module._orig_mod.{name}": value for name, value in t.items()}}),
        (False, lambda t: {f"_orig_mod.{name}": value for name, value in t.items()}),
    ],
)
def test_checkpoints_of_known_trainers_are_read(
    tmp_path: Path, source: Tensors, average: bool, wrap: Callable[[Tensors], Any]
) -> None:
    torch.save(wrap(source), tmp_path / "model_best.pth.tar")
    model = network()
    report = load_weights(model, tmp_path / "model_best.pth.tar")
    assert holds(model, source)
    assert report.averaged == average


def test_a_classifier_of_another_size_is_skipped_and_named(tmp_path: Path, source: Tensors) -> None:
    safetensors.torch.save_file(source, tmp_path / "four.safetensors")
    model = network(classes=7)
    before = model.fc.weight.detach().clone()  # type: ignore[union-attr,operator]
    report = load_weights(model, tmp_path / "four.safetensors")
    assert report.skipped == ("fc.bias", "fc.weight")
    assert torch.equal(model.fc.weight, before)  # type: ignore[union-attr,arg-type]
    assert holds(model, source, but=report.skipped)


def test_another_model_is_refused_with_names_and_leaves_ours_untouched(tmp_path: Path) -> None:
    torch.save(build_model("resnet18", 4).state_dict(), tmp_path / "resnet18.pth")
    model = network()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(UserError) as caught:
        load_weights(model, tmp_path / "resnet18.pth")
    assert caught.value.name == "weights-do-not-fit"
    assert all(part in caught.value.seen for part in ("missing: ", "unexpected: ", "of another shape: ", " more"))
    assert caught.value.seen.count("layer") <= 15
    assert holds(model, before)


class Payload:
    """Runs when a careless program unpickles it."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> Any:
        return Path.touch, (self.trace,)


@pytest.mark.parametrize(
    ("place", "refused"),
    [("root", "weights-missing"), ("beside", None), ("in a namespace", None), ("inside", "weights-not-plain")],
)
def test_a_hostile_pickle_does_not_run(tmp_path: Path, source: Tensors, place: str, refused: str | None) -> None:
    trace, file = tmp_path / "it_ran", tmp_path / "weights.pth"
    payload = Payload(trace)
    content: Any = {
        "root": payload,
        "beside": {"state_dict": source, "args": payload},
        "in a namespace": {"state_dict": source, "args": argparse.Namespace(lr=payload)},
        "inside": {"state_dict": source | {"fc.weight": payload}},
    }[place]
    torch.save(content, file)
    model = network()
    if refused is None:
        load_weights(model, file)
        assert holds(model, source), "what is beside the weights does not matter"
    else:
        with pytest.raises(UserError) as caught:
            load_weights(model, file)
        assert caught.value.name == refused
        assert "pathlib.Path.touch" in caught.value.seen or "getattr" in caught.value.seen
    assert not trace.exists()
    torch.load(file, weights_only=False)
    assert trace.exists(), "the payload is harmless: this test proves nothing"


class Recipe:
    """A class of the program that trained, which nobody else has."""


def lightning(state_dict: dict[str, Any]) -> dict[str, Any]:
    """The structure that Lightning 2.5 writes, with what torch's weights_only refuses: paths, classes, namespaces."""
    return {
        "epoch": 7,
        "global_step": 3500,
        "pytorch-lightning_version": "2.5.6",
        "state_dict": state_dict,
        "loops": {"fit_loop": {"state_dict": {}, "epoch_progress": {"current": {"ready": 8, "completed": 7}}}},
        "callbacks": {
            "ModelCheckpoint{'monitor': 'val_acc1'}": {
                "best_model_score": torch.tensor(0.7), "best_model_path": "/data/best.ckpt", "dirpath": Path("/data")
            }
        },
        "optimizer_states": [{"state": {0: {"momentum_buffer": torch.zeros(3)}}, "param_groups": [{"params": [0]}]}],
        "lr_schedulers": [{"last_epoch": 7, "milestones": Counter({3: 1})}],
        "hparams_name": "kwargs",
        "hyper_parameters": {
            "model_name": "resnet10t", "root": Path("/data"), "opt": torch.optim.SGD, "recipe": Recipe(),
            "args": argparse.Namespace(lr=0.1),
        },
    }  # fmt: skip


def under(prefix: str, tensors: Tensors) -> Tensors:
    return {f"{prefix}{name}": value for name, value in tensors.items()}


@pytest.mark.parametrize("prefix", ["model._orig_mod.", "encoder.backbone.", ""])
def test_a_lightning_checkpoint_is_read_whatever_the_network_is_called(
    tmp_path: Path, source: Tensors, prefix: str
) -> None:
    extra = {"criterion.weight": torch.ones(4), "val_acc.tp": torch.zeros(4)}
    torch.save(lightning(under(prefix, source) | extra), tmp_path / "last.ckpt")
    with pytest.raises(pickle.UnpicklingError):
        torch.load(tmp_path / "last.ckpt", weights_only=True)
    model = network()
    report = load_weights(model, tmp_path / "last.ckpt")
    assert holds(model, source)
    assert report.others == ("criterion.weight", "val_acc.tp")
    assert not report.averaged
    assert "Lightning 2.5.6 checkpoint, epoch 7, step 3,500" in report.describe()
    assert "left out: criterion.weight, val_acc.tp" in report.describe()


@pytest.mark.parametrize("kind", ["torch's average", "Lightning's callback", "timm", "torchvision"])
def test_the_average_is_taken_unless_the_raw_weights_are_asked_for(tmp_path: Path, source: Tensors, kind: str) -> None:
    average = dict(network(seed=2).state_dict())
    one_table = (
        under("model.", source) | under("ema_model.module.", average) | {"ema_model.n_averaged": torch.tensor(9)}
    )
    content: dict[str, Any] = {
        "torch's average": lightning(one_table),
        "Lightning's callback": lightning(under("model.", average)) | {"current_model_state": under("model.", source)},
        "timm": {"arch": "resnet10t", "state_dict": source, "state_dict_ema": average, "optimizer": {"state": {}}},
        "torchvision": {
            "model": source, "model_ema": averaged(average), "optimizer": {"state": {}}, "lr_scheduler": {},
            "epoch": 3, "args": argparse.Namespace(model="resnet10t", output_dir=Path("/out")),
        },
    }[kind]  # fmt: skip
    torch.save(content, tmp_path / "w.ckpt")
    assert open_weights(tmp_path / "w.ckpt").model == "resnet10t"
    for which, expected in ((None, average), ("ema", average), ("raw", source)):
        model = network()
        report = load_weights(model, tmp_path / "w.ckpt", which)  # type: ignore[arg-type]
        assert holds(model, expected), which
        assert (report.averaged, report.both) == (which != "raw", True)
        assert report.others == ()
    torch.save({"state_dict": source}, tmp_path / "w.ckpt")
    with pytest.raises(UserError, match="no moving average"):
        load_weights(network(), tmp_path / "w.ckpt", "ema")


def test_a_file_with_two_networks_is_not_guessed_at(tmp_path: Path, source: Tensors) -> None:
    torch.save(under("student.", source) | under("teacher.", source), tmp_path / "w.pth")
    with pytest.raises(UserError, match=r"2 times: student\.\*, teacher\.\*"):
        load_weights(network(), tmp_path / "w.pth")


def test_a_deeper_network_of_the_same_family_is_refused(tmp_path: Path) -> None:
    torch.save(lightning(under("model.", build_model("resnet34", 4).state_dict())), tmp_path / "w.ckpt")
    with pytest.raises(UserError, match=r"unexpected: layer1\.2"):
        load_weights(build_model("resnet18", 4), tmp_path / "w.ckpt")


def test_torchvisions_resnet_gives_the_same_output(tmp_path: Path) -> None:
    theirs = torchvision.models.resnet18(num_classes=5).eval()
    table = theirs.state_dict()
    # Its older files come from a torch whose batch norm did not count batches.
    torch.save({name: value for name, value in table.items() if "num_batches" not in name}, tmp_path / "resnet18.pth")
    ours = build_model("resnet18", 5).eval()
    load_weights(ours, tmp_path / "resnet18.pth")
    images = torch.rand(2, 3, 64, 64)
    with torch.no_grad():
        assert torch.equal(ours(images), theirs(images))


def test_old_files_and_bare_pickles_are_refused_unread(tmp_path: Path, source: Tensors) -> None:
    trace, file = tmp_path / "it_ran", tmp_path / "old.pth"
    torch.save(source, file, _use_new_zipfile_serialization=False)
    with pytest.raises(UserError, match=r"before version 1\.6"):
        load_weights(network(), file)
    file.write_bytes(pickle.dumps(Payload(trace)))
    with pytest.raises(UserError):
        load_weights(network(), file)
    assert not trace.exists()


def test_a_compressed_archive_is_refused(tmp_path: Path, source: Tensors) -> None:
    torch.save(source, tmp_path / "plain.pth")
    with (
        zipfile.ZipFile(tmp_path / "plain.pth") as plain,
        zipfile.ZipFile(tmp_path / "bomb.pth", "w", zipfile.ZIP_DEFLATED) as bomb,
    ):
        for name in plain.namelist():
            bomb.writestr(name, plain.read(name))
    with pytest.raises(UserError, match="compressed"):
        load_weights(network(), tmp_path / "bomb.pth")


def test_a_cut_off_download_is_named(tmp_path: Path, source: Tensors) -> None:
    torch.save(source, tmp_path / "whole.pth")
    safetensors.torch.save_file(source, tmp_path / "whole.safetensors")
    for name in ("whole.pth", "whole.safetensors"):
        data = (tmp_path / name).read_bytes()
        for length in (len(data) // 2, len(data) - 1, 20, 3, 0):
            (tmp_path / "cut").write_bytes(data[:length])
            with pytest.raises(UserError) as caught:
                load_weights(network(), tmp_path / "cut")
            assert caught.value.name in ("weights-damaged", "weights-unknown-format"), (name, length)


def test_a_torn_pickle_with_right_checksums_is_damaged_or_refused(tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    torch.save(model.state_dict(), tmp_path / "w.pth")
    with zipfile.ZipFile(tmp_path / "w.pth") as whole:
        entries = {name: whole.read(name) for name in whole.namelist()}
    chance = random.Random(1)
    for _ in range(150):
        with zipfile.ZipFile(tmp_path / "torn.pth", "w") as torn:
            for name, entry in entries.items():
                data = bytearray(entry)
                if name.endswith("data.pkl"):
                    for _ in range(3):
                        data[chance.randrange(len(data))] = chance.randrange(256)
                torn.writestr(name, bytes(data))
        with contextlib.suppress(UserError):
            load_weights(model, tmp_path / "torn.pth")


def test_files_without_tensors_are_named(tmp_path: Path) -> None:
    for content in ({}, {"epoch": 3}, [1, 2], {"state_dict": {"a": 1}}):
        torch.save(content, tmp_path / "w.pth")
        with pytest.raises(UserError) as caught:
            load_weights(network(), tmp_path / "w.pth")
        assert caught.value.name in ("weights-missing", "weights-damaged")


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    for path in (tmp_path / "absent.pth", tmp_path):
        with pytest.raises(UserError, match=str(path)):
            load_weights(network(), path)
