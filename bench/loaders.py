"""Loaders compared in one run: images/s from the same files, with two workers on two cores.

The upper bound is bare libjpeg-turbo decoding whole images. torch, timm, WebDataset, LitData and DALI return
normalised floats, as they are normally used; FFCV and stoker return bytes and leave the rest to the device.
`torch bytes` shows how much of the difference that alone explains.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from bench.peers.environments import python_of
from bench.quiet import wait_for_quiet
from bench.rounds import Spread, interleave, keep, ratio

PROJECT = Path(__file__).parents[1]
# 400 images are an epoch of six batches, most of which is start-up; linked eight times, they are fifty batches.
COPIES = 8
SETTLING_S = 3.0


@dataclass(frozen=True)
class Contender:
    """A row of the table."""

    name: str
    module: str
    environment: str = ""
    overrides: str = ""
    packed: bool = False


CONTENDERS = (
    Contender("torch + PIL", "torch_pil"),
    Contender("torch bytes", "torch_bytes"),
    Contender("timm", "timm_loader"),
    Contender("webdataset", "webdataset_loader"),
    Contender("litdata", "litdata_loader", "litdata"),
    Contender("dali cpu", "dali_loader", "dali"),
    Contender("ffcv 500 px", "ffcv_loader", "ffcv"),
    Contender("bare decode", "bare_decode"),
    Contender("stoker", "stoker_loader"),
    Contender("stoker threads", "stoker_loader", overrides="loader=thread"),
    Contender("stoker processes", "stoker_loader", overrides="loader=process"),
    Contender("stoker draft", "stoker_loader", overrides="decode_mode=draft"),
    Contender("stoker without turbojpeg", "stoker_loader", overrides="decoder=simplejpeg"),
    Contender("bare decode 500 px", "bare_decode", packed=True),
    Contender("stoker packed 500 px", "stoker_loader", packed=True),
    Contender("stoker packed threads", "stoker_loader", overrides="loader=thread", packed=True),
    Contender("stoker packed processes", "stoker_loader", overrides="loader=process", packed=True),
    Contender("stoker packed without turbojpeg", "stoker_loader", overrides="decoder=simplejpeg", packed=True),
)


@dataclass
class Running:
    """A contender's process."""

    process: subprocess.Popen[str]
    seconds: float
    log: Path = field(default_factory=Path)

    def measure(self) -> float:
        assert self.process.stdin is not None
        # The workers of the contender before go on until their queues are full: for half a second after torch's, which
        # would make whoever comes next look slower.
        wait_for_quiet(SETTLING_S)
        self.process.stdin.write(f"{self.seconds}\n")
        self.process.stdin.flush()
        return float(self._line())

    def wait_until_ready(self) -> bool:
        try:
            return self._line().strip() == "ready"
        except EOFError:
            return False

    def _line(self) -> str:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            # Some peers print to stdout themselves; only a number or 'ready' comes from our code.
            if line.strip() == "ready" or line.strip().replace(".", "", 1).replace("e", "", 1).isdigit():
                return line
        raise EOFError


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("images", type=Path, help="folder of class folders with real images")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--only", nargs="*", help="names of contenders")
    parser.add_argument("--keep", default="loaders", help="folder under results/")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="stoker-bench-") as name:
        work = Path(name)
        images = link_copies(arguments.images, work / "images", COPIES)
        packed = pack(images, work / "packed")
        running: dict[str, Running] = {}
        try:
            for contender in CONTENDERS:
                if not arguments.only or contender.name in arguments.only:
                    _start(contender, images, packed, work, arguments, running)
            spreads = interleave({name: run.measure for name, run in running.items()}, arguments.rounds)
        finally:
            for run in running.values():
                run.process.kill()
    report(spreads, arguments.keep, arguments.workers)
    return 0


def report(spreads: dict[str, Spread], folder: str, workers: int) -> None:
    document = {"workers": workers, "images_per_second": {n: s.as_dict() for n, s in spreads.items()}, "ratios": {}}
    for base in ("torch + PIL", "bare decode", "bare decode 500 px", "ffcv 500 px"):
        if base in spreads:
            document["ratios"][base] = {n: ratio(s, spreads[base]).as_dict() for n, s in spreads.items()}  # type: ignore[index]
    path = keep(folder, document)
    bases = [base for base in ("torch + PIL", "bare decode", "ffcv 500 px") if base in spreads]
    print(f"{'':<34}{'images/s':>10}" + "".join(f"{'x ' + base:>26}" for base in bases))
    for name, spread in spreads.items():
        ratios = [ratio(spread, spreads[base]) for base in bases]
        cells = "".join(f"{f'{r.median:.2f} ({min(r.values):.2f}-{max(r.values):.2f})':>26}" for r in ratios)
        print(f"{name:<34}{spread.median:>10,.0f}{cells}")
    print(f"wrote {path}")


def link_copies(source: Path, target: Path, copies: int) -> Path:
    """Copies the files once and hard-links them several times, for an epoch long enough to measure."""
    visible = (path for path in source.glob("[!.]*/*") if path.is_file() and not path.name.startswith("."))
    for path in sorted(visible):
        folder = target / path.parent.name
        folder.mkdir(parents=True, exist_ok=True)
        first = folder / f"0_{path.name}"
        shutil.copyfile(path, first)
        for number in range(1, copies):
            os.link(first, folder / f"{number}_{path.name}")
    return target


def pack(images: Path, target: Path) -> Path:
    """Packs shards with the settings of the FFCV file: longest side 500 px, everything re-encoded at quality 90."""
    command = [sys.executable, "-m", "stoker", "pack", str(images), str(target), "--longest", "500", "--quality", "90"]
    subprocess.run(command, check=True, stdout=sys.stderr, cwd=PROJECT)
    found = [path.parent for path in target.rglob("index.json") if ".index" not in path.parts]
    return found[0]


def unpack(shards: Path, target: Path) -> Path:
    """Extracts the packed images to files, for the bare decoder."""
    import tarfile

    target.mkdir(exist_ok=True)
    for shard in sorted(shards.glob("*.tar")):
        with tarfile.open(shard) as tar:
            for member in tar:
                stream = tar.extractfile(member)
                if member.name.endswith(".jpg") and stream is not None:
                    (target / Path(member.name).name).write_bytes(stream.read())
    return target


def _start(
    contender: Contender,
    images: Path,
    packed: Path,
    work: Path,
    arguments: argparse.Namespace,
    running: dict[str, Running],
) -> None:
    python = python_of(contender.environment)
    if python is None:
        return
    source = packed if contender.packed else images
    if contender.packed and contender.module == "bare_decode":
        source = unpack(packed, work / "unpacked")
    log = work / f"{contender.name}.log"
    environment = os.environ | {
        "PYTHONPATH": str(PROJECT),
        "STOKER_OVERRIDES": contender.overrides,
        "OMP_NUM_THREADS": "1",
        "PYTHONWARNINGS": "ignore",
    }
    command = [str(python), "-m", f"bench.peers.{contender.module}", str(source), str(work / contender.module)]
    process = subprocess.Popen(
        [*command, "--workers", str(arguments.workers)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=log.open("w"),
        text=True,
        env=environment,
        cwd=PROJECT,
    )
    run = Running(process, arguments.seconds, log)
    sys.stderr.write(f"starting {contender.name} ...\n")
    if run.wait_until_ready():
        running[contender.name] = run
    else:
        process.kill()
        tail = log.read_text().strip().splitlines()[-3:]
        sys.stderr.write(f"{contender.name}: skipped, did not start\n  " + "\n  ".join(tail) + "\n")


if __name__ == "__main__":
    sys.exit(main())
