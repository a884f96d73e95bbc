"""Reading and augmenting patches on the same cores, compared with batchgeneratorsv2: patches/s with nnU-Net's default
training transforms, at the same probabilities and ranges.

From memory-mapped files in the page cache to finished tensors: float32 images and labels. nnU-Net's volumes are float32
and normalised beforehand, ours are the bytes of the scan. On a GPU our part of the augmentation would leave the cores.
`nearest labels` is the peer with the same rule for labels as ours; nnU-Net's own interpolates every class.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bench.loaders import Running
from bench.peers.environments import PEERS, python_of
from bench.rounds import Spread, interleave, keep, ratio
from stoker.tasks.demo import scroll_volume

PROJECT = Path(__file__).parents[1]
BATCH = 2
PEER, PEER_NEAREST, OURS, OURS_PLAIN = "nnU-Net's transforms", "nearest labels", "stoker", "stoker, not augmented"
CONTENDERS = {
    PEER: ("volume_batchgenerators", "batchgeneratorsv2", {}),
    PEER_NEAREST: ("volume_batchgenerators", "batchgeneratorsv2", {"LABELS": "nearest"}),
    OURS: ("volume_stoker", "", {}),
    OURS_PLAIN: ("volume_stoker", "", {"AUGMENT": "no"}),
}
PATCH_FILE = "patch.json"


def patch_of(data: Path) -> tuple[int, int, int]:
    """The patch of a benchmark's data."""
    z, y, x = json.loads((data / PATCH_FILE).read_text())
    return z, y, x


def statistics_of(cases: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Any mean and deviation: the time does not depend on them."""
    return np.full((cases, 1), 80, np.float32), np.full((cases, 1), 40, np.float32)


def write_data(root: Path, volumes: int, size: int, patch: tuple[int, int, int]) -> None:
    """The same volumes twice: as bytes, and as nnU-Net has them."""
    (root / "float32").mkdir(parents=True)
    lines = []
    for number in range(volumes):
        sys.stderr.write(f"making volume {number + 1}/{volumes} ...\n")
        image, label = scroll_volume((size, size, size), seed=number)
        np.save(root / f"{number}.image.npy", image)
        np.save(root / f"{number}.label.npy", label)
        normalised = (image.astype(np.float32) - np.float32(image.mean())) / np.float32(image.std())
        np.save(root / "float32" / f"{number}.image.npy", normalised)
        np.save(root / "float32" / f"{number}.label.npy", label)
        lines.append(f"- {{image: {number}.image.npy, label: {number}.label.npy}}\n")
    (root / "cases.yaml").write_text("".join(lines))
    (root / PATCH_FILE).write_text(json.dumps(patch))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=20.0, help="of each contender in each round")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--volumes", type=int, default=4)
    parser.add_argument("--size", type=int, default=320, help="side of a volume, in voxels")
    parser.add_argument("--patch", type=int, nargs=3, default=(72, 136, 136))
    parser.add_argument("--keep", default="volume_augment", help="folder under results/")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="stoker-bench-") as name:
        work = Path(name)
        write_data(work / "data", arguments.volumes, arguments.size, tuple(arguments.patch))
        running: dict[str, Running] = {}
        try:
            for contender in CONTENDERS:
                _start(contender, work, arguments, running)
            spreads = interleave({name: run.measure for name, run in running.items()}, arguments.rounds)
        finally:
            for run in running.values():
                run.process.kill()
    report(spreads, arguments)
    return 0


def report(spreads: dict[str, Spread], arguments: argparse.Namespace) -> None:
    ratios = {
        f"{ours} / {peer}": ratio(spreads[ours], spreads[peer])
        for ours in (OURS, OURS_PLAIN)
        for peer in (PEER, PEER_NEAREST)
        if ours in spreads and peer in spreads
    }
    document = {
        "peer": [*PEERS["batchgeneratorsv2"].packages, "transforms of nnunetv2 2.8.1"],
        "workers": arguments.workers,
        "patch": list(arguments.patch),
        "batch": BATCH,
        "volumes": [arguments.volumes, arguments.size],
        "patches_per_second": {name: spread.as_dict() for name, spread in spreads.items()},
        "ratios": {name: spread.as_dict() for name, spread in ratios.items()},
    }
    path = keep(arguments.keep, document)
    for name, spread in spreads.items():
        print(f"{name:<46}{spread.median:8.2f} patches/s  ({min(spread.values):.2f}-{max(spread.values):.2f})")
    for name, spread in ratios.items():
        print(f"{name:<46}{spread.median:8.2f} x          ({min(spread.values):.2f}-{max(spread.values):.2f})")
    print(f"wrote {path}")


def _start(name: str, work: Path, arguments: argparse.Namespace, running: dict[str, Running]) -> None:
    module, environment, settings = CONTENDERS[name]
    python = python_of(environment)
    if python is None:
        return
    log = work / f"{name}.log"
    command = [str(python), "-m", f"bench.peers.{module}", str(work / "data"), str(work / module)]
    process = subprocess.Popen(
        [*command, "--workers", str(arguments.workers)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=log.open("w"),
        text=True,
        env=os.environ | {"PYTHONPATH": f"{PROJECT}:{PROJECT / 'src'}", "PYTHONWARNINGS": "ignore", **settings},
        cwd=PROJECT,
    )
    run = Running(process, arguments.seconds, log)
    sys.stderr.write(f"starting {name} ...\n")
    if run.wait_until_ready():
        running[name] = run
    else:
        process.kill()
        tail = log.read_text().strip().splitlines()[-3:]
        sys.stderr.write(f"{name}: skipped, did not start\n  " + "\n  ".join(tail) + "\n")


if __name__ == "__main__":
    sys.exit(main())
