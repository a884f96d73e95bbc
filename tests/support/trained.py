"""Small trained models and their data, for commands that take a checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from stoker.cli import main
from stoker.config import config_values, load_config
from stoker.tasks.images.models import build_model
from stoker.train.checkpoint.format import write_checkpoint

COLOURS = {"blue": (40, 60, 200), "green": (50, 190, 60), "red": (210, 50, 40)}
SIZE = 32


def write_images(
    folder: Path, count: int, colour: tuple[int, int, int] = (90, 90, 90), name: str = "{:03d}.jpg"
) -> None:
    """Noisy images of one colour; `name` is formatted with their numbers, starting at 1."""
    random = np.random.default_rng(sum(colour) + count)
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(1, count + 1):
        noise = random.normal(0, 60, (40, 48, 3))
        Image.fromarray((np.array(colour) + noise).clip(0, 255).astype(np.uint8)).save(folder / name.format(number))


def write_colours(root: Path, train: int = 8, val: int = 6) -> Path:
    """Class folders by colour, for training and validation; the last validation class has one extra image."""
    for name, colour in COLOURS.items():
        write_images(root / "train" / name, train, colour)
        write_images(root / "val" / name, val + (name == "red"), colour)
    return root


def train_on_colours(folder: Path, **keys: object) -> Path:
    """Trains for a few steps and returns the run folder."""
    settings = {
        "model": "test_resnet", "img_size": SIZE, "epochs": 2, "batch_size": 8, "num_workers": 1, "optimizer": "adamw",
        "lr": 0.003, "scale_lr": "false", "ema_decay": 0.5, "data_root": folder / "data", "runs_dir": folder / "runs",
        "decoder": "pillow", "val_batch_size": 4,
    } | keys  # fmt: skip
    config = folder / "colours.yaml"
    config.write_text("".join(f"{key}: {value}\n" for key, value in settings.items()))
    assert main(["train", str(config)]) == 0
    return folder / "runs" / "colours"


def write_untrained(
    path: Path, classes: Sequence[str], *, always: Sequence[int] = (), ema: bool = False, **keys: object
) -> Path:
    """A checkpoint of an untrained network, as a run writes it; with `always`, the network predicts these classes for
    every image, in descending order of probability."""
    settings = {"model": "test_resnet", "img_size": SIZE, "num_workers": 1, "decoder": "pillow"} | keys
    config = load_config(None, [f"{key}={value}" for key, value in settings.items()]).config
    model = build_model(config.model, config.num_classes or len(classes), img_size=SIZE, seed=1)
    if always:
        head: Any = model.get_classifier()  # type: ignore[operator]
        torch.nn.init.zeros_(head.weight)
        torch.nn.init.zeros_(head.bias)
        for rank, number in enumerate(always):
            head.bias.data[number] = float(20 - rank)
    state = {
        "model": model.state_dict(),
        "ema": {"updates": 1, "tensors": model.state_dict()} if ema else None,
        "config": config_values(config),
        "classes": tuple(classes),
        "progress": {"epoch": 3, "step": 12},
    }
    write_checkpoint(path, state)
    return path
