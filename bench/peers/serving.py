"""The measured side: a loader that stands ready and is run for some seconds whenever it is told to.

It stays alive between rounds, so that neither its start nor its compilation is measured, and waits without
using a core while others have their turn.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

BATCH = 64
SIZE = 224
MEAN = (0.485, 0.456, 0.406)
STD = (0.229, 0.224, 0.225)


class Job(NamedTuple):
    """What a loader is asked to do."""

    images: Path
    """Folder of class folders."""
    work: Path
    """Folder for whatever the loader makes of them; kept between rounds."""
    workers: int


def serve(open_stream: Callable[[Job], Iterator[int]]) -> None:
    """Runs a loader: `open_stream` gives an endless iterator over the sizes of its batches."""
    parser = argparse.ArgumentParser()
    parser.add_argument("images", type=Path)
    parser.add_argument("work", type=Path)
    parser.add_argument("--workers", type=int, default=2)
    arguments = parser.parse_args()
    arguments.work.mkdir(parents=True, exist_ok=True)
    stream = open_stream(Job(arguments.images, arguments.work, arguments.workers))
    take(stream, batches=4)
    print("ready", flush=True)
    for line in sys.stdin:
        # While it stood waiting it filled its queues: those batches are not counted.
        take(stream, batches=3 * arguments.workers + 2)
        start = time.perf_counter()
        images = take(stream, seconds=float(line))
        print(images / (time.perf_counter() - start), flush=True)


def take(stream: Iterator[int], batches: int | None = None, seconds: float | None = None) -> int:
    """Takes batches until there were enough or the time is up; how many images they held."""
    end = time.perf_counter() + seconds if seconds is not None else None
    images = 0
    for count, size in enumerate(stream, 1):
        images += size
        if count == batches or (end is not None and time.perf_counter() >= end):
            break
    return images


def endless(epoch: Callable[[], Iterator[int]]) -> Iterator[int]:
    """One epoch after the other."""
    while True:
        yield from epoch()
