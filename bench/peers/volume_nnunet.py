"""nnU-Net's own data set, read as nnU-Net's loader reads it (nnunetv2 2.8.1), without its transforms.

One process a worker. For every patch the region that the largest rotation could need is read and decompressed, image as
float32 and label as int16. What leaves the worker is the patch, as after nnU-Net's spatial transform.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from acvl_utils.cropping_and_padding.bounding_boxes import crop_and_pad_nd  # type: ignore[import-not-found]
from nnunetv2.training.data_augmentation.compute_initial_patch_size import (  # type: ignore[import-not-found]
    get_patch_size,
)
from nnunetv2.training.dataloading.nnunet_dataset import (  # type: ignore[import-not-found]
    comp_blosc2_params,
    nnUNetDatasetBlosc2,
)
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from bench.peers.volume_serving import VolumeJob, serve_volumes

DEGREES = 30.0
SCALES = (0.85, 1.25)
"""What nnU-Net computes the size of the region from."""


def initial_patch(patch: tuple[int, int, int]) -> tuple[int, int, int]:
    """The region that nnU-Net reads for a patch."""
    angle = np.deg2rad(DEGREES)
    z, y, x = get_patch_size(np.array(patch), *[(-angle, angle)] * 3, SCALES)
    return int(z), int(y), int(x)


def write_cases(job: VolumeJob) -> None:
    """The volumes as nnU-Net preprocesses and stores them: normalised float32, in its own chunks and compression."""
    for number in range(job.volumes):
        if (job.data / f"{number}.pkl").exists():
            continue
        job.data.mkdir(exist_ok=True)
        image, label = (np.load(job.root / "source" / f"{number}.{kind}.npy") for kind in ("image", "label"))
        normalised = ((image.astype(np.float32) - image.mean()) / image.std())[None]
        segmentation = label.astype(np.int8)[None]
        blocks, chunks = comp_blosc2_params(normalised.shape, job.patch, normalised.itemsize)
        blocks_seg, chunks_seg = comp_blosc2_params(segmentation.shape, job.patch, segmentation.itemsize)
        nnUNetDatasetBlosc2.save_case(
            normalised, segmentation, {}, str(job.data / str(number)), chunks=chunks, blocks=blocks,
            chunks_seg=chunks_seg, blocks_seg=blocks_seg,
        )  # fmt: skip


class Patches(IterableDataset[tuple[torch.Tensor, torch.Tensor]]):
    """Endless random patches of random cases."""

    def __init__(self, job: VolumeJob) -> None:
        self.job = job

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        torch.set_num_threads(1)
        worker = get_worker_info()
        random = np.random.default_rng(worker.id if worker else 0)
        data = nnUNetDatasetBlosc2(str(self.job.data))
        patch = self.job.patch
        region = initial_patch(patch)
        spare = [wide - length for wide, length in zip(region, patch, strict=True)]
        middle = tuple(slice(more // 2, more // 2 + length) for more, length in zip(spare, patch, strict=True))
        while True:
            image, label, _, _ = data.load_case(str(random.integers(self.job.volumes)))
            # A region may stick out of the volume by half of what it is larger than the patch.
            low = [-(more // 2) for more in spare]
            high = [
                size + more // 2 + more % 2 - wide
                for size, more, wide in zip(image.shape[1:], spare, region, strict=True)
            ]
            start = [int(random.integers(a, max(a, b) + 1)) for a, b in zip(low, high, strict=True)]
            box: Any = [[a, a + wide] for a, wide in zip(start, region, strict=True)]
            image = torch.from_numpy(crop_and_pad_nd(image, box, 0)).float()
            label = torch.from_numpy(crop_and_pad_nd(label, box, -1, cast_cropped_to=np.int16)).to(torch.int16)
            yield image[:, *middle], label[:, *middle]


def open_stream(job: VolumeJob) -> Iterator[int]:
    write_cases(job)
    loader = DataLoader(Patches(job), job.batch, num_workers=job.workers)
    return (len(image) for image, _ in loader)


if __name__ == "__main__":
    serve_volumes(open_stream)
