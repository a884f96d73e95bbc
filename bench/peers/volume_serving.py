"""The measured side for patches of volumes: a loader that waits for commands, warm or cold."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from bench.peers.serving import take

# As many as a loader of either kind has in flight, and a few more.
BEFORE = 4


class VolumeJob(NamedTuple):
    """The command-line arguments of a loader, and the settings of the benchmark."""

    root: Path
    """Folder of the benchmark; `source` has the volumes as `.npy` files."""
    data: Path
    """The contender's own files."""
    workers: int
    volumes: int
    patch: tuple[int, int, int]
    batch: int


def serve_volumes(open_stream: Callable[[VolumeJob], Iterator[int]]) -> None:
    """Runs a loader; `open_stream` returns an endless iterator over its batch sizes.

    A line with a number measures for so many seconds; `cold N` measures N batches, and is told after the page cache was
    emptied: what is in flight then was read before."""
    parser = argparse.ArgumentParser()
    parser.add_argument("root", type=Path)
    parser.add_argument("data", type=Path)
    parser.add_argument("--workers", type=int, default=2)
    arguments = parser.parse_args()
    settings = json.loads((arguments.root / "settings.json").read_text())
    z, y, x = settings["patch"]
    job = VolumeJob(
        arguments.root, arguments.data, arguments.workers, settings["volumes"], (z, y, x), settings["batch"]
    )
    stream = open_stream(job)
    take(stream, batches=BEFORE)
    print("ready", flush=True)
    for line in sys.stdin:
        take(stream, batches=2 * job.workers + 2)
        start = time.perf_counter()
        if line.startswith("cold"):
            patches = take(stream, batches=int(line.split()[1]))
        else:
            patches = take(stream, seconds=float(line))
        print(patches / (time.perf_counter() - start), flush=True)
