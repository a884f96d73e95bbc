"""Where the samples are and which of them count."""

from __future__ import annotations

from typing import Literal

from stoker.config.field import KeyGroup, key
from stoker.config.units import Bytes


class DataKeys(KeyGroup):
    """Data: where the samples are, and which of them count."""

    task: Literal["classify", "segment3d"] = key("classify")
    """Kind of work: `classify` images in class folders, or `segment3d` patches of volumes."""

    data_root: str | None = key(None, min_length=1)
    """Folder or URL (`s3://bucket/prefix`, also `gs://`, `az://`) that holds `train/` and `val/`,
    as class folders or as packed shards."""

    num_classes: int | None = key(None, ge=1)
    """Number of classes; taken from the data when not given."""

    subset_classes: int | None = key(None, ge=1)
    """Use only so many classes, chosen by `subset_seed`."""

    subset_seed: int = key(42, ge=0)
    """Chooses the classes and images of a subset; the same seed chooses the same ones everywhere."""

    subset_train_per_class: int | None = key(None, ge=1)
    """Use at most so many training images of each class."""

    subset_val_per_class: int | None = key(None, ge=1)
    """Use at most so many validation images of each class."""

    index_dir: str | None = key(None, min_length=1)
    """Folder for the index of the data; beside the data when not given, or in the user's cache folder
    where the data is read-only."""

    cache_dir: str | None = key(None, min_length=1)
    """Local folder that keeps what was read from `data_root`, so that it is fetched only once."""

    cache_size: Bytes | None = key(None, unit="bytes", ge=0)
    """Most that `cache_dir` may hold; what no longer fits is read from the source each time.
    Without it the cache grows up to 90 % of the free disk."""

    lookahead: Bytes = key(256_000_000, unit="bytes", ge=1_000_000)
    """How many bytes of coming samples may be fetched ahead of their turn, for each rank."""

    max_bad_fraction: float = key(0.01, ge=0, le=1)
    """Share of unreadable samples above which the run stops; below it each is replaced and named."""

    max_image_pixels: int = key(178_956_970, unit="pixels", ge=1)
    """Largest image that is decoded; a larger one counts as unreadable (a decompression bomb)."""

    max_image_bytes: Bytes = key(256_000_000, unit="bytes", ge=1)
    """Largest image file that is read; a larger one counts as unreadable."""
