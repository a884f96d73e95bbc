"""What `plan` and `verify` need to know about a run over images: how many and how large they are, what loading them
takes, how long an epoch is, and random images to try a step."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from stoker.config import Config
from stoker.core.console import Advance
from stoker.core.errors import StokerError
from stoker.profile.datasheets import PACKING_SPEEDUP
from stoker.profile.host import HostConfig
from stoker.tasks.building import updates_per_epoch
from stoker.tasks.checks import EpochLength, StepInput
from stoker.tasks.images.classify import traceable_step
from stoker.tasks.images.data import TrainingData, open_data, open_samples, validation_samples
from stoker.tasks.images.layouts.imagenet import CLASSES, TRAIN_IMAGES, VAL_IMAGES
from stoker.tasks.images.layouts.sample_index import SampleSet
from stoker.tasks.plan_facts import DataFacts, LoaderFigures
from stoker.train.step import TraceableStep

# MLPerf Storage's figure for an ImageNet file.
IMAGENET_SAMPLE_BYTES = 114_660.0
MOST_FILES_SIZED = 200
# Images per second that one physical core prepares from ImageNet's files at 224 px: 1,256 with two threads on the two
# cores of results/loaders.
IMAGES_PER_CORE_SECOND = 628.0
# Our loader's images per second by those of torch's DataLoader with PIL, same files, same workers (results/loaders).
FASTER_THAN_TORCH = 3.2
FASTER_THAN_TORCH_RANGE = (2.5, 4.1)
# The image size at which it was measured: resizing costs as many pixels as it writes, and decoding comes on top.
MEASURED_AT_PX = 224
# Share of resizing in preparing an image: 285 us next to 660 us for decoding the crop, on one core.
RESIZING_SHARE = 0.3


@dataclass(frozen=True, kw_only=True)
class ImageFacts(DataFacts):
    num_classes: int


def image_facts(config: Config, samples: int | None = None, progress: Advance | None = None) -> ImageFacts:
    """Counts the config's data if it can be reached from here; `samples` overrides the count.

    A plan is often made far from the data: data out of reach is assumed to be ImageNet, and the plan says so.
    """
    found, reason = None, "no data_root"
    try:
        if config.data_root is not None:
            found = open_samples(config, "train", progress=progress)
    except StokerError as error:
        reason = error.seen
    if found is None:
        classes = config.num_classes or config.subset_classes or CLASSES
        count, stored = samples or _of_imagenet(TRAIN_IMAGES, config, classes, config.subset_train_per_class), None
        assumed = f"data: {count:,} images of 114,660 bytes in {classes} classes, as in ImageNet ({reason})"
    else:
        classes = config.num_classes or len(found.classes)
        count, stored = samples or len(found), _mean_bytes(found)
        assumed = "114,660 bytes per image (MLPerf Storage); the real size is unknown"
    return ImageFacts(
        row_bytes=3 * config.img_size**2, val_row_bytes=3 * (config.val_img_size or config.img_size) ** 2,
        samples=count, sample_bytes=stored or IMAGENET_SAMPLE_BYTES, assumptions=() if stored else (assumed,),
        whole_files=True, figures=loader_figures(config.img_size), num_classes=classes,
    )  # fmt: skip


def step_for(config: Config, facts: ImageFacts | None = None) -> TraceableStep:
    """The training step over such images; without facts, over assumed ones."""
    return traceable_step(config, None if facts is None else facts.num_classes)


def loader_figures(size: int) -> LoaderFigures:
    """The published figures, for images of this size."""
    # Decoding hardly depends on the output size; resizing does.
    cost = 1 - RESIZING_SHARE + RESIZING_SHARE * (size / MEASURED_AT_PX) ** 2
    return LoaderFigures(
        IMAGES_PER_CORE_SECOND / cost, "ImageNet's files", FASTER_THAN_TORCH, FASTER_THAN_TORCH_RANGE, PACKING_SPEEDUP
    )


def _of_imagenet(images: int, config: Config, classes: int, per_class: int | None) -> int:
    """How many images of an ImageNet split a subset has."""
    images = images * (config.subset_classes or CLASSES) // CLASSES
    return min(images, classes * per_class) if per_class else images


def _mean_bytes(samples: SampleSet) -> float | None:
    """Over all images if the index knows their sizes, else over some files spread over it."""
    index, members = samples.index, np.arange(len(samples), dtype=np.int64)
    if index.sizes is not None:
        return float(index.sizes[samples.indices(members)].mean()) if len(members) else None
    if "mean_bytes" in index.facts:
        return float(index.facts["mean_bytes"])
    if "://" in index.root:
        return None
    chosen = members[:: max(1, len(members) // MOST_FILES_SIZED)]
    sizes = []
    for number in samples.indices(chosen):
        try:
            sizes.append((Path(index.root) / index.location(int(number)).path).stat().st_size)
        except OSError:
            continue  # reported when training reads it
    return float(np.mean(sizes)) if sizes else None


# Per byte of float input: 30 for the smallest timm networks, 150 for ResNet-50.
MOST_ACTIVATIONS = 200


def step_input(config: Config) -> StepInput:
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
        assumed, classes = "ImageNet's counts", config.subset_classes or CLASSES
        train = _of_imagenet(TRAIN_IMAGES, config, classes, config.subset_train_per_class)
        val = _of_imagenet(VAL_IMAGES, config, classes, config.subset_val_per_class)
    val_steps = None
    if val is not None and config.limit_val_batches != 0:
        together = (config.val_batch_size or config.batch_size) * ranks
        val_steps = -(-validation_samples(config, val, ranks) // together)
    return EpochLength(updates_per_epoch(config, train, ranks), val, val_steps, train, assumed)


def random_data(config: HostConfig, folder: Path) -> tuple[TrainingData, HostConfig]:
    from PIL import Image

    generator = np.random.default_rng(config.seed)
    for number in range(max(2, 3 * config.batch_size)):
        path = folder / "images" / "train" / f"class{number % 2}" / f"{number}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        pixels = generator.integers(0, 256, (config.img_size, config.img_size, 3), np.uint8)
        Image.fromarray(pixels).save(path)
    keys = {
        "data_root": str(folder / "images"), "index_dir": str(folder / "index"),
        "num_classes": config.num_classes or config.subset_classes or CLASSES,
        "subset_classes": None, "subset_train_per_class": None, "subset_val_per_class": None, "decoder": "pillow",
    }  # fmt: skip
    config = config.model_copy(update=keys)
    return open_data(config, lambda _text: None), config
