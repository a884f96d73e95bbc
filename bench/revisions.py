"""Two revisions of stoker in one run: did a refactoring change speed or results?

Takes two checkouts and alternates between their own benchmarks: images/s of the loader (threads, processes, packed),
the training loop relative to a bare torch loop, the pause for a checkpoint, and `stoker --help`. It also trains the
demo with both and compares every loss and the final weights bit by bit. Ratios are new / old, round by round.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from bench.loaders import COPIES, Running, link_copies, pack
from bench.rounds import Spread, interleave, keep, ratio
from bench.startup import time_of

# The decoder is fixed: if each revision chose by measurement, they might choose differently.
LOADERS = {"threads": "loader=thread decoder=turbojpeg", "processes": "loader=process decoder=turbojpeg"}


class Revision:
    """A copy of a checkout, so that its benchmarks write their results there."""

    def __init__(self, name: str, checkout: Path, work: Path) -> None:
        self.name, self.folder = name, work / name
        for part in ("src", "bench", "configs"):
            ignored = shutil.ignore_patterns("__pycache__", ".peers")
            shutil.copytree(checkout / part, self.folder / part, ignore=ignored)
        paths = os.pathsep.join([str(self.folder / "src"), str(self.folder)])
        self.environment = os.environ | {
            "PYTHONPATH": paths,
            "XDG_CACHE_HOME": str(self.folder / "cache"),
            "OMP_NUM_THREADS": "1",
            "OMP_WAIT_POLICY": "PASSIVE",
        }
        git = ["git", "-C", str(checkout), "describe", "--always", "--dirty", "--abbrev=12"]
        self.commit = subprocess.run(git, check=True, capture_output=True, text=True).stdout.strip()

    def run(self, *arguments: str) -> str:
        done = subprocess.run(
            [sys.executable, *arguments], cwd=self.folder, env=self.environment, capture_output=True, text=True
        )
        # A benchmark exits with 1 if it misses its own target; its figures are still valid.
        if done.returncode not in (0, 1):
            raise SystemExit(f"{self.name}: {' '.join(arguments)} failed\n{done.stderr[-2000:]}")
        return done.stdout

    def benchmark(self, name: str, *arguments: str) -> dict[str, Any]:
        self.run("-m", f"bench.{name}", *arguments)
        found: dict[str, Any] = json.loads((self.folder / "results" / name / "result.json").read_text())["measured"]
        return found

    def start_loader(self, images: Path, engine: str, seconds: float) -> Running:
        log = self.folder / f"{engine}-{images.name}.log"
        process = subprocess.Popen(
            [sys.executable, "-m", "bench.peers.stoker_loader", str(images), str(self.folder / "work")],
            cwd=self.folder, env=self.environment | {"STOKER_OVERRIDES": LOADERS[engine]}, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log.open("w"),
        )  # fmt: skip
        running = Running(process, seconds, log)
        if not running.wait_until_ready():
            raise SystemExit(f"{self.name}: the loader did not start\n{log.read_text()[-2000:]}")
        return running

    def demo(self) -> list[float]:
        """Every loss of the demo's training, with a fixed seed."""
        self.run("-m", "stoker", "demo", "--folder", str(self.folder / "demo"), "--fresh", "--json")
        [metrics] = (self.folder / "demo" / "runs").glob("*/metrics.jsonl")
        records = [json.loads(line) for line in metrics.read_text().splitlines()]
        return [record[key] for record in records for key in ("train/loss", "val/loss", "val/acc1") if key in record]

    def weights(self, work: Path) -> bytes:
        """The demo's final weights, as the revision itself exports them to safetensors."""
        [checkpoint] = (self.folder / "demo" / "runs").glob("*/checkpoints/last.ckpt")
        target = work / f"{self.name}.safetensors"
        self.run("-m", "stoker", "export", str(checkpoint), str(target), "--to", "safetensors")
        data = target.read_bytes()
        header = int.from_bytes(data[:8], "little")  # skips the metadata, which contains the version
        return data[8 + header :]


def compare(pair: tuple[Revision, Revision], measure: Callable[[Revision], float], rounds: int) -> dict[str, Any]:
    """One figure for both revisions, in interleaved rounds, with the ratio new / old of each round."""
    return comparison(interleave({revision.name: partial(measure, revision) for revision in pair}, rounds))


def comparison(spreads: dict[str, Spread]) -> dict[str, Any]:
    return {name: spread.as_dict() for name, spread in spreads.items()} | {
        "ratio": ratio(spreads["new"], spreads["old"]).as_dict()
    }


def compare_loaders(
    pair: tuple[Revision, Revision], images: Path, engine: str, rounds: int, seconds: float
) -> dict[str, Any]:
    running = {revision.name: revision.start_loader(images, engine, seconds) for revision in pair}
    try:
        return comparison(interleave({name: run.measure for name, run in running.items()}, rounds))
    finally:
        for run in running.values():
            run.process.kill()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=Path, help="checkout of the older revision")
    parser.add_argument("new", type=Path, help="checkout of the newer revision")
    parser.add_argument("--images", type=Path, help="class folders of real images; if not given, loaders are skipped")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=4.0, help="how long each loader runs per round")
    parser.add_argument("--keep", default="revisions", help="folder under results/")
    arguments = parser.parse_args()
    rounds = arguments.rounds
    with tempfile.TemporaryDirectory(prefix="stoker-bench-") as name:
        work = Path(name)
        pair = Revision("old", arguments.old, work), Revision("new", arguments.new, work)
        losses = [revision.demo() for revision in pair]
        weights = [revision.weights(work) for revision in pair]
        found: dict[str, Any] = {
            "commits": {revision.name: revision.commit for revision in pair},
            "demo": {
                "figures_compared": len(losses[0]),
                "identical_figures": losses[0] == losses[1],
                "identical_weights": weights[0] == weights[1],
            },
        }
        figures: dict[str, dict[str, Any]] = {}
        if arguments.images is not None:
            images = link_copies(arguments.images, work / "images", COPIES)
            packed = pack(images, work / "packed")
            for label, source in (("images", images), ("packed", packed)):
                for engine in LOADERS:
                    key = f"loader, {label}, {engine}: images/s"
                    figures[key] = compare_loaders(pair, source, engine, rounds, arguments.seconds)
        figures["stoker --help: seconds"] = compare(
            pair, lambda r: time_of(sys.executable, "-m", "stoker", "--help", env=r.environment), 3 * rounds
        )
        figures["loop: time of a step beside a bare loop"] = compare(
            pair, lambda r: r.benchmark("loop", "--rounds", "3")["ratio"]["median"], rounds
        )
        figures["checkpoint: pause of the loop in seconds"] = compare(
            pair, lambda r: r.benchmark("checkpoint", "--rounds", "3")["seconds"]["pause of the loop"]["median"], rounds
        )
    path = keep(arguments.keep, found | {"figures": figures})
    print(f"demo: {len(losses[0])} figures, {'identical' if losses[0] == losses[1] else 'DIFFERENT'}; ", end="")
    print(f"final weights {'identical' if weights[0] == weights[1] else 'DIFFERENT'}")
    for key, figure in figures.items():
        old, new, spread = figure["old"]["median"], figure["new"]["median"], figure["ratio"]
        print(f"{key:<44} {old:10.4g} {new:10.4g}  {spread['median']:.3f}x ({spread['min']:.3f}-{spread['max']:.3f})")
    print(f"wrote {path}")
    return 0 if all(found["demo"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
