"""`stoker export` writes models for other programs, and keeps only files whose outputs match the checkpoint's."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
import safetensors
import torch

from stoker.cli import main
from stoker.tasks import export_formats
from stoker.tasks.images.models import build_model, restore_model
from stoker.train.checkpoint.weights import load_weights
from tests.support.trained import SIZE, write_images, write_untrained

CLASSES = ["ant", "bee", "cät"]


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    torch.set_num_threads(1)
    write_images(tmp_path / "data" / "val" / "ant", 1, name="real.jpg")
    return write_untrained(tmp_path / "a.ckpt", CLASSES, data_root=tmp_path / "data")


def exported(capsys: pytest.CaptureFixture[str], *arguments: str | Path, code: int = 0) -> dict:
    ended = main(["export", *map(str, arguments), "--json"])
    captured = capsys.readouterr()
    assert ended == code, captured.err
    found = json.loads(captured.out)
    return found["error"] if code else found


def test_safetensors_contain_weights_and_metadata(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "new" / "model.safetensors"
    found = exported(capsys, checkpoint, out, "--to", "safetensors")
    assert [one["images"] for one in found["differences"]] == ["random batch of 3", "random batch of 1", "real.jpg"]
    assert all(one["max_abs"] <= 1e-6 for one in found["differences"])
    with safetensors.safe_open(out, "pt") as file:
        metadata = file.metadata()
    assert json.loads(metadata["classes"]) == CLASSES
    assert json.loads(metadata["mean"]) == [0.5, 0.5, 0.5]  # those of test_resnet
    assert metadata["img_size"] == str(SIZE)
    # A run can start from it.
    model = build_model("test_resnet", len(CLASSES), img_size=SIZE)
    load_weights(model, out)
    for name, value in restore_model(checkpoint).model.state_dict().items():
        assert torch.equal(model.state_dict()[name], value)


def test_torch_export_accepts_any_batch_size(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.set_num_threads(1)
    checkpoint = write_untrained(tmp_path / "a.ckpt", CLASSES, model="test_vit")
    out = tmp_path / "model.pt2"
    found = exported(capsys, checkpoint, out, "--to", "torch-export")
    assert len(found["differences"]) == 2  # without data there is no real image
    extra = {"metadata.json": ""}
    program = torch.export.load(out, extra_files=extra)
    assert json.loads(extra["metadata.json"])["classes"] == CLASSES
    images = torch.randn(7, 3, SIZE, SIZE)
    with torch.inference_mode():
        assert torch.allclose(program.module()(images), restore_model(checkpoint).model(images), atol=1e-5)


@pytest.mark.parametrize("checker", ["onnxruntime", pytest.param("onnx", marks=pytest.mark.release)])
def test_onnx_accepts_any_batch_size(
    checkpoint: Path,
    tmp_path: Path,
    checker: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    onnx = pytest.importorskip("onnx")
    pytest.importorskip("onnxscript")
    if checker == "onnxruntime":
        pytest.importorskip("onnxruntime")
    else:
        monkeypatch.setitem(sys.modules, "onnxruntime", None)
    out = tmp_path / "model.onnx"
    found = exported(capsys, checkpoint, out, "--to", "onnx")
    assert checker in found["checked_with"]
    assert len(found["differences"]) == 3
    written = onnx.load(out)
    properties = {entry.key: entry.value for entry in written.metadata_props}
    assert json.loads(properties["classes"]) == CLASSES
    assert written.graph.input[0].type.tensor_type.shape.dim[0].dim_param
    assert [node.name for node in written.graph.output] == ["logits"]


def test_a_missing_package_is_named_before_any_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "onnx", None)
    error = exported(capsys, tmp_path / "not-looked-at.ckpt", tmp_path / "model.onnx", "--to", "onnx", code=1)
    assert error["name"] == "package-missing"
    assert "onnx" in error["message"]
    assert error["hint"] == "pip install 'stoker[export]'"


def test_a_file_with_different_outputs_is_removed(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def write_slightly_wrong(subject: export_formats.Exportable, model: torch.nn.Module, path: Path) -> None:
        with torch.no_grad():
            next(model.parameters()).add_(0.01)
        good.write(subject, model, path)

    good = export_formats.FORMATS["safetensors"]
    bad = export_formats.ExportFormat(write_slightly_wrong, good.load)
    monkeypatch.setitem(export_formats.FORMATS, "safetensors", bad)
    out = tmp_path / "out" / "model.safetensors"
    out.parent.mkdir()
    out.write_text("the old one")
    error = exported(capsys, checkpoint, out, "--to", "safetensors", "--force", code=1)
    assert error["name"] == "export-differs"
    assert [file.name for file in out.parent.iterdir()] == [out.name]
    assert out.read_text() == "the old one"


def test_an_existing_file_is_replaced_only_with_force(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "model.safetensors"
    out.write_text("precious")
    assert exported(capsys, checkpoint, out, "--to", "safetensors", code=1)["name"] == "out-exists"
    assert out.read_text() == "precious"
    assert exported(capsys, checkpoint, out, "--to", "safetensors", "--force")["bytes"] == out.stat().st_size
    assert exported(capsys, checkpoint, tmp_path, "--to", "safetensors", code=1)["name"] == "out-is-folder"
    below_a_file = out / "model.safetensors"
    assert exported(capsys, checkpoint, below_a_file, "--to", "safetensors", code=1)["name"] == "out-not-writable"


def test_bad_input_is_named(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "model.x"
    assert exported(capsys, checkpoint, out, "--to", "tensorflow", code=2)["name"] == "usage"
    (tmp_path / "no.ckpt").write_text("no checkpoint")
    assert (
        exported(capsys, tmp_path / "no.ckpt", out, "--to", "safetensors", code=1)["name"] == "weights-unknown-format"
    )
    image = ["--image", tmp_path / "no.ckpt"]
    assert exported(capsys, checkpoint, out, "--to", "safetensors", *image, code=1)["name"] == "image-unreadable"
    assert not out.exists()


def test_text_names_every_difference(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", str(checkpoint), str(tmp_path / "m.safetensors"), "--to", "safetensors"]) == 0
    text = capsys.readouterr().out
    assert text.count("largest difference") == 3
    assert "real.jpg" in text


def test_an_exported_file_has_the_mode_of_any_new_file(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        with export_formats._appearing(tmp_path / "model.safetensors") as draft:
            draft.touch(mode=0o600)
    finally:
        os.umask(before)
    assert (tmp_path / "model.safetensors").stat().st_mode & 0o777 == 0o640
