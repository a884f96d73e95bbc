"""timm's loader: PIL in the workers, bytes up to the collated batch."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from timm.data import create_dataset, create_loader

from bench.peers.serving import BATCH, SIZE, Job, endless, serve


def open_stream(job: Job) -> Iterator[int]:
    dataset = create_dataset("", root=str(job.images), split="train", is_training=True)
    loader = create_loader(
        dataset,
        (3, SIZE, SIZE),
        BATCH,
        is_training=True,
        use_prefetcher=False,
        num_workers=job.workers,
        hflip=0.5,
        color_jitter=None,
        interpolation="bilinear",
        device=torch.device("cpu"),
        pin_memory=False,
        persistent_workers=True,
    )
    return endless(lambda: (len(labels) for _, labels in loader))


if __name__ == "__main__":
    serve(open_stream)
