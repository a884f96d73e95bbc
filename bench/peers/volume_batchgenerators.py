"""nnU-Net's default training transforms (nnunetv2 2.8.1) by batchgeneratorsv2, on memory-mapped float32 volumes.

One process a worker, one thread each, as nnU-Net runs them. For every patch nnU-Net reads what the largest rotation
could need. LABELS=nearest takes the nearest label, as stoker does, instead of interpolating every class.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from bench.peers.serving import Job, serve
from bench.volume_augment import BATCH, patch_of

DEGREES = 30.0
LEAST_SCALE = 0.85
"""What nnU-Net's size of the region to read is computed from; its scales go further."""


def transforms(patch: tuple[int, int, int]) -> Any:
    from batchgeneratorsv2.transforms.intensity.brightness import MultiplicativeBrightnessTransform
    from batchgeneratorsv2.transforms.intensity.contrast import BGContrast, ContrastTransform
    from batchgeneratorsv2.transforms.intensity.gamma import GammaTransform
    from batchgeneratorsv2.transforms.intensity.gaussian_noise import GaussianNoiseTransform
    from batchgeneratorsv2.transforms.noise.gaussian_blur import GaussianBlurTransform
    from batchgeneratorsv2.transforms.spatial.low_resolution import SimulateLowResolutionTransform
    from batchgeneratorsv2.transforms.spatial.mirroring import MirrorTransform
    from batchgeneratorsv2.transforms.spatial.spatial import SpatialTransform
    from batchgeneratorsv2.transforms.utils.compose import ComposeTransforms
    from batchgeneratorsv2.transforms.utils.random import RandomTransform

    angle = float(np.deg2rad(DEGREES))
    labels = {"mode_seg": "nearest"} if os.environ.get("LABELS") == "nearest" else {}
    spatial = SpatialTransform(
        patch, patch_center_dist_from_border=0, random_crop=False, p_rotation=0.2, rotation=(-angle, angle),
        p_scaling=0.2, scaling=(0.7, 1.4), p_synchronize_scaling_across_axes=1, border_mode_seg="constant",
        padding_value_seg=-1, **labels,
    )  # fmt: skip

    def gamma(inverted: float) -> Any:
        return GammaTransform(
            gamma=BGContrast((0.7, 1.5)), p_invert_image=inverted, synchronize_channels=False, p_per_channel=1,
            p_retain_stats=1,
        )  # fmt: skip

    noise = GaussianNoiseTransform(noise_variance=(0, 0.1), p_per_channel=1, synchronize_channels=True)
    blur = GaussianBlurTransform(
        blur_sigma=(0.5, 1.0), synchronize_channels=False, synchronize_axes=False, p_per_channel=0.5, benchmark=True
    )
    brightness = MultiplicativeBrightnessTransform(BGContrast((0.75, 1.25)), synchronize_channels=False)
    contrast = ContrastTransform(BGContrast((0.75, 1.25)), preserve_range=True, synchronize_channels=False)
    low_resolution = SimulateLowResolutionTransform(
        scale=(0.5, 1), synchronize_channels=False, synchronize_axes=True, ignore_axes=None, p_per_channel=0.5
    )
    steps = ((noise, 0.1), (blur, 0.2), (brightness, 0.15), (contrast, 0.15), (low_resolution, 0.25),
             (gamma(1), 0.1), (gamma(0), 0.3))  # fmt: skip
    changes = [RandomTransform(one, apply_probability=chance) for one, chance in steps]
    return ComposeTransforms([spatial, *changes, MirrorTransform(allowed_axes=(0, 1, 2))])


def region_of(patch: tuple[int, int, int]) -> list[int]:
    """What nnU-Net reads for a patch: where its far corner may get by the largest rotation about one axis."""
    cos, sin = np.cos(np.deg2rad(DEGREES)), np.sin(np.deg2rad(DEGREES))
    largest = np.array(patch, float)
    for longer, shorter in ((1, 2), (2, 0), (0, 1)):
        a, b = patch[longer], patch[shorter]
        largest[longer] = max(largest[longer], cos * a + sin * b)
        largest[shorter] = max(largest[shorter], abs(cos * b - sin * a))
    return [int(size / LEAST_SCALE) for size in largest]


class Patches(IterableDataset[tuple[torch.Tensor, torch.Tensor]]):
    """Random patches without end."""

    def __init__(self, job: Job) -> None:
        self.images = sorted((job.images / "float32").glob("*.image.npy"))
        self.patch = patch_of(job.images)

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        torch.set_num_threads(1)
        info = get_worker_info()
        seed = info.seed if info is not None else 0
        np.random.seed(seed % (1 << 32))  # what batchgeneratorsv2 draws from
        random = np.random.default_rng(seed)
        change, region = transforms(self.patch), region_of(self.patch)
        while True:
            path = self.images[random.integers(len(self.images))]
            image = np.load(path, mmap_mode="r")
            label = np.load(path.with_name(path.name.replace(".image.", ".label.")), mmap_mode="r")
            start = [int(random.integers(0, max(1, n - size + 1))) for n, size in zip(image.shape, region, strict=True)]
            box = tuple(slice(a, a + size) for a, size in zip(start, region, strict=True))
            given = {
                "image": torch.from_numpy(np.array(image[box])[None]),
                "segmentation": torch.from_numpy(label[box].astype(np.int16)[None]),
            }
            made = change(**given)
            yield made["image"], made["segmentation"]


def open_stream(job: Job) -> Iterator[int]:
    for images, _ in DataLoader(Patches(job), BATCH, num_workers=job.workers, prefetch_factor=2):
        yield len(images)


if __name__ == "__main__":
    serve(open_stream)
