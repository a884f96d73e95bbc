"""A checkpoint's model at work: `stoker predict` for images from anywhere, and `stoker export`."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from stoker.config import Config
from stoker.core.console import Advance, Answer, progress_bar, say, shown
from stoker.core.errors import UserError
from stoker.tasks.export_formats import CPU, Exportable, exportable
from stoker.tasks.images.augment.pipeline import EvalPrepare
from stoker.tasks.images.classify import colours_of, eval_prepare
from stoker.tasks.images.data import (
    choose_decoding,
    decoding_with,
    open_loader,
    validation_interpolation,
    validation_plan,
    validation_view,
)
from stoker.tasks.images.decode.headers import BadImage
from stoker.tasks.images.image_loader import ImageBatch
from stoker.tasks.images.layouts.class_folders import IMAGE_SUFFIXES
from stoker.tasks.images.layouts.sample_index import SampleSet
from stoker.tasks.images.models import TrainedImageModel, open_model
from stoker.train.compute import Precision, set_matmul_precision

DEFAULT_TOP = 5
LARGEST_BATCH = 32
_SUFFIXES = tuple(os.fsdecode(suffix) for suffix in IMAGE_SUFFIXES)


@dataclass(frozen=True)
class Classifier:
    """A model on its device, classifying images exactly as validation does."""

    model: nn.Module
    device: torch.device
    prepare: EvalPrepare
    precision: Precision

    @torch.inference_mode()
    def logits(self, images_nhwc: Tensor) -> Tensor:
        """The scores (images, outputs) in float32, on the device, for bytes (images, height, width, 3)."""
        inputs = self.prepare(images_nhwc.to(self.device, non_blocking=True))
        with self.precision.autocast():
            logits: Tensor = self.model(inputs)
        return logits.float()


def classifier_of(restored: TrainedImageModel, device: torch.device | None = None) -> Classifier:
    """The restored model on the GPU if there is one, in the config's precision."""
    device = device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
    set_matmul_precision(restored.config.matmul_precision)
    prepare = eval_prepare(restored.config, colours_of(restored.model), device)
    return Classifier(restored.model.to(device), device, prepare, Precision(restored.config.precision, device))


def predict(checkpoint: Path, data: Sequence[str], settings: Sequence[str], *, raw: bool, top: int | None) -> Answer:
    """The most probable classes of each image, in the order of the paths; a folder stands for all images below it."""
    restored = open_model(checkpoint, settings, raw=raw, say=say)
    with progress_bar("predicting", None, unit="images") as advance:
        images, bad = _predict_images(restored, [Path(one) for one in data], top or DEFAULT_TOP, advance)
    for path, reason in bad:
        say(f"bad image: {path}: {reason}")
    document = {
        "checkpoint": str(restored.path),
        "weights": "averaged" if restored.averaged else "raw",
        "images": [
            {"path": path, "top": [{"class": name, "probability": value} for name, value in guesses]}
            for path, guesses in images
        ],
        "bad": [{"path": path, "reason": reason} for path, reason in bad],
    }
    parts = ["\n".join([path, *(f"  {value:7.2%}  {name}" for name, value in guesses)]) for path, guesses in images]
    return Answer("\n\n".join(parts), document, complete=not bad)


def _predict_images(
    restored: TrainedImageModel, paths: Sequence[Path], top: int, progress: Advance
) -> tuple[list[tuple[str, list[tuple[str, float]]]], list[tuple[str, str]]]:
    """Each readable image with its most probable classes, and the unreadable ones with the reason."""
    bad: list[tuple[str, str]] = []
    files = list(_files_of(paths, bad))
    classifier = classifier_of(restored)
    names = tuple(map(shown, restored.classes))
    found = []
    with ThreadPoolExecutor(max(1, restored.config.num_workers)) as pool:
        for start in range(0, len(files), LARGEST_BATCH):
            part = files[start : start + LARGEST_BATCH]
            good: list[tuple[Path, NDArray[np.uint8]]] = []
            for path, image in [(path, pool.submit(load_image, path, restored.config)) for path in part]:
                try:
                    good.append((path, image.result()))
                except BadImage as error:
                    bad.append((shown(str(path)), error.reason))
            if good:
                logits = classifier.logits(torch.from_numpy(np.stack([image for _, image in good])))
                # A network trained with `bce` scores each class on its own: the scores need not add up to one.
                scores = logits.sigmoid() if restored.config.loss == "bce" else logits.softmax(dim=1)
                values, classes = (part.tolist() for part in scores.topk(min(top, len(names)), dim=1))
                for (path, _), row, numbers in zip(good, values, classes, strict=True):
                    found.append((shown(str(path)), list(zip([names[number] for number in numbers], row, strict=True))))
            progress(start + len(part), len(files))
    return found, bad


def predicted_classes(
    trained: TrainedImageModel, samples: SampleSet, members: NDArray[np.int64], until_s: float
) -> NDArray[np.int64]:
    """Counts (class, output) over these members of a split in their order, as many as time allows."""
    indices, labels = samples.indices(members), samples.labels(members).astype(np.int32)
    chosen = SampleSet(samples.index, samples.classes, indices, labels)
    counts = np.zeros((len(samples.classes), len(trained.classes)), np.int64)
    small = replace(trained, config=trained.config.model_copy(update={"val_batch_size": LARGEST_BATCH}))
    for batch, whole, logits in classified(small, chosen):
        guesses = logits.argmax(1).cpu().numpy()
        np.add.at(counts, (batch.labels[whole], guesses[whole]), 1)
        if time.monotonic() > until_s:
            break
    return counts


def classified(
    trained: TrainedImageModel, samples: SampleSet
) -> Iterator[tuple[ImageBatch, NDArray[np.bool_], Tensor]]:
    """The samples once, in order: each batch, which of its images are not in place of a bad one, and their scores."""
    config, classifier = trained.config, classifier_of(trained)
    decoding, _ = choose_decoding(config, samples.index)
    loader = open_loader(config, validation_plan(config, samples, decoding), workers=config.num_workers)
    try:
        for batch in loader.epoch(0):
            yield batch, ~np.isin(batch.indices, [bad.index for bad in batch.bad]), classifier.logits(batch.images)
    finally:
        loader.close()


def load_image(path: Path, config: Config) -> NDArray[np.uint8]:
    """The image as validation sees it (height, width, 3); raises BadImage."""
    try:
        if not path.is_file():
            raise BadImage("no such file" if not path.exists() else "neither a file nor a folder")
        size = path.stat().st_size
        if size > config.max_image_bytes:
            raise BadImage(f"{size:,} bytes; max_image_bytes allows {config.max_image_bytes:,}")
        data = path.read_bytes()
    except OSError as error:
        raise BadImage(error.strerror or str(error)) from None
    # At full scale every decoder gives Pillow's pixels, and Pillow reads every format.
    view = validation_view(config, decoding_with(config))
    out = np.empty((view.size, view.size, 3), np.uint8)
    view.decode(data, None, 0, out)
    return out


def images_below(folder: Path) -> Iterator[Path]:
    """Every file below a folder that is named like an image, sorted within each folder, without hidden ones."""
    for where, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(names):
            if name.lower().endswith(_SUFFIXES) and not name.startswith("."):
                yield Path(where, name)


def _files_of(paths: Sequence[Path], bad: list[tuple[str, str]]) -> Iterator[Path]:
    for path in paths:
        if not path.is_dir():
            yield path
            continue
        empty = True
        for file in images_below(path):
            empty = False
            yield file
        if empty:
            bad.append((shown(str(path)), "a folder without images"))


def export(checkpoint: Path, settings: Sequence[str], *, image: Path | None, raw: bool) -> Exportable:
    """A network that takes normalised images (batch, 3, size, size)."""
    restored = open_model(checkpoint, settings, raw=raw, say=say)
    config, size = restored.config, restored.size
    mean, std = colours_of(restored.model)
    about = {
        "classes": list(restored.classes),
        "mean": list(mean),
        "std": list(std),
        "img_size": size,
        "crop_ratio": config.crop_ratio,
        "interpolation": validation_interpolation(config),
        "probabilities": "sigmoid" if config.loss == "bce" else "softmax",
    }
    return exportable(restored, "images", (3, size, size), (3, 1), about, _real_image(restored, image))


def _real_image(restored: TrainedImageModel, image: Path | None) -> tuple[str, Tensor] | None:
    """The given image, or the first readable one of the data that the model was trained on."""
    root = restored.config.data_root
    candidates: Iterator[Path] = iter(())
    if image is not None:
        candidates = iter([image])
    elif root is not None and "://" not in root:
        candidates = images_below(Path(root).expanduser())
    for path in candidates:
        try:
            pixels = torch.from_numpy(load_image(path, restored.config))[None]
            return path.name, classifier_of(restored, CPU).prepare(pixels)
        except BadImage as error:
            if image is not None:
                raise UserError("image-unreadable", f"{path}: {error.reason}", hint="--image FILE.jpg") from None
    return None
