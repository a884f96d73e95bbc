"""Memory of a loader's process tree: whether it stays flat over twenty epochs, and how it compares with torch's.

PSS counts a page shared by several processes once, so that forked workers are not counted twice.
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
    """PSS of a process and all its descendants, in bytes."""
    total, waiting = 0, [root]
    while waiting:
        pid = waiting.pop()
        try:
            rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
            total += next(int(line.split()[1]) * 1024 for line in rollup.splitlines() if line.startswith("Pss:"))
            for task in Path(f"/proc/{pid}/task").iterdir():
                waiting += [int(child) for child in (task / "children").read_text().split()]
        except (OSError, StopIteration):
            continue  # the process ended in the meantime
    return total


def measure(module: str, overrides: str, images: Path, work: Path, epochs: int) -> list[int]:
    """Peak PSS of each epoch, in bytes."""
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
            seconds = count / rate  # from now on a whole epoch at a time
            sys.stderr.write(f"{module} {overrides}: {peak[0] / 1e6:.0f} MB\n")
    finally:
        process.kill()
    return peaks


def slope(values: list[int]) -> float:
    """Growth in bytes per epoch, by least squares over all but the first two epochs, which allocate buffers."""
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
        print(f"{contender:<20} peak {peak / 1e6:7.0f} MB   {rise / 1e6:+.2f} MB per epoch")  # type: ignore[operator]
    print(f"wrote {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
