"""Training while the data is still arriving: the first epoch with `stage_to` from a real S3 server with 50 ms a
request, the second one from the copy that it made, and both epochs from local files.

Server and proxy run on the same cores as the loader. So in addition to the plain rates we measure a paced consumer,
which takes a batch when an accelerator would and uses no core: there, only waiting for data can make a difference.
Every round begins with an empty copy.
"""

from __future__ import annotations

import argparse
import itertools
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import simplejpeg
from tests.support.s3_server import BUCKET, running_s3_server

from bench.loaders import PROJECT, link_copies
from bench.object_store import epoch_rate
from bench.rounds import interleave, keep, ratio
from stoker.config import load_config
from stoker.profile.host import fit_to_machine, read_machine
from stoker.tasks.images import classify
from stoker.tasks.images.data import open_data, open_loader
from stoker.tasks.images.image_loader import ImageLoader
from stoker.tasks.images.image_staging import stage_images
from stoker.tasks.staging import Staging
from stoker.train.ranks import Ranks

LATENCY_MS = 50
OBJECTS = 2400
WORKERS = 2
PACE_IMAGES_PER_S = 250.0
SMALLEST_SHARE = 0.99
SETTLING_S = 120.0
MADE_UP, SIDES = 400, (375, 500)


@dataclass
class Opened:
    loader: ImageLoader
    staging: Staging | None

    def close(self) -> None:
        self.loader.close()
        if self.staging is not None:
            self.staging.close()


def opened(root: str, work: Path, *overrides: str) -> Opened:
    """The loader of a run, and the copy that it fills, as `stoker train` opens them."""
    words = [f"data_root={root}", "batch_size=64", "pin_memory=false", f"index_dir={work}", "loader=thread"]
    loaded = load_config(None, [*words, f"num_workers={WORKERS}", *overrides]).config
    config, _ = fit_to_machine(loaded, read_machine())
    data = open_data(config, lambda _line: None)
    staging = stage_images(config, data, Ranks(), lambda _line: None)
    plan = classify.checked_training_plan(config, data, Ranks())
    if staging is None:
        return Opened(open_loader(config, plan, workers=WORKERS), None)
    return Opened(open_loader(config, plan, workers=WORKERS, copy=staging.place, follow=staging.follow), staging)


def write_made_up(folder: Path) -> Path:
    """Images of about the size of ImageNet's, if there are no real ones."""
    random = np.random.default_rng(0)
    for number in range(MADE_UP):
        place = folder / f"class{number % 10}"
        place.mkdir(parents=True, exist_ok=True)
        rough = random.integers(0, 256, (SIDES[0] // 5, SIDES[1] // 5, 3), np.uint8)
        pixels = np.ascontiguousarray(rough.repeat(5, 0).repeat(5, 1))
        (place / f"{number}.jpg").write_bytes(simplejpeg.encode_jpeg(pixels, quality=90))
    return folder


def measure(data: Path, work: Path, rounds: int) -> dict[str, object]:
    url, epochs, copies = f"s3://{BUCKET}", itertools.count(), itertools.count()
    local = opened(str(data), work / "local-index")
    remote = opened(url, work / "remote-index")
    complete_s: list[float] = []
    second: list[float] = []

    def first_epoch(pace: float | None) -> float:
        """Images/s of an epoch that begins with an empty copy; then the copy is complete, and the next epoch is timed,
        too, if there is no pace."""
        copy = work / f"copy-{next(copies)}"
        run = opened(url, work / "remote-index", f"stage_to={copy}")
        assert run.staging is not None
        try:
            began = time.perf_counter()
            rate = epoch_rate(run.loader, next(epochs), pace)
            assert run.staging.filler.settle(SETTLING_S), "the copy is not complete"
            if pace is None:
                complete_s.append(time.perf_counter() - began)
                second.append(epoch_rate(run.loader, next(epochs)))
        finally:
            run.close()
        copied = sum(path.name.endswith((".jpg", ".JPEG")) for path in copy.rglob("*"))
        assert copied == len(run.loader.plan.samples), f"{copied} files in the copy"
        shutil.rmtree(copy)
        return rate

    try:
        spreads = interleave(
            {
                "local paced": lambda: epoch_rate(local.loader, next(epochs), PACE_IMAGES_PER_S),
                "first epoch paced": lambda: first_epoch(PACE_IMAGES_PER_S),
                "local": lambda: epoch_rate(local.loader, next(epochs)),
                "s3, no copy": lambda: epoch_rate(remote.loader, next(epochs)),
                "first epoch": lambda: first_epoch(None),
                "second epoch": lambda: second[-1],
            },
            rounds,
        )
    finally:
        local.close()
        remote.close()
    return {"spreads": spreads, "complete_s": complete_s, "samples": len(local.loader.plan.samples)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("images", type=Path, nargs="?", help="folder of class folders; made-up images without it")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--objects", type=int, default=OBJECTS, help="at least this many, by copies")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="stoker-bench-") as name, running_s3_server() as server:
        work = Path(name)
        source = arguments.images or write_made_up(work / "made-up")
        count = sum(1 for path in source.glob("[!.]*/*") if path.is_file())
        data = work / "data"
        images = link_copies(source, data / "train", -(-arguments.objects // count))
        for path in sorted(path for path in images.rglob("*") if path.is_file()):
            server.put(f"train/{path.relative_to(images)}", path.read_bytes())
        proxy = subprocess.Popen(
            [sys.executable, "-m", "tests.support.proxy", str(server.port), str(LATENCY_MS)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=PROJECT,
        )  # fmt: skip
        assert proxy.stdout is not None
        os.environ.update(server.environment(f"http://127.0.0.1:{proxy.stdout.readline().strip()}"))
        try:
            found = measure(data, work, arguments.rounds)
        finally:
            proxy.kill()
        size = sum(path.stat().st_size for path in images.rglob("*") if path.is_file())
    return report(found, size, "real" if arguments.images else "made up")


def report(found: dict[str, object], data_bytes: int, images: str) -> int:
    spreads = found["spreads"]
    assert isinstance(spreads, dict)
    ratios = {
        "first epoch paced / local paced": ratio(spreads["first epoch paced"], spreads["local paced"]),
        "first epoch / local": ratio(spreads["first epoch"], spreads["local"]),
        "first epoch / s3, no copy": ratio(spreads["first epoch"], spreads["s3, no copy"]),
        "second epoch / local": ratio(spreads["second epoch"], spreads["local"]),
    }
    path = keep(
        "stage_overlap",
        {
            "latency_ms": LATENCY_MS,
            "images": images,
            "objects": found["samples"],
            "bytes": data_bytes,
            "workers": WORKERS,
            "pace_images_per_second": PACE_IMAGES_PER_S,
            "images_per_second": {name: spread.as_dict() for name, spread in spreads.items()},
            "ratios": {name: spread.as_dict() for name, spread in ratios.items()},
            "seconds_until_the_copy_is_complete_unpaced": found["complete_s"],
        },
    )
    for name, spread in [*spreads.items(), *ratios.items()]:
        print(f"{name:<34}{spread.median:>9.3f}  ({min(spread.values):.3f}-{max(spread.values):.3f})")
    print(f"wrote {path}")
    return 0 if ratios["first epoch paced / local paced"].median >= SMALLEST_SHARE else 1


if __name__ == "__main__":
    sys.exit(main())
