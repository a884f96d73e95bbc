"""Random 72 x 136 x 136 patches, image and label, cold from a real S3 server with 50 ms latency, compared with the same
patches from the local disk.

A paced consumer takes a batch when an accelerator would (15 patches/s) and uses no core: there, only latency can make a
difference. Unpaced rates stand beside it; server and proxy run on the same cores as the loader, and use most of them.
Nothing is kept between patches (no cache of chunks), so every patch is fetched. The peer reads the same regions with
tensorstore in the same number of threads, each region when it is needed.
"""

from __future__ import annotations

import argparse
import itertools
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import tifffile
import zarr
from tests.support.s3_server import BUCKET, S3Server, running_s3_server

from bench.object_store import cpu_seconds
from bench.rounds import interleave, keep, ratio
from stoker.loader.loader import LoaderOptions
from stoker.tasks.demo import scroll_volume
from stoker.tasks.volumes.cases.cases import open_cases
from stoker.tasks.volumes.cases.survey import survey
from stoker.tasks.volumes.data import PatchLoader, PatchRule, plan_training
from stoker.tasks.volumes.formats.opening import OpenVolumes
from stoker.tasks.volumes.formats.volume import ReadingOptions, Shape
from stoker.tasks.volumes.patches.labels import LabelRules
from stoker.tasks.volumes.patches.patch_collate import PatchPlan
from stoker.tasks.volumes.patches.patches import training_steps

PROJECT = Path(__file__).parents[1]
PATCH: Shape = (72, 136, 136)
LATENCY_MS = 50
PACE_PATCHES_PER_S = 15.0
WORKERS = 2
BATCH = 2
SMALLEST_SHARE = 0.99
# Cold: every patch is fetched and decoded.
READING = ReadingOptions(cache_bytes=0)
FORMATS = ("zarr", "tiff")


def write_volumes(root: Path, volumes: int, size: int) -> None:
    """The same made-up scrolls as uncompressed TIFF stacks, and as Zarr with raw 64³ chunks for the image (noise does
    not compress) and zstd for the labels."""
    for kind in FORMATS:
        for folder in ("train_images", "train_labels"):
            (root / kind / folder).mkdir(parents=True)
        rows = "".join(f"v{number},s{number}\n" for number in range(volumes))
        (root / kind / "train.csv").write_text(f"id,scroll_id\n{rows}")
    for number in range(volumes):
        parts = scroll_volume((size, size, size), seed=number, scroll=number)
        for folder, array in zip(("train_images", "train_labels"), parts, strict=True):
            tifffile.imwrite(root / "tiff" / folder / f"v{number}.tif", array)
            compressors: Any = None if folder == "train_images" else "auto"
            made = zarr.create_array(
                root / "zarr" / folder / f"v{number}.zarr", shape=array.shape, chunks=(64, 64, 64), dtype=array.dtype,
                compressors=compressors, fill_value=255, config={"write_empty_chunks": True},
            )  # fmt: skip
            made[...] = array


def upload(server: S3Server, root: Path) -> None:
    files = sorted(path for path in root.rglob("*") if path.is_file())
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda path: server.put(str(path.relative_to(root)), path.read_bytes()), files))


def plan_of(root: str, patches: int) -> PatchPlan:
    cases, steps = open_cases(root).cases, training_steps(patches // BATCH, BATCH)
    return plan_training(cases, survey(cases, OpenVolumes(READING)), LabelRules(2, 2), PatchRule(PATCH), steps)


def epoch_rate(loader: PatchLoader, epoch: int, pace: float | None = None) -> float:
    """Patches/s over a whole epoch, including its start. A paced consumer is busy for its time after each batch."""
    start, patches = time.perf_counter(), 0
    free, every_s = start, BATCH / pace if pace is not None else 0.0
    for batch in loader.epoch(epoch):
        assert not batch.bad
        patches += len(batch)
        now = time.perf_counter()
        # As in bench/paced.py: a sleep that overran is made up for, but no more than the time of one batch.
        free = max(free, now - every_s) + every_s if every_s else now
        time.sleep(max(0.0, free - now))
    return patches / (max(free, time.perf_counter()) - start)


def one_by_one_rate(plan: PatchPlan, volumes: OpenVolumes, epoch: int) -> float:
    """The peer: the same regions with tensorstore, each when it is needed."""
    steps = plan.steps.count(0)
    turns, lock, made = iter(range(steps)), threading.Lock(), []

    def work() -> None:
        while True:
            with lock:
                step = next(turns, None)
            if step is None:
                return
            for placement in plan.placements(epoch, step, 0)[0]:
                case = plan.cases[placement.case]
                for ref in (case.images[0], case.label):
                    assert ref is not None
                    made.append(int(np.sum(volumes.get(ref).read(placement.region)[0, 0])))

    start = time.perf_counter()
    threads = [threading.Thread(target=work) for _ in range(WORKERS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return len(made) / 2 / (time.perf_counter() - start)


def measure(work: Path, rounds: int, patches: int, helpers: list[int]) -> dict[str, Any]:
    loaders: dict[str, PatchLoader] = {}
    for kind in FORMATS:
        for place, root in (("local", str(work / kind)), ("s3", f"s3://{BUCKET}/{kind}")):
            loaders[f"{kind} {place}"] = PatchLoader(plan_of(root, patches), READING, LoaderOptions(workers=WORKERS))
    slow = max(BATCH * WORKERS, patches // 10)
    peer = replace(loaders["zarr s3"].plan, steps=training_steps(slow // BATCH, BATCH))
    peer_volumes = OpenVolumes(READING)
    epochs = itertools.count()
    contenders: dict[str, Callable[[], float]] = {}
    for name, loader in loaders.items():
        for pace_name, pace in (("", None), (", paced", PACE_PATCHES_PER_S)):
            contenders[name + pace_name] = lambda loader=loader, pace=pace: epoch_rate(loader, next(epochs), pace)  # type: ignore[misc]
    contenders["zarr s3, one by one"] = lambda: one_by_one_rate(peer, peer_volumes, next(epochs))
    before = sum(map(cpu_seconds, helpers))
    try:
        spreads = interleave(contenders, rounds)
    finally:
        for loader in loaders.values():
            loader.close()
    return {"spreads": spreads, "cpu_s_of_server_and_proxy": sum(map(cpu_seconds, helpers)) - before}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--patches", type=int, default=300, help="in an epoch")
    parser.add_argument("--volumes", type=int, default=4)
    parser.add_argument("--size", type=int, default=256, help="voxels along an axis")
    parser.add_argument("--keep", default="volume_s3", help="folder under results/")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="stoker-bench-") as name, running_s3_server() as server:
        work = Path(name)
        os.environ["XDG_CACHE_HOME"] = str(work / "cache")
        write_volumes(work / "data", arguments.volumes, arguments.size)
        upload(server, work / "data")
        proxy = subprocess.Popen(
            [sys.executable, "-m", "tests.support.proxy", str(server.port), str(LATENCY_MS)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=PROJECT,
        )  # fmt: skip
        assert proxy.stdout is not None
        os.environ.update(server.environment(f"http://127.0.0.1:{proxy.stdout.readline().strip()}"))
        try:
            found = measure(work / "data", arguments.rounds, arguments.patches, [proxy.pid, server.pid])
        finally:
            proxy.kill()
    return report(found, arguments)


def report(found: dict[str, Any], arguments: argparse.Namespace) -> int:
    spreads = found["spreads"]
    ratios = {
        f"{kind}: s3 / local{pace}": ratio(spreads[f"{kind} s3{pace}"], spreads[f"{kind} local{pace}"])
        for kind in FORMATS
        for pace in (", paced", "")
    }
    ratios["zarr: s3 / one by one"] = ratio(spreads["zarr s3"], spreads["zarr s3, one by one"])
    path = keep(
        arguments.keep,
        {
            "latency_ms": LATENCY_MS,
            "patch": list(PATCH),
            "pace_patches_per_second": PACE_PATCHES_PER_S,
            "workers": WORKERS,
            "batch": BATCH,
            "volumes": arguments.volumes,
            "size": arguments.size,
            "patches_per_epoch": arguments.patches,
            "patches_per_second": {name: spread.as_dict() for name, spread in spreads.items()},
            "ratios": {name: spread.as_dict() for name, spread in ratios.items()},
            "cpu_s_of_server_and_proxy": round(found["cpu_s_of_server_and_proxy"], 1),
        },
    )
    for name, spread in [*spreads.items(), *ratios.items()]:
        print(f"{name:<28}{spread.median:>9.3f}  ({min(spread.values):.3f}-{max(spread.values):.3f})")
    print(f"wrote {path}")
    return 0 if all(ratios[f"{kind}: s3 / local, paced"].median >= SMALLEST_SHARE for kind in FORMATS) else 1


if __name__ == "__main__":
    sys.exit(main())
