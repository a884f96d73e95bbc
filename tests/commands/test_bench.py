"""`stoker bench data` measures the real loader and says what limits it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

from tests.conftest import PROJECT, Run
from tests.loader.test_loader import make_images


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("bench-data")
    make_images(root, "train", 30)
    return root


QUICK = ["--seconds", "0.3", "img_size=16", "batch_size=4"]


def test_json_has_what_programs_need(stoker: Run, data: Path) -> None:
    ended = stoker("bench", "data", data, "--json", "--workers", "1", "--workers", "2", *QUICK)
    assert ended.code == 0, ended.err
    found = ended.json
    assert found["images_per_second"] == max(found["by_workers"].values())
    assert set(found["by_workers"]) == {"1", "2"}
    assert found["stages"]["decode"] > 0
    assert found["stages"]["on_cpu"] > 0
    assert found["decode_limit_images_per_second"] > 0
    assert found["share_of_gpu"] is None


def test_text_picture_and_gpu(stoker: Run, data: Path, tmp_path: Path) -> None:
    picture = tmp_path / "bench.png"
    ended = stoker("bench", "data", data / "train", "--gpu", "A100-80", "--workers", "1", "--plot", picture, *QUICK)
    assert ended.code == 0, ended.err
    assert "images/s with 1 worker (" in ended.out
    assert "a100-80 processes 2,470 images/s: this host can" in ended.out
    assert "NVIDIA DeepLearningExamples" in ended.out
    with Image.open(picture) as image:
        assert image.size[0] > 400


def test_a_config_and_the_wrapper_script_do_the_same(data: Path, tmp_path: Path) -> None:
    config = tmp_path / "small.yaml"
    config.write_text(f"data_root: {data}\nimg_size: 16\nbatch_size: 4\nsubset_classes: 2\n")
    done = subprocess.run(
        [sys.executable, PROJECT / "benchmark_data_loading.py", config, "--workers", "1", "--seconds", "0.3"],
        capture_output=True, text=True, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "images/s" in done.stdout
    assert "classes: class" in done.stderr


def test_an_unknown_gpu_is_refused_before_anything_is_measured(stoker: Run, data: Path) -> None:
    ended = stoker("bench", "data", data, "--gpu", "a100-08")
    assert ended.code == 2
    assert "did you mean a100-80?" in ended.err
