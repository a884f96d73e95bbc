"""What a plan needs to know about a run over images: how many and how large they are, and what loading them takes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from stoker.config import Config
from stoker.core.console import Advance
from stoker.core.errors import StokerError
from stoker.profile.datasheets import PACKING_SPEEDUP
from stoker.tasks.images.classify import traceable_step
from stoker.tasks.images.data import IMAGENET_CLASSES, open_samples
from stoker.tasks.images.layouts.sample_index import SampleSet
from stoker.tasks.plan_facts import DataFacts, LoaderFigures
from stoker.train.step import TraceableStep

IMAGENET_SAMPLES = 1_281_167
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
    """Facts about images."""

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
        classes = config.num_classes or config.subset_classes or IMAGENET_CLASSES
        count, stored = samples or _images_of_imagenet(config, classes), None
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


def _images_of_imagenet(config: Config, classes: int) -> int:
    count = IMAGENET_SAMPLES
    if config.subset_classes is not None:
        count = IMAGENET_SAMPLES * config.subset_classes // IMAGENET_CLASSES
    if config.subset_train_per_class is not None:
        count = min(count, classes * config.subset_train_per_class)
    return count


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
