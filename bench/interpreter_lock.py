"""The share of an image's time in which a loader thread holds the GIL, so that no other thread can run.

Its inverse is the number of threads beyond which they queue for the GIL, and processes are the better choice.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cv2

from bench.rounds import Spread, keep
from stoker.config import load_config
from stoker.tasks.images.data import choose_decoding, open_loader, open_samples, training_plan
from stoker.tasks.images.decode import crops
from stoker.tasks.images.decode.decoders import load_decoder


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("images", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    # simplejpeg as the decoder: like turbojpeg, it decodes in one long call without the GIL, and it is easy to time.
    overrides = [f"data_root={arguments.images}", "batch_size=64", "pin_memory=false", "decoder=simplejpeg"]
    config = load_config(None, overrides).config
    samples = open_samples(config, "")
    decoding, _ = choose_decoding(config, samples.index)
    loader = open_loader(config, training_plan(config, samples, decoding), workers=0)
    released = [0.0]

    def timed(call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*words: Any, **named: Any) -> Any:
            start = time.thread_time()
            result = call(*words, **named)
            released[0] += time.thread_time() - start
            return result

        return run

    decoder: Any = load_decoder("simplejpeg")
    cv2.copyTo, decoder._decode, os.pread = timed(cv2.copyTo), timed(decoder._decode), timed(os.pread)
    crops._antialiasing()["bilinear"] = timed(crops._antialiasing()["bilinear"])
    shares, held_us = [], []
    for epoch in range(arguments.rounds + 1):
        released[0], start, images = 0.0, time.thread_time(), 0
        for batch in loader.epoch(epoch):
            images += len(batch)
        total = time.thread_time() - start
        if epoch:  # the first epoch warms the caches
            shares.append(1 - released[0] / total)
            held_us.append((total - released[0]) / images * 1e6)
    share = Spread(tuple(shares))
    held = Spread(tuple(held_us)).as_dict()
    document = {"share_held": share.as_dict(), "held_us_per_image": held, "threads_at_most": 1 / share.median}
    path = keep("interpreter_lock", document)
    print(f"GIL held for {share.median:.0%} of an image's time: at most {1 / share.median:.1f} threads run in parallel")
    print(f"wrote {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
