"""torch_pil without float conversion and normalisation on the CPU: torch's cost when the device does both."""

from __future__ import annotations

from collections.abc import Iterator

from torch.utils.data import DataLoader
from torchvision import transforms
from torchvision.datasets import ImageFolder

from bench.peers.serving import BATCH, SIZE, Job, endless, serve


def open_stream(job: Job) -> Iterator[int]:
    transform = transforms.Compose(
        [transforms.RandomResizedCrop(SIZE), transforms.RandomHorizontalFlip(), transforms.PILToTensor()]
    )
    dataset = ImageFolder(str(job.images), transform)
    loader = DataLoader(dataset, BATCH, shuffle=True, num_workers=job.workers, persistent_workers=True, drop_last=True)
    return endless(lambda: (len(labels) for _, labels in loader))


if __name__ == "__main__":
    serve(open_stream)
