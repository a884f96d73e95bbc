"""LitData reading its own chunks of the original files, decoded with PIL."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import litdata  # type: ignore[import-not-found]
from PIL import Image
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


class Images(litdata.StreamingDataset):  # type: ignore[misc]
    """Decodes the images in the chunks."""

    def __getitem__(self, number: int) -> tuple[Any, int]:
        sample = super().__getitem__(number)
        return TRANSFORM(Image.open(io.BytesIO(sample["image"])).convert("RGB")), sample["label"]


def read(item: tuple[str, int]) -> dict[str, Any]:
    return {"image": Path(item[0]).read_bytes(), "label": item[1]}


def open_stream(job: Job) -> Iterator[int]:
    chunks = job.work / "litdata"
    if not (chunks / "index.json").exists():
        files = sorted(path for path in job.images.rglob("*") if path.is_file())
        classes = {name: number for number, name in enumerate(sorted({path.parent.name for path in files}))}
        items = [(str(path), classes[path.parent.name]) for path in files]
        litdata.optimize(fn=read, inputs=items, output_dir=str(chunks), num_workers=2, chunk_bytes="16MB")
    loader = litdata.StreamingDataLoader(
        Images(str(chunks), shuffle=True), batch_size=BATCH, num_workers=job.workers, persistent_workers=True
    )
    return endless(lambda: (len(labels) for _, labels in loader))


if __name__ == "__main__":
    serve(open_stream)
