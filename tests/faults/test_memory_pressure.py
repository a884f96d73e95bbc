"""Memory runs low while a loader runs under a real limit: the guard gives up prefetched batches; nothing is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from stoker.core.cgroups import CGROUP_ROOT
from tests.conftest import PROJECT
from tests.support.waiting import DEADLINE_S

# Joins a cgroup, fills a loader's buffers, leaves itself 30 MB, and then allocates 60 MB more, step by step.
PROGRAM = """
import os, sys, time
from pathlib import Path

group, guarded, engine, folder = Path(sys.argv[1]), sys.argv[2] == "guarded", sys.argv[3], Path(sys.argv[4])


def main():
    (group / "cgroup.procs").write_text(str(os.getpid()))
    from stoker.tasks.images.decode.calibration import choose_decoder
    from stoker.tasks.images.layouts.opening import open_index
    from stoker.tasks.images.layouts.sample_index import all_samples, repeated
    from stoker.loader.loader import LoaderOptions
    from stoker.tasks.images.image_loader import ImageLoader
    from stoker.tasks.images.memory_trial import generate_images, plan_over
    from stoker.profile.memory import read_memory
    from stoker.train.loader_adjuster import PrefetchGuard

    images = generate_images(folder / "images", (48, 64, 3))
    samples = repeated(all_samples(open_index(str(images), "", index_dir=folder)), 2000)
    decoding, _ = choose_decoder("simplejpeg", list, 224)
    options = LoaderOptions(engine=engine, workers=2, prefetch=8)
    loader = ImageLoader(plan_over(samples, decoding, 224, 40), options)
    limit = group / ("memory.max" if (group / "memory.max").exists() else "memory.limit_in_bytes")
    guard = PrefetchGuard(lambda text: print(text, flush=True), every_s=0.0, settle_s=0.05)
    epoch, held, steps = loader.epoch(0), [], []
    for number in range(30):
        batch = next(epoch)
        steps.append(batch.step)
        if number == 3:
            while loader.ready() < loader.most_in_flight - 1:
                time.sleep(0.02)
            limit.write_text(str(3 * 10**9))  # so that the group's figures are the nearest
            state = read_memory()
            limit.write_text(str(state.limit_bytes - state.available_bytes + 30_000_000))
            print("limited", flush=True)
        if number > 3:
            if guarded:
                guard.check(loader)
            # The consumer's own growth: a leak, a neighbour, another rank.
            if number % 2 and len(held) < 12:
                held.append(bytearray(os.urandom(1)) * 5_000_000)
            time.sleep(0.02)
    assert steps == list(range(30))
    print("survived", len(held), loader.in_flight, flush=True)
    loader.close()


if __name__ == "__main__":
    main()
"""


@pytest.fixture
def group() -> Iterator[Path]:
    """A private memory cgroup, removed afterwards."""
    parent = CGROUP_ROOT / "memory" if (CGROUP_ROOT / "memory").is_dir() else CGROUP_ROOT
    folder = parent / f"stoker-test-{os.getpid()}-{time.monotonic_ns()}"
    try:
        folder.mkdir()
    except OSError as error:
        pytest.skip(f"cannot create a cgroup here: {error}")
    try:
        if not any((folder / name).exists() for name in ("memory.max", "memory.limit_in_bytes")):
            pytest.skip("cgroups here do not limit memory")
        yield folder
    finally:
        # It contains only processes that this test started.
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            for pid in (folder / "cgroup.procs").read_text().split():
                with suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
            with suppress(OSError):
                folder.rmdir()
                break
            time.sleep(0.05)


def run(group: Path, folder: Path, guarded: str, engine: str) -> subprocess.CompletedProcess[str]:
    program = folder / "program.py"
    program.write_text(PROGRAM)
    command = [sys.executable, str(program), str(group), guarded, engine, str(folder)]
    environment = os.environ | {"PYTHONPATH": str(PROJECT), "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, env=environment)


@pytest.mark.parametrize("engine", ["process", pytest.param("thread", marks=pytest.mark.release)])
def test_the_guard_gives_memory_back_before_the_kernel_takes_it(group: Path, tmp_path: Path, engine: str) -> None:
    ended = run(group, tmp_path, "guarded", engine)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    lines = ended.stdout.splitlines()
    assert lines[0] == "limited"
    assert lines[1].startswith("memory is down to ")
    assert "batches in flight" in lines[1]
    assert lines[-1].startswith("survived 12 ")
    assert int(lines[-1].split()[-1]) < 16


@pytest.mark.release
def test_without_the_guard_the_kernel_kills(group: Path, tmp_path: Path) -> None:
    ended = run(group, tmp_path, "alone", "process")
    assert "limited" in ended.stdout
    assert "survived" not in ended.stdout
    assert ended.returncode != 0
