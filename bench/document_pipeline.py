"""The pipeline of the case study beside ours, on the same volumes: patches/s, ready for the network.

`document` is the data set of `bench/document_replica.py` in torch's DataLoader, with the workers that the document had:
each patch reads a whole TIFF volume, converts, clips and median-filters it, crops, normalises, and scales at random.
`document, two workers` gives it both cores.

`stoker` has packed the same volumes, clipped and median-filtered once; `packing_s` says how long that took. Then it
reads patches and, on the same cores, normalises them and scales every one at random by the same range.
`stoker, reading` only reads them, as it does where a GPU does the rest.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

from bench.loaders import PROJECT
from bench.peers.serving import take
from bench.rounds import Spread, interleave, keep, ratio
from stoker.config import load_config
from stoker.loader.loader import LoaderOptions
from stoker.tasks.demo import write_scrolls
from stoker.tasks.volumes.augment import build_volume_augment, transform_range
from stoker.tasks.volumes.cases.cases import open_cases
from stoker.tasks.volumes.cases.survey import statistics_of, survey
from stoker.tasks.volumes.data import PatchLoader, PatchRule, plan_training
from stoker.tasks.volumes.formats.opening import OpenVolumes
from stoker.tasks.volumes.formats.volume import ReadingOptions
from stoker.tasks.volumes.patches.patch_collate import PatchBatch
from stoker.tasks.volumes.patches.patches import UNCHANGED, training_steps

STEPS = 1000
BATCH = 1
SETTLING_S = 2.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=30.0, help="of each contender in each round")
    parser.add_argument("--volumes", type=int, default=12, help="the document had 786, and a cache of 50")
    parser.add_argument("--cache", type=int, default=1, help="volumes that a worker of the document's keeps")
    parser.add_argument("--size", type=int, default=320)
    parser.add_argument("--patch", type=int, nargs=3, default=(72, 136, 136))
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--keep", default="document_pipeline", help="folder under results/")
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # each worker has a core
    with tempfile.TemporaryDirectory(prefix="stoker-bench-") as name:
        work = Path(name)
        sys.stderr.write(f"making {arguments.volumes} volumes ...\n")
        write_scrolls(work / "source", volumes=arguments.volumes, shape=(arguments.size,) * 3, tests=0)
        packing_s = pack(work / "source", work / "packed", arguments.workers)
        contenders: dict[str, Callable[[], float]] = {
            "document": lambda: measure(document(work / "source", arguments, 1), arguments.seconds),
            "document, two workers": lambda: measure(
                document(work / "source", arguments, arguments.workers), arguments.seconds
            ),
            "stoker": lambda: measure(ours(work / "packed", arguments, augmented=True), arguments.seconds),
            "stoker, reading": lambda: measure(ours(work / "packed", arguments, augmented=False), arguments.seconds),
        }
        spreads = interleave(contenders, arguments.rounds)
    report(spreads, packing_s, arguments)
    return 0


def pack(source: Path, target: Path, workers: int) -> float:
    """Seconds of packing with the document's preprocessing."""
    began = time.perf_counter()
    command = [sys.executable, "-m", "stoker", "pack", source, target, "--layout", "raw", "--clip", "5,250"]
    options = ["--median", "3", "--workers", workers]
    subprocess.run([*map(str, [*command, *options])], check=True, stdout=sys.stderr, cwd=PROJECT)
    return time.perf_counter() - began


def measure(stream: Iterator[int], seconds: float) -> float:
    """Patches/s; the first one, with the start of the workers, is not counted."""
    time.sleep(SETTLING_S)
    take(stream, batches=1)
    start = time.perf_counter()
    patches = take(stream, seconds=seconds)
    rate = patches / (time.perf_counter() - start)
    stream.close()  # type: ignore[attr-defined]
    return rate


def document(source: Path, arguments: argparse.Namespace, workers: int) -> Iterator[int]:
    """The replica's own data set."""
    replica: Any = importlib.import_module("bench.document_replica")
    options = argparse.Namespace(
        data=str(source), volumes=None, patch=tuple(arguments.patch), batch=BATCH, steps=STEPS, filter="volume",
        read="volume", zoom=True, cache=arguments.cache,
    )  # fmt: skip
    loader = DataLoader(replica.Patches(options), batch_size=BATCH, num_workers=workers, prefetch_factor=1)
    for image, _ in loader:
        yield len(image)


def ours(packed: Path, arguments: argparse.Namespace, *, augmented: bool) -> Iterator[int]:
    """Patches of the pack, scaled by the replica's range if they are to be."""
    patch, reading = tuple(arguments.patch), ReadingOptions()
    replica: Any = importlib.import_module("bench.document_replica")
    # The replica's factor enlarges; ours says how many voxels become one.
    low, high = (1 / one for one in reversed(replica.ZOOM))
    quiet = [f"volume_{name}=0" for name in ("rotation", "noise", "blur", "brightness", "contrast", "gamma")]
    config = load_config(
        None,
        ["task=segment3d", f"patch_size={list(patch)}", "normalize=patch", "volume_low_resolution=0",
         "volume_flips=[0,0,0]", "volume_scaling=1", f"volume_scales=[{low},{high}]", *quiet],
    ).config  # fmt: skip
    listed, volumes = open_cases(packed), OpenVolumes(reading)
    assert listed.rules is not None
    rule = PatchRule(patch, foreground=0, transforms=transform_range(config) if augmented else UNCHANGED)
    surveyed = survey(listed.cases, volumes)
    plan = plan_training(listed.cases, surveyed, listed.rules, rule, training_steps(STEPS, BATCH))
    loader = PatchLoader(plan, reading, LoaderOptions(workers=arguments.workers, held=arguments.workers + 2))
    prepare = build_volume_augment(config, *statistics_of(plan.cases, volumes, "patch")).prepare
    making: deque[Future[int]] = deque()
    with ThreadPoolExecutor(arguments.workers) as pool:
        try:
            for epoch in itertools.count():
                for batch in loader.epoch(epoch):
                    if not augmented:
                        yield len(batch)
                        continue
                    making.append(pool.submit(_prepared, prepare, batch))
                    if len(making) > arguments.workers:
                        yield making.popleft().result()
        finally:
            loader.close()


def _prepared(prepare: Any, batch: PatchBatch) -> int:
    inputs, _ = prepare(batch, lambda rows: rows)
    return len(inputs)


def report(spreads: dict[str, Spread], packing_s: float, arguments: argparse.Namespace) -> None:
    ratios = {
        f"{name} / document": ratio(spreads[name], spreads["document"])
        for name in ("document, two workers", "stoker", "stoker, reading")
    }
    ratios["stoker / document, two workers"] = ratio(spreads["stoker"], spreads["document, two workers"])
    document_ = {
        "volumes": [arguments.volumes, arguments.size],
        "patch": list(arguments.patch),
        "workers": arguments.workers,
        "packing_s": round(packing_s, 1),
        "patches_per_second": {name: spread.as_dict() for name, spread in spreads.items()},
        "ratios": {name: spread.as_dict() for name, spread in ratios.items()},
    }
    path = keep(arguments.keep, document_)
    print(f"packing {arguments.volumes} volumes once: {packing_s:.1f} s")
    for name, spread in spreads.items():
        print(f"{name:<40}{spread.median:10.2f} patches/s  ({min(spread.values):.2f}-{max(spread.values):.2f})")
    for name, spread in ratios.items():
        print(f"{name:<40}{spread.median:10.1f} x          ({min(spread.values):.1f}-{max(spread.values):.1f})")
    print(f"wrote {path}")


if __name__ == "__main__":
    sys.exit(main())
