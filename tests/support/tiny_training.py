"""Training runs that take a second (a few tiny images, a tiny network), and helpers to read their run folders."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import simplejpeg
import torch

from stoker.train.checkpoint.format import read_checkpoint
from tests.support.training_state import same

KEYS: dict[str, Any] = {
    "model": "test_convnext",
    "img_size": 32,
    "epochs": 2,
    "batch_size": 8,
    "lr": 0.5,
    "num_workers": 0,
    "decoder": "simplejpeg",
    "log_every": 1,
    "runs_dir": "runs",
    "run_name": "tiny",
}
TIMES = ("time", "seconds", "images_per_second", "wait_share")


def write_images(root: Path, train: int = 16, val: int = 5, classes: int = 3, side: int = 24) -> Path:
    """Class folders with that many images per class; each class has its own colour."""
    rng = np.random.default_rng(0)
    for split, count in (("train", train), ("val", val)):
        for label in range(classes):
            folder = root / split / f"class{label}"
            folder.mkdir(parents=True)
            for number in range(count):
                pixels = rng.integers(0, 256, (side, side, 3), np.uint8)
                pixels[:, :, label % 3] = 200 - 20 * (label // 3)
                (folder / f"{number:03d}.jpg").write_bytes(simplejpeg.encode_jpeg(pixels, quality=90))
    return root


def write_config(folder: Path, data: Path, **keys: Any) -> Path:
    """A config file with these keys added to the usual ones."""
    path = folder / "tiny.yaml"
    values = KEYS | {"data_root": str(data)} | keys
    path.write_text("".join(f"{key}: {json.dumps(value)}\n" for key, value in values.items()))
    return path


def metrics(run: Path, kind: str | None = None) -> list[dict[str, Any]]:
    """The complete lines of metrics.jsonl, even while the run is writing it."""
    file = run / "metrics.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines(keepends=True) if line.endswith("\n")]
    return [line for line in lines if kind in (None, line["kind"])]


def steps_done(run: Path) -> int:
    """The last step recorded in metrics.jsonl."""
    return max((line["step"] for line in metrics(run, "step")), default=0) if (run / "metrics.jsonl").exists() else 0


def without_times(lines: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Step and epoch records without machine-dependent values or events, which differ between processes."""
    return [
        {name: value for name, value in line.items() if name not in TIMES and not name.startswith("batch/")}
        for line in lines
        if line["kind"] != "event"
    ]


def last_state(run: Path) -> dict[str, Any]:
    """The contents of last.ckpt."""
    return read_checkpoint(run / "checkpoints" / "last.ckpt")


def assert_same_end(run: Path, reference: Path) -> None:
    """Asserts that both runs ended with bit-identical states and the same metrics."""
    ours, theirs = last_state(run), last_state(reference)
    for part in ("model", "ema", "optimizer", "progress", "sums", "horizon"):
        assert same(ours[part], theirs[part]), f"{part} differs"
    assert without_times(metrics(run)) == without_times(metrics(reference))


def largest_difference(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    assert a.keys() == b.keys()
    return max(float((a[name].double() - b[name].double()).abs().max()) for name in a)
