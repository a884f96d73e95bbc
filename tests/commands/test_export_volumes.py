"""`stoker export` of networks for volumes: patches of a fixed size, in batches of any."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from stoker.cli import main
from stoker.config import Config
from stoker.tasks.volumes.networks import build_volume_model
from stoker.tasks.volumes.segment import open_trained
from stoker.train.checkpoint.weights import load_weights
from tests.support.trained_volumes import PATCH, write_untrained_volumes


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """Trained on a list of two-channel cases, of which the first is smaller than the patch."""
    torch.set_num_threads(1)
    rng = np.random.default_rng(0)
    for name in ("a", "b", "label"):
        np.save(tmp_path / f"{name}.npy", rng.integers(0, 2, (12, 20, 16)).astype(np.uint8))
    (tmp_path / "cases.yaml").write_text("cases:\n  - {id: real, image: [a.npy, b.npy], label: label.npy}\n")
    return write_untrained_volumes(tmp_path / "a.ckpt", channels=2, classes=3, data_root=tmp_path / "cases.yaml")


def exported(capsys: pytest.CaptureFixture[str], *arguments: str | Path, code: int = 0) -> dict[str, Any]:
    ended = main(["export", *map(str, arguments), "--json"])
    captured = capsys.readouterr()
    assert ended == code, captured.err
    found = json.loads(captured.out)
    return found["error"] if code else found


def wanted(checkpoint: Path, patches: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        found: torch.Tensor = open_trained(checkpoint).model(patches)
    return found


@pytest.mark.release  # docs/segment-volumes.md, whose commands are run, exports to ONNX
def test_onnx_gives_the_logits_of_the_checkpoint(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    out = tmp_path / "model.onnx"
    found = exported(capsys, checkpoint, out, "--to", "onnx")
    assert found["checked_with"].startswith("onnxruntime")
    assert [one["images"] for one in found["differences"]] == ["random batch of 2", "random batch of 1", "real"]
    session = onnxruntime.InferenceSession(str(out), providers=["CPUExecutionProvider"])
    assert session.get_inputs()[0].name == "patches"
    assert session.get_inputs()[0].shape[1:] == [2, *PATCH]
    metadata = session.get_modelmeta().custom_metadata_map
    assert (metadata["patch_size"], metadata["normalize"], metadata["classes"]) == ("[16, 16, 16]", "volume", "3")
    patches = torch.randn(3, 2, *PATCH)
    logits = session.run(["logits"], {"patches": patches.numpy()})[0]
    assert logits.shape == (3, 3, *PATCH)
    assert np.abs(logits - wanted(checkpoint, patches).numpy()).max() < 1e-4


def test_torch_export_and_safetensors_give_the_same_network(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    patches = torch.randn(3, 2, *PATCH)
    exported(capsys, checkpoint, tmp_path / "model.pt2", "--to", "torch-export")
    program = torch.export.load(tmp_path / "model.pt2").module()
    with torch.inference_mode():
        assert torch.allclose(program(patches), wanted(checkpoint, patches), atol=1e-5)
    exported(capsys, checkpoint, tmp_path / "model.safetensors", "--to", "safetensors")
    config = Config(task="segment3d", model="small_unet", patch_size=PATCH, channels_last=False, seed=9)
    model = build_volume_model(config, 2, 3).eval()
    load_weights(model, tmp_path / "model.safetensors")
    with torch.inference_mode():
        assert torch.equal(model(patches), wanted(checkpoint, patches))


def test_a_volume_to_compare_on_must_fit_the_network(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, image = tmp_path / "model.pt2", ["--image", tmp_path / "a.npy"]
    assert exported(capsys, checkpoint, out, "--to", "safetensors", *image, code=1)["name"] == "channels-differ"
    single = write_untrained_volumes(tmp_path / "single.ckpt")
    found = exported(capsys, single, out, "--to", "safetensors", *image)
    assert found["differences"][-1]["images"] == "a.npy"
    image = ["--image", tmp_path / "nowhere.npy"]
    assert exported(capsys, single, out, "--to", "safetensors", *image, "--force", code=1)["name"] == "image-unreadable"
