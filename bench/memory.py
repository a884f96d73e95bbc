"""Memory of the whole process tree while a loader runs: flat over twenty epochs? and beside torch's.

PSS counts a page that several processes share once, so that forked workers are not counted twice.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

from bench.loaders import COPIES, PROJECT, link_copies
from bench.rounds import keep

CONTENDERS = {
    "torch + PIL": ("torch_pil", ""),
    "stoker threads": ("stoker_loader", "loader=thread prefetch_factor=2"),
    "stoker processes": ("stoker_loader", "loader=process prefetch_factor=2"),
}


def tree_pss(root: int) -> int:
    """Bytes of a process and all its descendants."""
    total, waiting = 0, [root]
    while waiting:
        pid = waiting.pop()
        try:
            rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
            total += next(int(line.split()[1]) * 1024 for line in rollup.splitlines() if line.startswith("Pss:"))
            for task in Path(f"/proc/{pid}/task").iterdir():
                waiting += [int(child) for child in (task / "children").read_text().split()]
        except (OSError, StopIteration):
            continue  # it ended while we looked
    return total


def measure(module: str, overrides: str, images: Path, work: Path, epochs: int) -> list[int]:
    """Peak PSS within each epoch's worth of time."""
    environment = os.environ | {"PYTHONPATH": str(PROJECT), "STOKER_OVERRIDES": overrides, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", f"bench.peers.{module}", str(images), str(work / module), "--workers", "2"]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment,
        cwd=PROJECT,
    )  # fmt: skip
    assert process.stdin is not None
    assert process.stdout is not None
    count = sum(1 for path in images.rglob("*") if path.is_file())
    peaks: list[int] = []
    try:
        process.stdout.readline()
        seconds = 2.0
        for _ in range(epochs):
            peak, ended = [0], threading.Event()

            def watch(peak: list[int] = peak, ended: threading.Event = ended) -> None:
                while not ended.wait(0.1):
                    peak[0] = max(peak[0], tree_pss(process.pid))

            watcher = threading.Thread(target=watch)
            watcher.start()
            process.stdin.write(f"{seconds}\n")
            process.stdin.flush()
            rate = float(process.stdout.readline())
            ended.set()
            watcher.join()
            peaks.append(peak[0])
            seconds = count / rate  # the next one is a whole epoch
            sys.stderr.write(f"{module} {overrides}: {peak[0] / 1e6:.0f} MB\n")
    finally:
        process.kill()
    return peaks


def slope(values: list[int]) -> float:
    """Bytes an epoch, by least squares over all but the first two epochs, in which buffers are made."""
    settled = values[2:]
    return statistics.linear_regression(range(len(settled)), settled).slope


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("images", type=Path)
    parser.add_argument("--epochs", type=int, default=20)
    arguments = parser.parse_args()
    found = {}
    with tempfile.TemporaryDirectory(prefix="stoker-bench-") as name:
        images = link_copies(arguments.images, Path(name) / "images", COPIES)
        for contender, (module, overrides) in CONTENDERS.items():
            peaks = measure(module, overrides, images, Path(name), arguments.epochs)
            found[contender] = {
                "peak_pss_bytes": max(peaks),
                "slope_bytes_per_epoch": slope(peaks),
                "peak_of_each_epoch": peaks,
            }
    path = keep("memory", {"workers": 2, "prefetch_factor": 2, "batch": 64, "contenders": found})
    for contender, figures in found.items():
        peak, rise = figures["peak_pss_bytes"], figures["slope_bytes_per_epoch"]
        print(f"{contender:<20} peak {peak / 1e6:7.0f} MB   {rise / 1e6:+.2f} MB an epoch")  # type: ignore[operator]
    print(f"kept in {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
