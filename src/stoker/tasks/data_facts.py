"""What a plan needs to know of the data: from its index, or stated where the data is not at hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from stoker.config import Config
from stoker.data.index.samples import SampleSet
from stoker.errors import StokerError
from stoker.tasks.image_data import open_samples

IMAGENET_SAMPLES = 1_281_167
IMAGENET_CLASSES = 1000
# MLPerf Storage's figure for an ImageNet file.
IMAGENET_SAMPLE_BYTES = 114_660.0
FILES_LOOKED_AT = 200


@dataclass(frozen=True)
class DataFacts:
    """What a plan needs to know of the data."""

    num_classes: int
    samples: int | None = None
    sample_bytes: float | None = None
    """Of one image as it is stored, on average."""
    assumptions: tuple[str, ...] = ()

    @property
    def dataset_bytes(self) -> float | None:
        return None if self.samples is None or self.sample_bytes is None else self.samples * self.sample_bytes


def data_facts(
    config: Config, samples: int | None, progress: Callable[[int, int | None], None] | None = None
) -> DataFacts:
    """Counts the data of the config where it can be reached from here; `samples` overrides its number.

    A plan is often made far from the data: what cannot be reached is taken for ImageNet, and that is said.
    """
    try:
        found = None if config.data_root is None else open_samples(config, "train", progress=progress)
        reason = "no data_root"
    except StokerError as error:
        found, reason = None, error.seen
    if found is not None:
        stored = _mean_bytes(found)
        said = (
            () if stored is not None else ("an image of 114,660 bytes (MLPerf Storage); the data's own is not known",)
        )
        classes = config.num_classes or len(found.classes)
        return DataFacts(classes, samples or len(found), stored or IMAGENET_SAMPLE_BYTES, said)
    return _stated(config, samples, reason)


def _stated(config: Config, samples: int | None, reason: str) -> DataFacts:
    classes = config.num_classes or config.subset_classes or IMAGENET_CLASSES
    count = samples
    if count is None:
        count = IMAGENET_SAMPLES
        if config.subset_classes is not None:
            count = IMAGENET_SAMPLES * config.subset_classes // IMAGENET_CLASSES
        if config.subset_train_per_class is not None:
            count = min(count, classes * config.subset_train_per_class)
    said = f"data: {count:,} images of 114,660 bytes in {classes} classes, as ImageNet has them ({reason})"
    return DataFacts(classes, count, IMAGENET_SAMPLE_BYTES, (said,))


def _mean_bytes(samples: SampleSet) -> float | None:
    """Of all where the index knows, else of some files spread over it."""
    index, members = samples.index, np.arange(len(samples), dtype=np.int64)
    if index.sizes is not None:
        return float(index.sizes[samples.numbers(members)].mean()) if len(members) else None
    if "://" in index.root:
        return None
    looked_at = members[:: max(1, len(members) // FILES_LOOKED_AT)]
    sizes = []
    for number in samples.numbers(looked_at):
        try:
            sizes.append((Path(index.root) / index.location(int(number)).path).stat().st_size)
        except OSError:
            continue  # named when its turn comes
    return float(np.mean(sizes)) if sizes else None
