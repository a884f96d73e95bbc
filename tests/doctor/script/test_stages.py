"""Reading, decoding, augmenting and collating are distinguished in scripts in the style of torchvision and timm."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.doctor.script.conftest import Attached
from tests.support.images import encode, noise


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    for number in range(24):
        folder = tmp_path / "train" / "ab"[number % 2]
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{number}.jpg").write_bytes(encode(noise(200, 160, number), "JPEG"))
    return tmp_path


@pytest.mark.parametrize("style", ["torchvision", "timm"])
def test_images_pass_through_every_stage(attached: Attached, pictures: Path, style: str) -> None:
    where = [str(pictures), "--timm"] if style == "timm" else [str(pictures / "train")]
    seen = attached("images.py", *where).observed
    assert seen is not None
    assert set(seen.stages) == {"fetch", "decode", "augment", "collate", "other"}
    assert seen.stages["decode"].cpu_s is not None
    assert seen.stages["fetch"].cpu_s is not None
    assert seen.stages["decode"].cpu_s > seen.stages["fetch"].cpu_s
    assert seen.stages["augment"].calls == sum(batch.samples for batch in seen.batches)
    size = sum(path.stat().st_size for path in pictures.rglob("*.jpg")) / 24
    assert seen.storage is not None
    assert seen.storage.bytes_per_sample == pytest.approx(size, rel=0.2)
    assert seen.storage.kind is not None
    assert pictures.is_relative_to(seen.storage.root or "/nowhere")
    assert seen.samples == 10 * 4
    assert all(batch.fetch_s is not None and batch.fetch_s < batch.wall_s for batch in seen.batches)
