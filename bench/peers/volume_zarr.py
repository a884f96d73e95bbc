"""A torch DataLoader with zarr-python: a process a worker, random patches of image and label as uint8."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import zarr
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from bench.peers.volume_serving import VolumeJob, serve_volumes


class Patches(IterableDataset[tuple[torch.Tensor, torch.Tensor]]):
    """Endless random patches of random volumes; an array is opened once in each worker."""

    def __init__(self, job: VolumeJob) -> None:
        self.job = job

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        worker = get_worker_info()
        random = np.random.default_rng(worker.id if worker else 0)
        opened: dict[int, list[Any]] = {}
        while True:
            number = int(random.integers(self.job.volumes))
            if number not in opened:
                files = [self.job.data / f"{number}.{kind}.zarr" for kind in ("image", "label")]
                opened[number] = [zarr.open_array(file, mode="r") for file in files]
            image, label = opened[number]
            start = [
                random.integers(size - length + 1) for size, length in zip(image.shape, self.job.patch, strict=True)
            ]
            box = tuple(slice(a, a + length) for a, length in zip(start, self.job.patch, strict=True))
            yield torch.from_numpy(image[box]), torch.from_numpy(label[box])


def open_stream(job: VolumeJob) -> Iterator[int]:
    loader = DataLoader(Patches(job), job.batch, num_workers=job.workers)
    return (len(image) for image, _ in loader)


if __name__ == "__main__":
    serve_volumes(open_stream)
