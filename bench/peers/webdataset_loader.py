"""WebDataset reading tar shards of the original files, decoded with PIL."""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import Any

import webdataset
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


def decode(sample: tuple[bytes, bytes]) -> tuple[Any, int]:
    return TRANSFORM(Image.open(io.BytesIO(sample[0])).convert("RGB")), int(sample[1])


def open_stream(job: Job) -> Iterator[int]:
    shards = job.work / "webdataset"
    if not shards.exists():
        shards.mkdir(parents=True)
        files = sorted(path for path in job.images.rglob("*") if path.is_file())
        classes = {name: number for number, name in enumerate(sorted({path.parent.name for path in files}))}
        with webdataset.ShardWriter(str(shards / "%06d.tar"), maxcount=100) as writer:
            for number, path in enumerate(files):
                label = str(classes[path.parent.name]).encode()
                writer.write({"__key__": f"{number:06d}", "jpg": path.read_bytes(), "cls": label})
    urls = sorted(str(path) for path in shards.glob("*.tar"))
    dataset = webdataset.WebDataset(urls, shardshuffle=100, empty_check=False).shuffle(1000).to_tuple("jpg", "cls")
    loader = webdataset.WebLoader(
        dataset.map(decode).batched(BATCH), batch_size=None, num_workers=job.workers, persistent_workers=True
    )
    return endless(lambda: (len(labels) for _, labels in loader))


if __name__ == "__main__":
    serve(open_stream)
