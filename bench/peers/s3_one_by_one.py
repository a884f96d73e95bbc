"""A common setup: torch's DataLoader, whose workers read one object at a time and decode it with PIL."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from typing import Any

from obstore.store import S3Store, from_url
from PIL import Image
from torch.utils.data import DataLoader, Dataset
from torchvision import transforms

from bench.peers.serving import BATCH, MEAN, SIZE, STD, Job, endless, serve

TRANSFORM = transforms.Compose(
    [
        transforms.RandomResizedCrop(SIZE),
        transforms.RandomHorizontalFlip(),
        transforms.ToTensor(),
        transforms.Normalize(MEAN, STD),
    ]
)


class Objects(Dataset[tuple[Any, int]]):
    """Reads and decodes one object per sample."""

    def __init__(self, url: str, names: list[str]) -> None:
        self.url = url
        self.names = names
        self.store: Any = None

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, number: int) -> tuple[Any, int]:
        if self.store is None:
            store = from_url(self.url, client_options={"allow_http": True})
            assert isinstance(store, S3Store)
            self.store = store
        data = bytes(self.store.get(self.names[number]).bytes())
        return TRANSFORM(Image.open(io.BytesIO(data)).convert("RGB")), 0


def open_stream(job: Job) -> Iterator[int]:
    names = sorted(str(path.relative_to(job.images)) for path in job.images.rglob("*") if path.is_file())
    loader = DataLoader(
        Objects(os.environ["OBJECTS_URL"], names),
        BATCH,
        shuffle=True,
        num_workers=job.workers,
        persistent_workers=True,
        multiprocessing_context="spawn",
    )
    return endless(lambda: (len(labels) for _, labels in loader))


if __name__ == "__main__":
    serve(open_stream)
