"""How batches are made and handed over."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from stoker.config.field import KeyGroup, key


class LoaderKeys(KeyGroup):
    """Loader: how batches are made and handed over."""

    loader: Literal["auto", "process", "thread"] = key("auto")
    """Workers as processes or as threads; `auto` takes threads for up to six workers, processes for more."""

    num_workers: Annotated[int, Field(ge=0, le=4096)] | Literal["auto"] = key("auto")
    """Workers that make batches, for each GPU; `auto` takes the cores this process may use; 0 makes
    the batches in the training process."""

    prefetch_factor: int | None = key(None, unit="batches", ge=1, le=1024)
    """Batches that each worker has in flight; 2 when not given. Needs workers."""

    pin_memory: bool = key(True)
    """Hand batches over in page-locked memory, from which a GPU copies without the CPU."""

    persistent_workers: bool = key(True)
    """Keep the workers from one epoch to the next. Has no meaning without workers."""

    worker_start: Literal["auto", "fork", "spawn", "forkserver"] = key("auto")
    """How worker processes start; `auto` is forkserver where available."""

    decoder: Literal["auto", "turbojpeg", "simplejpeg", "nvimgcodec", "opencv", "pillow"] = key("auto")
    """Library that decodes JPEGs; `auto` measures them on the data's own files and remembers.
    `turbojpeg` needs libturbojpeg 3 (`pip install stoker[fast]`, or conda's)."""

    decode_mode: Literal["fast", "faithful"] = key("fast")
    """Training images: `fast` decodes only what the crop needs; `faithful` decodes and resizes as
    torchvision does. Validation is always faithful."""

    seed: int = key(0, ge=0, lt=2**63)
    """Fixes the order of the samples, every augmentation and the initial weights."""
