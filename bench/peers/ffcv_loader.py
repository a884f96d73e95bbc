"""FFCV reading its own file format: every image re-encoded to at most 500 px at quality 90; batches of bytes."""

from __future__ import annotations

from collections.abc import Iterator

from ffcv.fields import IntField, RGBImageField  # type: ignore[import-not-found]
from ffcv.fields.basics import IntDecoder  # type: ignore[import-not-found]
from ffcv.fields.rgb_image import RandomResizedCropRGBImageDecoder  # type: ignore[import-not-found]
from ffcv.loader import Loader, OrderOption  # type: ignore[import-not-found]
from ffcv.transforms import RandomHorizontalFlip, Squeeze, ToTensor, ToTorchImage  # type: ignore[import-not-found]
from ffcv.writer import DatasetWriter  # type: ignore[import-not-found]
from torchvision.datasets import ImageFolder

from bench.peers.serving import BATCH, SIZE, Job, endless, serve


def open_stream(job: Job) -> Iterator[int]:
    beton = job.work / "images.beton"
    if not beton.exists():
        field = RGBImageField(write_mode="jpg", max_resolution=500, jpeg_quality=90)
        writer = DatasetWriter(str(beton), {"image": field, "label": IntField()}, num_workers=2)
        writer.from_indexed_dataset(ImageFolder(str(job.images)), chunksize=50)
    loader = Loader(
        str(beton),
        batch_size=BATCH,
        num_workers=job.workers,
        order=OrderOption.RANDOM,
        os_cache=True,
        drop_last=True,
        pipelines={
            "image": [
                RandomResizedCropRGBImageDecoder((SIZE, SIZE)),
                RandomHorizontalFlip(),
                ToTensor(),
                ToTorchImage(),
            ],
            "label": [IntDecoder(), ToTensor(), Squeeze()],
        },
    )
    return endless(lambda: (len(labels) for _, labels in loader))


if __name__ == "__main__":
    serve(open_stream)
