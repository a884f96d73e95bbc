"""What a loader's parts cost in memory on this machine, measured by running it for a few seconds."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

from stoker.data.engines.making import batches_held
from stoker.files import write_text
from stoker.machine.memory import TreeMemory

FORMAT = 1
TRIAL = (sys.executable, "-m", "stoker.machine.loader_memory_trial")
# A trial takes five seconds; this is for a machine that is busy with other things.
TRIAL_TIMEOUT_S = 240.0
# Small batches, so that a trial takes seconds: what grows with the batch is computed, not measured.
FEW_WORKERS, MORE_WORKERS, PREFETCH, BATCH, SIZE = 1, 3, 2, 16, 224
_PACKAGES = ("torch", "numpy", "opencv-python-headless", "simplejpeg", "nvidia-nvimgcodec-cu13", "turbojpeg", "timm")

Engine = Literal["process", "thread"]


class LoaderMemoryUnknown(Exception):
    """The trial did not run through; the stated figures have to do."""


@dataclass(frozen=True)
class LoaderMemory:
    """What the parts of a loader take, in bytes, apart from the batches themselves."""

    process: int
    """A process with Python, torch and the loader's modules."""
    fork_server: int
    """Of worker processes: the process that they are forked from, once for each loading process."""
    worker: int
    """Each further worker process, apart from the bytes of the batch that it decodes."""
    thread: int
    """Each further worker thread: decoder, scratch, its share of the heap."""
    image_bytes: int
    """Mean size of an image file: a worker holds those of the batch that it decodes."""
    measured: bool
    """False for the stated figures."""


# Measured with torch 2.15 on Linux (results/loader_memory), the process with what training imports (240 MB of it);
# ImageNet's mean file.
STATED = LoaderMemory(
    process=820_000_000,
    fork_server=320_000_000,
    worker=18_000_000,
    thread=12_000_000,
    image_bytes=110_000,
    measured=False,
)


@dataclass(frozen=True)
class Trial:
    """One process in which loaders ran one after the other."""

    before: TreeMemory
    """With everything imported, before the first loader was opened."""
    peaks: tuple[TreeMemory, ...]
    open_files: tuple[int, ...]
    image_bytes: float


def measure_loader_memory(
    *,
    images: Path | None = None,
    decoder: str = "auto",
    modules: Sequence[str] = (),
    measure: bool = True,
    remember: bool = True,
    command: Sequence[str] = TRIAL,
) -> LoaderMemory:
    """What a loader's parts take here, from two short trials side by side; the stated figures where they fail.

    Without `measure` it returns at once, with what an earlier call has found or else with the stated figures.

    `images` is a folder of class folders, generated where None. `modules` are imported first: what the process that
    loads has imported besides.
    """
    path, key = cache_file(), _key(images, decoder, modules)
    known = _read(path).get(key)
    if remember and isinstance(known, dict):
        with suppress(TypeError):  # of another version
            return LoaderMemory(**known)
    if not measure:
        return STATED
    few, more = (FEW_WORKERS, PREFETCH, BATCH), (MORE_WORKERS, PREFETCH, BATCH)

    def run(trial: tuple[Engine, list[tuple[int, int, int]]]) -> Trial:
        return run_trial(*trial, images=images, decoder=decoder, modules=modules, command=command)

    try:
        with ThreadPoolExecutor(2) as pool:
            found = parts_of(*pool.map(run, [("thread", [more]), ("process", [few, more])]))
    except LoaderMemoryUnknown:
        return STATED
    if remember:
        with suppress(OSError):  # a home that cannot be written to costs the trial at each start, no more
            write_text(path, json.dumps(_read(path) | {key: asdict(found)}, indent=1) + "\n")
    return found


def run_trial(
    engine: Engine,
    cells: Sequence[tuple[int, int, int]],
    *,
    size: int = SIZE,
    images: Path | None = None,
    decoder: str = "auto",
    modules: Sequence[str] = (),
    command: Sequence[str] = TRIAL,
) -> Trial:
    """Runs a loader for each (workers, prefetch, batch) in one fresh process; raises LoaderMemoryUnknown."""
    order = {
        "engine": engine, "cells": list(cells), "size": size, "images": None if images is None else str(images),
        "decoder": decoder, "modules": list(modules),
    }  # fmt: skip
    try:
        done = subprocess.run(
            list(command), input=json.dumps(order) + "\n", capture_output=True, text=True, timeout=TRIAL_TIMEOUT_S
        )
        found = json.loads(done.stdout)
        return Trial(
            before=TreeMemory(**found["before"]),
            peaks=tuple(TreeMemory(**run["peak"]) for run in found["runs"]),
            open_files=tuple(run["open_files"] for run in found["runs"]),
            image_bytes=found["image_bytes"],
        )
    except (OSError, subprocess.TimeoutExpired, ValueError, KeyError, TypeError) as error:
        raise LoaderMemoryUnknown(f"the loader's memory could not be measured: {error}") from error


def parts_of(threads: Trial, processes: Trial) -> LoaderMemory:
    """The cost of each part, from a trial with threads, and one with few and then with more worker processes."""
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


def cache_file() -> Path:
    """Where figures are remembered."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")  # noqa: PTH111 - Path's raises
    return Path(base) / "stoker" / "loader_memory.json"


def _key(images: Path | None, decoder: str, modules: Sequence[str]) -> str:
    versions = []
    for package in _PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            versions.append(f"{package} {metadata.version(package)}")
    what = [f"format {FORMAT}", platform.platform(), platform.python_version(), *versions, decoder, *modules]
    return ", ".join([*what, "generated" if images is None else str(images)])


def _read(path: Path) -> dict[str, Any]:
    with suppress(OSError, ValueError):
        found = json.loads(path.read_text())
        return found if isinstance(found, dict) else {}
    return {}
