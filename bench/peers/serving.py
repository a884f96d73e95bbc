"""The measured side: a loader that waits for commands and runs for a number of seconds on each.

It stays alive between rounds, so that neither startup nor compilation is measured, and uses no CPU while other loaders
run.
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
    """The command-line arguments of a loader."""

    images: Path
    """Folder of class folders."""
    work: Path
    """Folder for the loader's own format; reused between rounds."""
    workers: int


def serve(open_stream: Callable[[Job], Iterator[int]]) -> None:
    """Runs a loader; `open_stream` returns an endless iterator over its batch sizes."""
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
        # The queues filled up while the loader was waiting: those batches do not count.
        take(stream, batches=3 * arguments.workers + 2)
        start = time.perf_counter()
        images = take(stream, seconds=float(line))
        print(images / (time.perf_counter() - start), flush=True)


def take(stream: Iterator[int], batches: int | None = None, seconds: float | None = None) -> int:
    """Takes that many batches, or as many as arrive in the given time; returns the number of images in them."""
    end = time.perf_counter() + seconds if seconds is not None else None
    images = 0
    for count, size in enumerate(stream, 1):
        images += size
        if count == batches or (end is not None and time.perf_counter() >= end):
            break
    return images


def endless(epoch: Callable[[], Iterator[int]]) -> Iterator[int]:
    """Chains epochs without end."""
    while True:
        yield from epoch()
