"""`stoker export` for images: the network of a checkpoint, and a real image to compare its output on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from stoker import __version__
from stoker.core.console import say
from stoker.core.errors import UserError
from stoker.tasks.export_formats import CPU, Exportable
from stoker.tasks.images.classify import colours_of
from stoker.tasks.images.data import validation_interpolation
from stoker.tasks.images.decode.headers import BadImage
from stoker.tasks.images.image_prediction import classifier_of, images_below, load_image
from stoker.tasks.images.trained_model import TrainedImageModel, open_model


def export(checkpoint: Path, settings: Sequence[str], *, image: Path | None, raw: bool) -> Exportable:
    """A network that takes normalised images (batch, 3, size, size)."""
    restored = open_model(checkpoint, settings, raw=raw, say=say)
    inputs, metadata = _inputs(restored, image), _metadata(restored)
    return Exportable(restored.config.model, restored.model, "images", inputs, metadata, restored.path)


def _metadata(restored: TrainedImageModel) -> dict[str, object]:
    """What a program needs to know to use the model."""
    config = restored.config
    mean, std = colours_of(restored.model)
    return {
        "model": config.model,
        "classes": list(restored.classes),
        "mean": list(mean),
        "std": list(std),
        "img_size": restored.size,
        "crop_ratio": config.crop_ratio,
        "interpolation": validation_interpolation(config),
        "probabilities": "sigmoid" if config.loss == "bce" else "softmax",
        "weights": "averaged" if restored.averaged else "raw",
        "epoch": restored.epoch,
        "step": restored.step,
        "stoker": __version__,
    }


def _inputs(restored: TrainedImageModel, image: Path | None) -> dict[str, Tensor]:
    """What is compared: random images, several and one, and a real image if there is one."""
    size = restored.size
    generator = torch.Generator().manual_seed(0)
    inputs = {f"random batch of {count}": torch.randn(count, 3, size, size, generator=generator) for count in (3, 1)}
    real = _real_image(restored, image)
    if real is not None:
        path, pixels = real
        inputs[path.name] = classifier_of(restored, CPU).prepare(pixels)
    return inputs


def _real_image(restored: TrainedImageModel, image: Path | None) -> tuple[Path, Tensor] | None:
    """The given image, or the first readable one of the data that the model was trained on."""
    root = restored.config.data_root
    candidates: Iterator[Path] = iter(())
    if image is not None:
        candidates = iter([image])
    elif root is not None and "://" not in root:
        candidates = images_below(Path(root).expanduser())
    for path in candidates:
        try:
            return path, torch.from_numpy(load_image(path, restored.config))[None]
        except BadImage as error:
            if image is not None:
                raise UserError("image-unreadable", f"{path}: {error.reason}", hint="--image FILE.jpg") from None
    return None
