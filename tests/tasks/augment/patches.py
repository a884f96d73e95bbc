"""Batches of patches from made-up regions, as a loader would hand them over."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from stoker.loader.rng import sample_keys
from stoker.tasks.volumes.formats.volume import Shape
from stoker.tasks.volumes.patches.patch_collate import PatchBatch, RowLayout
from stoker.tasks.volumes.patches.patches import Transform, TransformRange, draw_transforms

PATCH = (10, 12, 14)


def keys_for(samples: int, seed: int = 0) -> Any:
    return sample_keys(seed, 0, np.arange(samples), np.zeros(samples, np.int64))


def batch_of(
    transforms: list[Transform],
    *,
    patch: Shape = PATCH,
    image: str = "uint8",
    label: str = "uint8",
    channels: int = 1,
    keys: Any = None,
) -> PatchBatch:
    """A batch whose regions are random."""
    samples = len(transforms)
    keys = keys_for(samples) if keys is None else keys
    start = (3, 4, 5)
    regions = [transform.region(patch, start) for transform in transforms]
    layout = RowLayout(channels, image, label, max(region.voxels for region in regions))
    rows = np.zeros((samples, layout.row_bytes), np.uint8)
    for row, region, key in zip(rows, regions, keys, strict=True):
        random = np.random.default_rng(int(key))
        image_part, label_part = layout.parts(row, region.shape)
        image_part[...] = random.integers(0, 200, image_part.shape)
        label_part[...] = random.integers(0, 3, label_part.shape)
    return PatchBatch(
        images=torch.from_numpy(rows), layout=layout, patch=patch,
        shapes=np.array([region.shape for region in regions]),
        orders=np.array([one.order for one in transforms]), flips=np.array([one.flips for one in transforms]),
        plain=np.array([one.is_plain for one in transforms]), matrices=np.array([one.matrix for one in transforms]),
        offsets=np.array([one.offset(patch, start, region) for one, region in zip(transforms, regions, strict=True)]),
        elastic=np.array([one.elastic for one in transforms]),
        cases=np.arange(samples), starts=np.tile(start, (samples, 1)), valid=np.ones(samples, bool), keys=keys,
        epoch=0, step=0, next_position=samples,
    )  # fmt: skip


def part_of(batch: PatchBatch, slots: list[int]) -> PatchBatch:
    """The same samples in another batch."""
    rows = {name: value[slots] for name, value in vars(batch).items() if isinstance(value, np.ndarray | Tensor)}
    return replace(batch, **rows)


def drawn(samples: int, bounds: TransformRange, patch: Shape = PATCH, seed: int = 0) -> list[Transform]:
    return draw_transforms(keys_for(samples, seed), bounds, patch)


def same(tensor: Tensor) -> Tensor:
    """The copy to a device that is the host."""
    return tensor
