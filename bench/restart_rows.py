"""Packs with and without `--restart-rows`, from the same images: bytes read, time to decode a crop, images/s.

Longest side 500 px, quality 90, random 224 px crops with ImageNet's bounds. Bytes and images/s are those of the loader
with two workers and a warm page cache. Decoding is timed on one core: the crop's pixels in memory, from a whole file or
from the bytes of its rows. The pixels of both are compared for every crop.
"""

from __future__ import annotations

import argparse
import itertools
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from bench.paced import consume
from bench.quiet import wait_for_quiet
from bench.rounds import Spread, interleave, keep, ratio
from stoker.config import load_config
from stoker.data.draws import sample_keys
from stoker.data.images.crops import CropRange, RandomCrop, draw_crops
from stoker.data.images.decoders import PILLOW, available_decoders, load_decoder
from stoker.data.images.decoding import MAX_PIXELS, Decoding
from stoker.data.images.headers import Box, read_header
from stoker.data.images.row_index import RowIndex, open_row_index, span_of
from stoker.data.images.sample_index import SampleIndex, load_index
from stoker.data.loader import ImageLoader
from stoker.data.store.stores import LocalStore
from stoker.machine.loader_speed import repeated
from stoker.tasks.image_data import open_loader, open_samples, training_plan

PROJECT = Path(__file__).parents[1]
SIZE, BATCH = 224, 64
PLAIN, ROWS = "packed", "packed with --restart-rows"
HOW = ("--longest", "500", "--quality", "90")
SETTLING_S = 3.0


@dataclass(frozen=True)
class Pack:
    """A pack whose bytes are in memory, with one crop for each sample."""

    folder: Path
    index: SampleIndex
    files: list[bytes]
    boxes: list[Box]
    rows: RowIndex | None
    read: list[tuple[int, bytes, Box]]
    """With rows: the number of what is read for a crop, its bytes, and the part that is needed."""


def pack(images: Path, target: Path, *options: str) -> Path:
    command = [sys.executable, "-m", "stoker", "pack", str(images), str(target), *HOW, *options]
    subprocess.run(command, check=True, stdout=sys.stderr, cwd=PROJECT)
    return target


def open_pack(folder: Path, view: RandomCrop, most: int) -> Pack:
    index = load_index(folder)
    count, store = min(len(index), most), LocalStore(folder)
    files = [bytes(store.read(*index.location(sample))) for sample in range(count)]
    draws = draw_crops(sample_keys(0, 0, np.arange(count), np.zeros(count, np.int64)), CropRange())
    sizes = [read_header(data, MAX_PIXELS) for data in files]
    boxes = [draws.box(slot, header.width, header.height) for slot, header in enumerate(sizes)]
    rows, read = open_row_index(index), []
    if rows is not None:
        numbers, needed = rows.wanted(np.arange(count), partial(view.needed, draws))
        for number, data, box in zip(numbers.tolist(), files, needed, strict=True):
            start, size = rows.range_in_sample(span_of(number))
            assert box is not None
            read.append((number, data[start : start + size], box))
    return Pack(folder, index, files, boxes, rows, read)


def decode_whole(pack: Pack, decoder: str, slot: int) -> NDArray[np.uint8]:
    data = pack.files[slot]
    return load_decoder(decoder).region(data, read_header(data, MAX_PIXELS), pack.boxes[slot], 1)


def decode_rows(pack: Pack, decoder: str, slot: int) -> NDArray[np.uint8]:
    assert pack.rows is not None
    number, data, needed = pack.read[slot]
    part, box = pack.rows.part(number, data, needed), pack.boxes[slot]
    inside = Box(box.top - part.top, box.left - part.left, box.height, box.width)
    return load_decoder(decoder).region(part.data, part.header, inside, 1)


def unequal(pack: Pack, decoder: str) -> int:
    """Crops whose pixels differ from those that Pillow decodes from the whole file."""
    wrong = 0
    for slot, data in enumerate(pack.files):
        wanted = PILLOW.region(data, read_header(data, MAX_PIXELS), pack.boxes[slot], 1)
        wrong += not np.array_equal(decode_rows(pack, decoder, slot), wanted)
    return wrong


def microseconds(count: int, work: Callable[[int], object]) -> float:
    start = time.process_time()  # CPU time, which neighbours on the same cores disturb less than wall time
    for slot in range(count):
        work(slot)
    return (time.process_time() - start) / count * 1e6


def throughput(loader: ImageLoader, epochs: itertools.count[int], seconds: float) -> float:
    """Images/s of an epoch that never ends."""
    wait_for_quiet(SETTLING_S)
    return consume(loader, next(epochs), seconds, 0.0)


def loader_of(folder: Path, work: Path, decoder: str, samples_per_epoch: int | None) -> ImageLoader:
    """The loader of a pack with two workers; an epoch can be made as long as one likes."""
    words = [f"data_root={folder}", f"batch_size={BATCH}", f"img_size={SIZE}", f"index_dir={work}", "pin_memory=false"]
    config = load_config(None, words).config
    samples = open_samples(config, "")
    if samples_per_epoch is not None:
        samples = repeated(samples, samples_per_epoch)
    return open_loader(config, training_plan(config, samples, Decoding(decoder)), workers=2)


def bytes_per_image(folder: Path, work: Path, epochs: int) -> Spread:
    """Bytes that the loader reads for an image, in each of some epochs."""
    loader = loader_of(folder, work, "simplejpeg", None)
    found = []
    try:
        for epoch in range(epochs):
            batches = list(loader.epoch(epoch))
            found.append(sum(batch.cost.bytes_read for batch in batches) / sum(map(len, batches)))
    finally:
        loader.close()
    return Spread(tuple(found))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("images", type=Path, help="folder of class folders with real images")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--files", type=int, default=300)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="stoker-bench-") as name:
        work = Path(name)
        folders = {PLAIN: pack(arguments.images, work / "plain"),
                   ROWS: pack(arguments.images, work / "rows", "--restart-rows")}  # fmt: skip
        view = RandomCrop(SIZE, CropRange(), Decoding())
        packs = {name: open_pack(folder, view, arguments.files) for name, folder in folders.items()}
        decoding = measure_decoding(packs, arguments.rounds)
        times = decoding["microseconds"]
        fastest = min(available_decoders(), key=lambda decoder: times[f"{decoder}, {PLAIN}"]["median"])
        loading = measure_loading(folders, work, fastest, arguments.rounds, arguments.seconds)
    document = {
        "size": SIZE, "workers": 2, "images": len(packs[PLAIN].index), "pack_bytes": sizes_of(packs),
        "decoding": decoding, "loading": loading,
    }  # fmt: skip
    print(f"wrote {keep('restart_rows', document)}")
    return 0


def sizes_of(packs: dict[str, Pack]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, pack in packs.items():
        assert pack.index.sizes is not None
        found[name] = int(pack.index.sizes.sum())
    found["ratio"] = round(found[ROWS] / found[PLAIN], 4)
    print(f"bytes of all images: {found['ratio']:.3f}x")
    return found


def measure_decoding(packs: dict[str, Pack], rounds: int) -> dict[str, Any]:
    plain, rows = packs[PLAIN], packs[ROWS]
    measures: dict[str, Callable[[], float]] = {}
    document: dict[str, Any] = {"files": len(plain.files), "unequal_crops": {}, "microseconds": {}, "speed": {}}
    decoders = available_decoders()
    for decoder in decoders:
        document["unequal_crops"][decoder] = unequal(rows, decoder)
        measures[f"{decoder}, {PLAIN}"] = partial(microseconds, len(plain.files), partial(decode_whole, plain, decoder))
        measures[f"{decoder}, {ROWS}"] = partial(microseconds, len(rows.files), partial(decode_rows, rows, decoder))
    spreads = interleave(measures, rounds)
    document["microseconds"] = {name: spread.as_dict() for name, spread in spreads.items()}
    for decoder in decoders:
        speed = ratio(spreads[f"{decoder}, {PLAIN}"], spreads[f"{decoder}, {ROWS}"])
        document["speed"][decoder] = speed.as_dict()
        print(f"decoding with {decoder}: {_worded(speed)}, {document['unequal_crops'][decoder]} unequal crops")
    return document


def measure_loading(folders: dict[str, Path], work: Path, decoder: str, rounds: int, seconds: float) -> dict[str, Any]:
    loaders = {name: loader_of(folder, work / "index", decoder, 200_000) for name, folder in folders.items()}
    epochs = itertools.count()
    try:
        spreads = interleave(
            {name: partial(throughput, loader, epochs, seconds) for name, loader in loaders.items()}, rounds
        )
    finally:
        for loader in loaders.values():
            loader.close()
    per_image = {name: bytes_per_image(folder, work / "index", rounds) for name, folder in folders.items()}
    speed, share = ratio(spreads[ROWS], spreads[PLAIN]), ratio(per_image[ROWS], per_image[PLAIN])
    print(f"images/s: {_worded(speed)}\nbytes read: {_worded(share)}")
    return {
        "decoder": decoder,
        "images_per_second": {name: spread.as_dict() for name, spread in spreads.items()},
        "bytes_per_image": {name: spread.as_dict() for name, spread in per_image.items()},
        "speed": speed.as_dict(),
        "bytes_ratio": share.as_dict(),
    }


def _worded(spread: Spread) -> str:
    return f"{spread.median:.3f}x ({min(spread.values):.3f}-{max(spread.values):.3f})"


if __name__ == "__main__":
    sys.exit(main())
