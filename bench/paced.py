"""The real loader feeding a consumer that takes batches at a fixed pace and uses no CPU, as a GPU would.

A slow consumer must never wait, and a fast one must get all that the loader can deliver: images/s must be within 3 %
of the slower of the two.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from bench.rounds import Spread, interleave, keep, ratio
from stoker.config import load_config
from stoker.tasks.images.data import choose_decoding, open_loader, open_samples, training_plan
from stoker.tasks.images.image_loader import ImageBatch, ImageLoader
from stoker.tasks.images.layouts.sample_index import repeated

SMALLEST_SHARE = 0.97
# The consumer's pace relative to the throughput of the loader alone.
SLOW, FAST = 0.6, 1.5
WARM_UP_BATCHES = 8


def open_real_loader(images: Path, work: Path, workers: int, batch: int, size: int) -> ImageLoader:
    words = [f"data_root={images}", f"batch_size={batch}", f"img_size={size}", f"index_dir={work}", "pin_memory=false"]
    config = load_config(None, words).config
    samples = open_samples(config, "")
    decoding, _ = choose_decoding(config, samples.index)
    # One long epoch: the pause between epochs is not measured here.
    plan = training_plan(config, repeated(samples, 200_000), decoding)
    return open_loader(config, plan, workers=workers)


def consume(loader: ImageLoader, epoch: int, seconds: float, every_s: float) -> float:
    """Images/s received by a consumer that is busy for `every_s` after each batch."""
    batches: Iterator[ImageBatch] = loader.epoch(epoch)
    for _ in itertools.islice(batches, WARM_UP_BATCHES):
        pass
    images, began = 0, time.perf_counter()
    free = began
    for batch in batches:
        images += len(batch)
        now = time.perf_counter()
        # The consumer starts once it is free and has the batch. A sleep that overran is made up for: that is not the
        # loader's fault.
        free = max(free, now - every_s) + every_s if every_s else now
        if free > now:
            time.sleep(free - now)
        if time.perf_counter() - began >= seconds:
            break
    return images / (time.perf_counter() - began)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("images", type=Path, help="folder of class folders")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--size", type=int, default=224)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    epochs = itertools.count()
    with tempfile.TemporaryDirectory(prefix="stoker-bench-") as name:
        loader = open_real_loader(arguments.images, Path(name), arguments.workers, arguments.batch, arguments.size)
        try:
            found = consume(loader, next(epochs), arguments.seconds, 0.0)
            every = {"slow": arguments.batch / (SLOW * found), "fast": arguments.batch / (FAST * found)}
            paces = {"alone": 0.0, **every}
            spreads = interleave(
                {
                    pace: lambda wait=wait: consume(loader, next(epochs), arguments.seconds, wait)  # type: ignore[misc]
                    for pace, wait in paces.items()
                },
                arguments.rounds,
            )
        finally:
            loader.close()
    alone = spreads["alone"]
    shares = {}
    for pace, wait in every.items():
        smaller = Spread(tuple(min(rate, arguments.batch / wait) for rate in alone.values))
        shares[pace] = ratio(spreads[pace], smaller)
    path = keep(
        "paced",
        {
            "workers": arguments.workers,
            "batch": arguments.batch,
            "size": arguments.size,
            "batch_every_ms": {pace: round(wait * 1e3, 2) for pace, wait in every.items()},
            "images_per_second": {pace: spread.as_dict() for pace, spread in spreads.items()},
            "share of min(loader alone, consumer)": {pace: share.as_dict() for pace, share in shares.items()},
        },
    )
    for pace, share in shares.items():
        seen = f"({min(share.values):.3f}-{max(share.values):.3f})"
        print(f"{pace} consumer, a batch every {every[pace] * 1e3:.0f} ms: {share.median:.3f} {seen}")
    print(f"wrote {path}")
    return 0 if all(share.median >= SMALLEST_SHARE for share in shares.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
