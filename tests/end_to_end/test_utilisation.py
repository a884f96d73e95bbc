"""`mfu` in the metrics: the share of the peak, absent where the peak is unknown."""

from __future__ import annotations

from pathlib import Path

import pytest
import timm
import yaml

from stoker.train.compute import training_flops_per_image
from tests.support.ready_process import ReadyProcess
from tests.support.tiny_training import metrics, write_config

PEAK = 0.05
SHEET = {
    "title": "a slow one", "vram_gib": 1, "memory_gb_per_s": 10, "peak_tflops": {"fp32": PEAK}, "pcie_gb_per_s": 1,
    "source": "made up",
}  # fmt: skip


@pytest.fixture
def sheet(tmp_path: Path) -> Path:
    path = tmp_path / "slow.yaml"
    path.write_text(yaml.safe_dump(SHEET))
    return path


def expected(lines: list[dict[str, float]], sizes: dict[int, int]) -> list[float]:
    """Computed from the line's own speed and the FLOPs at its epoch's image size."""
    model = timm.create_model("test_convnext", num_classes=3)
    flops = {epoch: training_flops_per_image(model, size) or 0 for epoch, size in sizes.items()}
    return [line["images_per_second"] * flops[int(line["epoch"])] / (PEAK * 1e12) for line in lines]


def test_a_run_with_a_datasheet_reports_its_utilisation_for_every_size(
    ready: ReadyProcess, tmp_path: Path, images: Path, sheet: Path
) -> None:
    config = write_config(tmp_path, images, accelerator=str(sheet), img_size=64, start_img_size=32, resize_epochs=1)
    done = ready.run("train", config, cwd=tmp_path)
    assert done.code == 0, done.err
    for kind in ("step", "epoch"):
        lines = metrics(tmp_path / "runs" / "tiny", kind)
        assert {line["epoch"] for line in lines} == {0, 1}
        assert [line["mfu"] for line in lines] == pytest.approx(expected(lines, {0: 32, 1: 64}), rel=1e-6)
        assert all(line["mfu"] > 0 for line in lines)


def test_without_a_known_peak_there_is_no_utilisation_at_all(
    ready: ReadyProcess, tmp_path: Path, images: Path, sheet: Path
) -> None:
    for name, overrides in (("none", []), ("bf16", [f"accelerator={sheet}", "precision=bf16-mixed"])):
        done = ready.run("train", write_config(tmp_path, images, epochs=1, run_name=name), *overrides, cwd=tmp_path)
        assert done.code == 0, done.err
        lines = metrics(tmp_path / "runs" / name)
        assert len(lines) > 3
        assert not any("mfu" in line for line in lines)


def test_an_unknown_accelerator_is_refused_before_anything_starts(
    ready: ReadyProcess, tmp_path: Path, images: Path
) -> None:
    done = ready.run("train", write_config(tmp_path, images, accelerator="a101-80"), cwd=tmp_path)
    assert done.code == 2
    assert "unknown-gpu" in done.err
    assert "did you mean a100-80?" in done.err
    assert not (tmp_path / "runs").exists()
