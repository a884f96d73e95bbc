"""What is checked of a run on images: how long an epoch is, what the network takes, and random images to try it."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from stoker.config import Config
from stoker.profile.host import HostConfig
from stoker.tasks.building import updates_per_epoch
from stoker.tasks.checks import EpochLength, StepInput
from stoker.tasks.images.data import IMAGENET_CLASSES, TrainingData, open_data, validation_samples
from stoker.tasks.images.layouts.imagenet import TRAIN_IMAGES, VAL_IMAGES

# Per byte of float input: 30 for the smallest timm networks, 150 for ResNet-50.
MOST_ACTIVATIONS = 200


def step_input(config: Config) -> StepInput:
    """What the network of a config takes in a step."""
    return StepInput(
        size=f"{config.img_size} px",
        fix="another img_size= or model=; `python -c 'import timm; print(timm.list_models())'` lists them",
        values=3 * config.img_size**2,
        activations=MOST_ACTIVATIONS,
    )


def epoch_length(config: HostConfig, data: TrainingData | None) -> EpochLength:
    """Steps of an epoch; of ImageNet, or of the chosen part of it, if there is no data."""
    ranks, assumed = config.devices * config.num_nodes, None
    if data is not None:
        train, val = len(data.train), None if data.val is None else len(data.val)
    else:
        assumed, classes = "ImageNet's counts", config.subset_classes or IMAGENET_CLASSES
        train, val = (
            min(images * classes // IMAGENET_CLASSES, classes * per_class if per_class else images)
            for images, per_class in (
                (TRAIN_IMAGES, config.subset_train_per_class),
                (VAL_IMAGES, config.subset_val_per_class),
            )
        )
    val_steps = None
    if val is not None and config.limit_val_batches != 0:
        together = (config.val_batch_size or config.batch_size) * ranks
        val_steps = -(-validation_samples(config, val, ranks) // together)
    return EpochLength(updates_per_epoch(config, train, ranks), val, val_steps, train, assumed)


def random_data(config: HostConfig, folder: Path) -> tuple[TrainingData, HostConfig]:
    """Random images below a folder, opened, and the config for them."""
    from PIL import Image

    generator = np.random.default_rng(config.seed)
    for number in range(max(2, 3 * config.batch_size)):
        path = folder / "images" / "train" / f"class{number % 2}" / f"{number}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        pixels = generator.integers(0, 256, (config.img_size, config.img_size, 3), np.uint8)
        Image.fromarray(pixels).save(path)
    keys = {
        "data_root": str(folder / "images"), "index_dir": str(folder / "index"),
        "num_classes": config.num_classes or config.subset_classes or IMAGENET_CLASSES,
        "subset_classes": None, "subset_train_per_class": None, "subset_val_per_class": None, "decoder": "pillow",
    }  # fmt: skip
    config = config.model_copy(update=keys)
    return open_data(config, lambda _text: None), config
