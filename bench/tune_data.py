"""Data for `bench/tune.py`: made-up images and volumes, in a folder or on a real S3 server behind a slow link."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import zarr
from PIL import Image
from tests.support.s3_server import BUCKET, S3Server, running_s3_server

from bench.cures import proxied
from bench.loaders import link_copies
from bench.tune_scenarios import Scenario
from stoker.tasks.demo import scroll_volume, write_scrolls

# Each file is linked many times, so that an epoch is longer than a trial: its start is not what is measured here.
DIFFERENT, SAMPLES = 96, 4800
SAMPLES_ON_S3 = 1440
SIDES = {"photos": 400, "thumbnails": 96, "uneven": 96}
HUGE_SIDE, HUGE_EVERY = 3000, 24
VOLUMES, VOLUME_SIDE = 4, 160
CHUNK = 64


class Data:
    """Writes each data set when it is first asked for, and starts the server for the first scenario that needs it."""

    def __init__(self, work: Path, images: Path | None = None) -> None:
        self._work = work
        self._images = images
        self._stack = ExitStack()
        self._server: S3Server | None = None
        self._uploaded: dict[str, str] = {}

    def __enter__(self) -> Data:
        return self

    def __exit__(self, *_error: object) -> None:
        self._stack.close()

    @contextmanager
    def served(self, scenario: Scenario) -> Iterator[str]:
        """The scenario's data_root; while it is in use, AWS_* variables point at its server."""
        link = scenario.link
        if link is None:
            yield str(self._folder(scenario.data, SAMPLES))
            return
        url = self._upload(scenario.data)
        assert self._server is not None
        with proxied(self._server.port, link.latency_ms, link.megabytes_per_second) as endpoint:
            os.environ.update(self._server.environment(endpoint))
            yield url

    def _folder(self, name: str, samples: int) -> Path:
        folder = self._work / f"{name}-{samples}"
        if folder.exists():
            return folder
        sys.stderr.write(f"writing {folder.name} ...\n")
        if name == "tiff":
            write_scrolls(folder, volumes=VOLUMES, shape=(VOLUME_SIDE,) * 3, tests=0)
        elif name == "zarr":
            write_compressed(folder)
        else:
            source = self._images if name == "photos" and self._images is not None else self._work / f"{name}-made"
            if not source.exists():
                write_images(source, SIDES[name], huge=name == "uneven")
            files = sum(path.is_file() for path in source.glob("[!.]*/[!.]*"))
            link_copies(source, folder / "train", max(1, samples // max(1, files)))
        return folder

    def _upload(self, name: str) -> str:
        if self._server is None:
            self._server = self._stack.enter_context(running_s3_server())
        if name not in self._uploaded:
            folder, server = self._folder(name, SAMPLES_ON_S3), self._server
            files = sorted(path for path in folder.rglob("*") if path.is_file())
            with ThreadPoolExecutor(4) as pool:
                list(pool.map(lambda path: server.put(f"{name}/{path.relative_to(folder)}", path.read_bytes()), files))
            self._uploaded[name] = f"s3://{BUCKET}/{name}"
        return self._uploaded[name]


def write_images(folder: Path, side: int, *, huge: bool) -> None:
    """Class folders with JPEGs of enlarged noise; with `huge`, some of them are far larger than the rest."""
    rng = np.random.default_rng(0)
    for number in range(DIFFERENT):
        edge = HUGE_SIDE if huge and number % HUGE_EVERY == 0 else side
        width, height = edge * 5 // 4, edge
        noise = rng.integers(0, 255, (max(8, height // 4), max(8, width // 4), 3), dtype=np.uint8)
        place = folder / f"class{number % 4}"
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray(noise).resize((width, height)).save(place / f"{number}.jpg", quality=85)


def write_compressed(root: Path) -> None:
    """Made-up scrolls in the competition's layout, as Zarr with compressed chunks: decoding them is what takes time."""
    for folder in ("train_images", "train_labels"):
        (root / folder).mkdir(parents=True)
    for number in range(VOLUMES):
        parts = scroll_volume((VOLUME_SIDE,) * 3, seed=number, scroll=number)
        for folder, array in zip(("train_images", "train_labels"), parts, strict=True):
            options: Any = {"compressors": "auto", "config": {"write_empty_chunks": True}}
            made = zarr.create_array(
                root / folder / f"v{number}.zarr", shape=array.shape, chunks=(CHUNK,) * 3, dtype=array.dtype,
                fill_value=255, **options,
            )  # fmt: skip
            made[...] = array
    rows = "".join(f"v{number},s{number}\n" for number in range(VOLUMES))
    (root / "train.csv").write_text(f"id,scroll_id\n{rows}")
