"""How much memory the parts of a loader take on this machine, measured by loading images for a few seconds."""

from __future__ import annotations

import os
import platform
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

import cv2
import numpy as np
import torch

from stoker.core.child import Child, ChildFailed, Parent
from stoker.core.errors import StokerError
from stoker.core.files import remember
from stoker.loader.loader import LoaderOptions
from stoker.loader.loader_memory import STATED, LoaderMemory, batches_held
from stoker.loader.sampler import EpochSampler, Steps
from stoker.profile.memory import TreeMemory, tree_memory
from stoker.tasks.images.decode.crops import CropRange, Decoding, RandomCrop
from stoker.tasks.images.decode.decoders import available_decoders
from stoker.tasks.images.image_loader import ImageLoader, ImagePlan
from stoker.tasks.images.layouts.opening import open_index
from stoker.tasks.images.layouts.sample_index import SampleSet, all_samples, repeated

FORMAT = 1
CACHE_FILE = "loader_memory.json"
# A trial takes five seconds; this is for a machine that is busy with other things.
TRIAL_TIMEOUT_S = 240.0
# Small batches, so that a trial takes seconds: what grows with the batch is computed, not measured.
FEW_WORKERS, MORE_WORKERS, PREFETCH, BATCH, SIZE = 1, 3, 2, 16, 224
LOOK_EVERY_S = 0.03
# A loader that is not full after this time is stuck.
FILLING_S = 60.0
# ImageNet's shape. Only the size matters, not what the images show.
GENERATED_IMAGES = 24
GENERATED_SHAPE = (375, 500, 3)
GENERATED_QUALITY = 90
_PACKAGES = ("torch", "numpy", "opencv-python-headless", "simplejpeg", "nvidia-nvimgcodec-cu13", "turbojpeg", "timm")

Engine = Literal["process", "thread"]


@dataclass(frozen=True)
class MemoryTrial:
    """Memory of one process in which loaders ran one after the other."""

    before: TreeMemory
    """After all imports, before the first loader was opened."""
    peaks: tuple[TreeMemory, ...]
    open_files: tuple[int, ...]
    image_bytes: float


def measure_loader_memory() -> LoaderMemory:
    """The cost of a loader's parts on this machine, measured once; STATED if that fails."""

    def usable(value: Any) -> bool:
        return isinstance(value, dict) and set(value) == {part.name for part in fields(LoaderMemory)}

    def measure() -> dict[str, Any] | None:
        try:
            return asdict(measure_parts())
        except (ChildFailed, StokerError, OSError):
            return None

    versions = []
    for package in _PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            versions.append(f"{package} {metadata.version(package)}")
    key = [f"format {FORMAT}", platform.platform(), platform.python_version(), *versions, "auto", "generated"]
    found = remember(CACHE_FILE, ", ".join(key), measure, usable)
    return STATED if found is None else LoaderMemory(**found)


def measure_parts(images: Path | None = None) -> LoaderMemory:
    """The cost of a loader's parts, from two short trials side by side; `images` is a folder of class folders, None
    generates some. Raises ChildFailed, StokerError or OSError."""
    few, more = (FEW_WORKERS, PREFETCH, BATCH), (MORE_WORKERS, PREFETCH, BATCH)
    with start_trial("thread", [more], images) as threads, start_trial("process", [few, more], images) as processes:
        return parts_of(trial_of(threads), trial_of(processes))


def start_trial(engine: Engine, cells: Sequence[tuple[int, int, int]], images: Path | None) -> Child:
    """Starts a process that runs a loader for each (workers, prefetch, batch)."""
    job = {"engine": engine, "cells": list(cells), "images": None if images is None else str(images)}
    return Child(run_loaders, job, timeout_s=TRIAL_TIMEOUT_S)


def trial_of(child: Child) -> MemoryTrial:
    """What a started trial measured."""
    found = child.wait()
    return MemoryTrial(
        before=TreeMemory(**found["before"]),
        peaks=tuple(TreeMemory(**run["peak"]) for run in found["runs"]),
        open_files=tuple(run["open_files"] for run in found["runs"]),
        image_bytes=found["image_bytes"],
    )


def parts_of(threads: MemoryTrial, processes: MemoryTrial) -> LoaderMemory:
    """The cost of each part, from a trial with threads and one with few and then more worker processes."""
    held, batch_bytes = int(BATCH * threads.image_bytes), BATCH * SIZE * SIZE * 3
    before, with_threads = threads.before.anonymous_bytes, threads.peaks[0].anonymous_bytes
    buffers = batches_held("thread", MORE_WORKERS, PREFETCH) * batch_bytes
    few, more = (peak.anonymous_bytes for peak in processes.peaks)  # their batches are in shared memory
    worker = max(0, (more - few) // (MORE_WORKERS - FEW_WORKERS) - held)
    server = few - processes.before.anonymous_bytes - FEW_WORKERS * (worker + held)
    return LoaderMemory(
        process=before + threads.peaks[0].file_bytes,
        fork_server=max(0, server + processes.peaks[0].file_bytes - threads.peaks[0].file_bytes),
        worker=worker,
        thread=max(0, (with_threads - before - buffers) // MORE_WORKERS - held),
        image_bytes=int(threads.image_bytes),
        measured=True,
    )


def run_loaders(job: dict[str, Any], _parent: Parent) -> dict[str, Any]:
    """The trial; runs in a separate process, so that it measures nothing else."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="stoker-memory-") as name:
        images = job["images"] or generate_images(Path(name) / "images")
        samples = all_samples(open_index(str(images), "", index_dir=Path(name) / "index"))
        decoding = Decoding(available_decoders()[0])
        before = tree_memory()
        runs, image_bytes = [], 0.0
        for workers, prefetch, batch in job["cells"]:
            many = repeated(samples, batch * (2 * workers * prefetch + 4))
            plan = plan_over(many, decoding, SIZE, batch)
            options = LoaderOptions(engine=job["engine"], workers=workers, prefetch=prefetch)
            peak, open_files, image_bytes = run_loader(plan, options)
            runs.append({"peak": asdict(peak), "open_files": open_files})
    return {"before": asdict(before), "image_bytes": image_bytes, "runs": runs}


def plan_over(samples: SampleSet, decoding: Decoding, size: int, batch: int) -> ImagePlan:
    """Random crops of these samples."""
    view = RandomCrop(size, CropRange(), decoding)
    return ImagePlan(samples, EpochSampler(len(samples)), Steps(len(samples), batch), view, 0, 0.5)


def run_loader(plan: ImagePlan, options: LoaderOptions) -> tuple[TreeMemory, int, float]:
    """Memory of the process tree and open files of this process at the peak, and the mean bytes per image.

    The consumer waits until everything in flight is made, takes as many batches again, and waits once more: a loader
    that is slower than its consumer never fills its buffers.
    """
    loader = ImageLoader(plan, options)
    # Threads start the next batch when it is requested, worker processes when the previous one is handed out.
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
    """Fills a folder of class folders with JPEGs, of about 100 kB in the default shape."""
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
