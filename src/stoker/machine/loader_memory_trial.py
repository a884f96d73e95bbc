"""Runs a loader and reads the memory of its process tree; a process of its own, so that it measures nothing else.

On stdin: what to run, as JSON; on stdout: what was read, as JSON.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from stoker.data.engines.making import BatchPlan
from stoker.data.images.crops import CropRange, RandomCrop
from stoker.data.images.decoding import Decoding, choose_decoder
from stoker.data.images.opening import open_index
from stoker.data.images.sample_index import SampleSet, all_samples
from stoker.data.loader import ImageLoader, LoaderOptions
from stoker.data.order import Order, Steps
from stoker.machine.loader_speed import repeated
from stoker.machine.memory import TreeMemory, tree_memory

LOOK_EVERY_S = 0.03
# A loader that does not fill up within this time is stuck.
FILLING_S = 60.0
# Of ImageNet's shape; what they show does not matter, how large they are does.
GENERATED_IMAGES = 24
GENERATED_SHAPE = (375, 500, 3)
GENERATED_QUALITY = 90


def main() -> None:
    """Reads the order, runs, writes."""
    order = json.loads(sys.stdin.readline())
    import torch

    torch.set_num_threads(1)
    for module in order["modules"]:
        importlib.import_module(module)
    with tempfile.TemporaryDirectory(prefix="stoker-memory-") as name:
        images = order["images"] or generate_images(Path(name) / "images")
        samples = all_samples(open_index(str(images), "", index_dir=Path(name) / "index"))
        decoding, _ = choose_decoder(order["decoder"], list, order["size"])
        before = tree_memory()
        runs, image_bytes = [], 0.0
        for workers, prefetch, batch in order["cells"]:
            many = repeated(samples, batch * (2 * workers * prefetch + 4))
            plan = plan_over(many, decoding, order["size"], batch)
            options = LoaderOptions(engine=order["engine"], workers=workers, prefetch=prefetch)
            peak, open_files, image_bytes = run_loader(plan, options)
            runs.append({"peak": dataclasses.asdict(peak), "open_files": open_files})
    sys.stdout.write(json.dumps({"before": dataclasses.asdict(before), "image_bytes": image_bytes, "runs": runs}))


def plan_over(samples: SampleSet, decoding: Decoding, size: int, batch: int) -> BatchPlan:
    """Random crops of these samples."""
    view = RandomCrop(size, CropRange(), decoding)
    return BatchPlan(samples, Order(len(samples)), Steps(len(samples), batch), view, 0, 0.5)


def run_loader(plan: BatchPlan, options: LoaderOptions) -> tuple[TreeMemory, int, float]:
    """The tree's memory and this process's open files at the peak, and the mean bytes of an image.

    The consumer waits until everything in flight is made, goes through as many again, and waits once more: a loader
    that is slower than its consumer never fills its buffers.
    """
    loader = ImageLoader(plan, options)
    # Threads begin the next batch when it is asked for, worker processes when the last one is handed out.
    all_made = loader.most_in_flight - (1 if loader.engine == "thread" else 0)
    peak, open_files, read, images = TreeMemory(0, 0, 0, 0), 0, 0, 0
    try:
        for number, batch in enumerate(loader.epoch(0)):
            read, images = read + batch.cost.bytes_read, images + len(batch)
            full = number in (0, loader.most_in_flight + 1)
            deadline = time.monotonic() + FILLING_S
            while True:
                now = tree_memory()
                peak = now if now.total_bytes > peak.total_bytes else peak
                if not full or loader.ready() >= all_made or time.monotonic() > deadline:
                    break
                time.sleep(LOOK_EVERY_S)
            open_files = max(open_files, len(os.listdir("/proc/self/fd")))  # noqa: PTH208 - a count
            if number > loader.most_in_flight:
                break
    finally:
        loader.close()
    return peak, open_files, read / max(1, images)


def generate_images(folder: Path, shape: tuple[int, int, int] = GENERATED_SHAPE) -> Path:
    """A folder of class folders with JPEGs; those of the usual shape have about 100 kB."""
    import cv2

    random = np.random.default_rng(0)
    height, width, channels = shape
    for number in range(GENERATED_IMAGES):
        coarse = random.integers(0, 256, (height // 8, width // 8, channels), np.uint8)
        pixels = cv2.resize(coarse, (width, height)).astype(np.int16) + random.integers(-20, 21, shape)
        path = folder / f"class{number % 2}" / f"{number:02d}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        _, data = cv2.imencode(
            ".jpg", pixels.clip(0, 255).astype(np.uint8), [cv2.IMWRITE_JPEG_QUALITY, GENERATED_QUALITY]
        )
        path.write_bytes(data.tobytes())
    return folder


if __name__ == "__main__":
    main()
