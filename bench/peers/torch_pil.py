"""torch's DataLoader with PIL and torchvision, as in the official examples."""

from __future__ import annotations

from collections.abc import Iterator

from torch.utils.data import DataLoader
from torchvision import transforms
from torchvision.datasets import ImageFolder

from bench.peers.serving import BATCH, MEAN, SIZE, STD, Job, endless, serve


def open_stream(job: Job) -> Iterator[int]:
    transform = transforms.Compose(
        [
            transforms.RandomResizedCrop(SIZE),
            transforms.RandomHorizontalFlip(),
            transforms.ToTensor(),
            transforms.Normalize(MEAN, STD),
        ]
    )
    loader = DataLoader(
        ImageFolder(str(job.images), transform),
        BATCH,
        shuffle=True,
        num_workers=job.workers,
        persistent_workers=True,
        drop_last=True,
    )
    return endless(lambda: (len(labels) for _, labels in loader))


if __name__ == "__main__":
    serve(open_stream)
