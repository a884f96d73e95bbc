"""Reading random patches with their labels, compared in one run: patches/s with two workers on two cores.

`stoker raw` and `stoker blocks64` are packs, read by the real loader: uint8 image and label in one buffer, as they go
to the device. `torch + zarr-python` is a DataLoader that reads the same bytes from Zarr arrays in 128³ chunks of LZ4.
Both read exactly the patch.

`stoker as nnU-Net` draws rotations and scalings with nnU-Net's probabilities and reads the region that each patch
needs. `nnU-Net` is nnU-Net's own data set (blosc2, float32 images, int16 labels), read as its loader does: for every
patch the region that the largest rotation could need. Neither transforms anything; nnU-Net's region is cut to the
patch, which is what leaves its worker.

`memory` is the limit: two threads that copy as many bytes as a patch has from one place to another.

Warm figures are from the page cache; for cold ones it is emptied, and each contender runs alone in a new process.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bench.loaders import PROJECT, Running
from bench.peers.environments import PEERS, python_of
from bench.rounds import Spread, interleave, keep, ratio
from stoker.io.storage_speed import drop_from_cache
from stoker.tasks.demo import scroll_volume

BATCH = 2
SETTINGS = "settings.json"
# Scrolls take seconds to make; a shifted one is as different for a loader.
MADE = 3


@dataclass(frozen=True)
class Contender:
    """A row of the table."""

    name: str
    module: str
    environment: str = ""
    data: str = ""
    law: str = "plain"


CONTENDERS = (
    Contender("torch + zarr-python", "volume_zarr", data="zarr"),
    Contender("nnU-Net", "volume_nnunet", "nnunet", data="nnunet"),
    Contender("stoker raw", "volume_packed", data="raw"),
    Contender("stoker blocks64", "volume_packed", data="blocks64"),
    Contender("stoker as nnU-Net", "volume_packed", data="raw", law="nnunet"),
    Contender("memory", "volume_memory"),
)
RATIOS = (
    ("stoker raw", "torch + zarr-python"),
    ("stoker blocks64", "torch + zarr-python"),
    ("stoker as nnU-Net", "nnU-Net"),
    ("stoker raw", "memory"),
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--cold-rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--volumes", type=int, default=24)
    parser.add_argument("--size", type=int, default=320, help="voxels along each axis of a volume")
    parser.add_argument("--patch", type=int, nargs=3, default=(72, 136, 136))
    parser.add_argument("--cold-patches", type=int, default=40)
    parser.add_argument("--only", nargs="*", help="names of contenders")
    parser.add_argument("--keep", default="volume_reading", help="folder under results/")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="stoker-bench-", dir=os.environ.get("BENCH_DIR")) as name:
        work = Path(name)
        make_data(work, arguments.volumes, arguments.size, tuple(arguments.patch))
        chosen = [one for one in CONTENDERS if not arguments.only or one.name in arguments.only]
        running: dict[str, Running] = {}
        try:
            for contender in chosen:
                start(contender, work, arguments, running)
            warm = interleave({name: run.measure for name, run in running.items()}, arguments.rounds)
        finally:
            for run in running.values():
                run.process.kill()
                run.process.wait()
        cold: dict[str, list[float]] = {}
        for _ in range(arguments.cold_rounds):
            for contender in chosen:
                if contender.name in running and contender.data:
                    cold.setdefault(contender.name, []).append(measure_cold(contender, work, arguments))
                    sys.stderr.write(f"cold  {contender.name}: {cold[contender.name][-1]:.4g}\n")
        sizes = {one.data: folder_bytes(work / one.data) for one in chosen if one.data and one.name in running}
    report(warm, {name: Spread(tuple(found)) for name, found in cold.items()}, sizes, arguments)
    return 0


def make_data(work: Path, volumes: int, size: int, patch: tuple[int, ...]) -> None:
    """The same volumes as Zarr arrays and as packs; nnU-Net's process makes its own from the `.npy` files."""
    import zarr
    from zarr.codecs import BloscCodec

    source = work / "source"
    source.mkdir()
    made = [scroll_volume((size, size, size), seed) for seed in range(min(volumes, MADE))]
    lines = ["classes: 2", "ignore_label: 2", "cases:"]
    for number in range(volumes):
        sys.stderr.write(f"making volume {number + 1}/{volumes} ...\n")
        for kind, voxels in zip(("image", "label"), made[number % MADE], strict=True):
            shifted = np.roll(voxels, 17 * number, axis=(0, 1, 2))
            np.save(source / f"{number}.{kind}.npy", shifted)
            array = zarr.create_array(
                work / "zarr" / f"{number}.{kind}.zarr", shape=shifted.shape, chunks=(min(128, size),) * 3,
                dtype=shifted.dtype, compressors=BloscCodec(cname="lz4", clevel=5, shuffle="bitshuffle"),
            )  # fmt: skip
            array[...] = shifted
        lines.append(f"  - {{image: {number}.image.npy, label: {number}.label.npy}}")
    (source / "cases.yaml").write_text("\n".join(lines) + "\n")
    settings = {"volumes": volumes, "patch": patch, "batch": BATCH}
    (work / SETTINGS).write_text(json.dumps(settings))
    for layout in ("raw", "blocks64"):
        command = [sys.executable, "-m", "stoker", "pack", source / "cases.yaml", work / layout, "--layout", layout]
        subprocess.run([*map(str, command)], check=True, stdout=sys.stderr, cwd=PROJECT)


def start(contender: Contender, work: Path, arguments: argparse.Namespace, running: dict[str, Running]) -> None:
    """Starts a contender's process; one that cannot be started is left out, and told."""
    python = python_of(contender.environment)
    if python is None:
        return
    log = work / f"{contender.name}.log"
    command = [str(python), "-m", f"bench.peers.{contender.module}", str(work), str(work / contender.data)]
    process = subprocess.Popen(
        [*command, "--workers", str(arguments.workers)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log.open("w"), text=True, cwd=PROJECT,
        env=os.environ | {
            "PYTHONPATH": str(PROJECT), "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "LAW": contender.law,
        },
    )  # fmt: skip
    run = Running(process, arguments.seconds, log)
    sys.stderr.write(f"starting {contender.name} ...\n")
    if run.wait_until_ready():
        running[contender.name] = run
    else:
        process.kill()
        tail = log.read_text().strip().splitlines()[-3:]
        sys.stderr.write(f"{contender.name}: skipped, did not start\n  " + "\n  ".join(tail) + "\n")


def measure_cold(contender: Contender, work: Path, arguments: argparse.Namespace) -> float:
    """Patches/s of a new process whose files are not in memory."""
    running: dict[str, Running] = {}
    start(contender, work, arguments, running)
    run = running[contender.name]
    try:
        for path in sorted((work / contender.data).rglob("*")):
            if path.is_file():
                drop_from_cache(str(path))
        assert run.process.stdin is not None
        assert run.process.stdout is not None
        run.process.stdin.write(f"cold {arguments.cold_patches // BATCH}\n")
        run.process.stdin.flush()
        return float(run.process.stdout.readline())
    finally:
        run.process.kill()
        run.process.wait()


def folder_bytes(folder: Path) -> int:
    """Bytes of all files in a contender's data."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def report(
    warm: dict[str, Spread], cold: dict[str, Spread], sizes: dict[str, int], arguments: argparse.Namespace
) -> None:
    ratios = {
        kind: {
            f"{ours} / {peer}": ratio(found[ours], found[peer])
            for ours, peer in RATIOS
            if ours in found and peer in found
        }
        for kind, found in (("warm", warm), ("cold", cold))
    }
    document = {
        "workers": arguments.workers,
        "volumes": arguments.volumes,
        "size": arguments.size,
        "patch": list(arguments.patch),
        "nnunet": list(PEERS["nnunet"].packages[:2]),
        "bytes": sizes,
        "warm_patches_per_second": {name: spread.as_dict() for name, spread in warm.items()},
        "cold_patches_per_second": {name: spread.as_dict() for name, spread in cold.items()},
        "ratios": {kind: {name: one.as_dict() for name, one in found.items()} for kind, found in ratios.items()},
    }
    path = keep(arguments.keep, document)
    print(f"{'patches/s':<28}{'warm':>26}{'cold':>26}")
    for name, spread in warm.items():
        cells = [_cell(spread), _cell(cold[name]) if name in cold else "–"]
        print(f"{name:<28}" + "".join(f"{cell:>26}" for cell in cells))
    for kind, found in ratios.items():
        for name, spread in found.items():
            print(f"{kind}  {name}: {_cell(spread, 2)}x")
    print(f"wrote {path}")


def _cell(spread: Spread, digits: int = 0) -> str:
    low, high = min(spread.values), max(spread.values)
    return f"{spread.median:,.{digits}f} ({low:,.{digits}f}-{high:,.{digits}f})"


if __name__ == "__main__":
    sys.exit(main())
