"""Folders to stage, and stagings that are killed; for tests and benchmarks."""

from __future__ import annotations

import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

from stoker.io.local_copy import open_copy
from stoker.stage.copying import verify_copy


def write_tree(root: Path, files: int, size: int = 3000, large: int = 20_000_000) -> dict[str, bytes]:
    """Writes small files, and one that is copied in parts; returns their contents."""
    rng = np.random.default_rng(1)
    contents = {f"train/c{number % 7}/{number:04}.jpg": rng.bytes(size + number) for number in range(files)}
    contents["shards/a.tar"] = rng.bytes(large)
    for name, data in contents.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(data)
    return contents


def files_of(folder: Path) -> dict[str, bytes]:
    """What a copy holds, without its records."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and not path.name.startswith(".stage")
    }


def start_staging(source: str | Path, target: Path, *options: str) -> subprocess.Popen[bytes]:
    """A `stoker stage` that runs on its own."""
    command = [sys.executable, "-m", "stoker", "stage", str(source), str(target), *options]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)


def kill_at_random_moments(source: str, target: Path, contents: dict[str, bytes], kills: int, *, seed: int = 0) -> int:
    """Kills a staging again and again; whatever the manifest lists must be whole. Returns how many died at work."""
    rng, at_work = random.Random(seed), 0
    for _ in range(kills):
        process = start_staging(source, target, "--limit-rate", "40MB/s")
        assert process.stderr is not None
        # After the imports and the listing, when it copies.
        while (line := process.stderr.readline()) and not line.startswith(b"staging"):
            pass
        time.sleep(rng.random() * 0.8)
        was_at_work = process.poll() is None
        process.send_signal(signal.SIGKILL)
        process.communicate()
        copy = open_copy(target)
        assert verify_copy(copy, lambda _done, _total: None).wrong == []
        copied = files_of(target)
        assert copied == {name: contents[name] for name in copied}
        copy.close()
        at_work += was_at_work
        if not was_at_work:
            shutil.rmtree(target)  # it was complete: begin anew
    return at_work
