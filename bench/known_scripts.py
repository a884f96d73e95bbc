"""The doctor attached to widely used training scripts, unmodified.

`python -m bench.known_scripts --timm TIMM/train.py --torchvision VISION/references/classification/train.py`, from a
checkout of each. Every script runs alone and attached: once on large pictures with a single worker, so that decoding is
the bottleneck, and once on small pictures with a larger network. Exit code and losses must not change, and the verdict
must be right.
"""

from __future__ import annotations

import argparse
import csv
import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from bench.quiet import wait_for_quiet
from bench.rounds import keep

PICTURES = {"train": 96, "val": 8}
CLASSES = 8


@dataclass(frozen=True)
class Situation:
    """Data and settings with a known bottleneck."""

    name: str
    side: int
    workers: int
    crop: int
    networks: dict[str, str]
    """Network by script."""
    verdict: str


SITUATIONS = (
    Situation("large pictures, one worker", 3200, 1, 64,
              {"timm": "test_resnet", "torchvision": "shufflenet_v2_x0_5"}, "too-few-workers"),
    Situation("small pictures, a larger network", 64, 2, 224, {"timm": "resnet18", "torchvision": "resnet18"},
              "compute-bound"),
)  # fmt: skip


def write_pictures(folder: Path, side: int) -> None:
    """Class folders of random pictures."""
    rng = np.random.default_rng(0)
    for split, count in PICTURES.items():
        for number in range(count):
            place = folder / split / f"class{number % CLASSES}"
            place.mkdir(parents=True, exist_ok=True)
            coarse = Image.fromarray(rng.integers(0, 255, (side // 4, side // 4, 3), dtype=np.uint8))
            coarse.resize((side, side)).save(place / f"{number}.jpg", quality=85)


def timm_command(script: Path, situation: Situation, data: Path, out: Path) -> list[str]:
    return [
        sys.executable, str(script), str(data), "--model", situation.networks["timm"], "--num-classes", str(CLASSES),
        "--device", "cpu", "--workers", str(situation.workers), "-b", "8", "--epochs", "1", "--sched-on-updates",
        "--input-size", "3", str(situation.crop), str(situation.crop), "--seed", "7", "--output", str(out),
        "--experiment", "x", "--log-interval", "100",
    ]  # fmt: skip


def torchvision_command(script: Path, situation: Situation, data: Path, out: Path) -> list[str]:
    crop = str(situation.crop)
    out.mkdir()
    return [
        sys.executable, str(script), "--data-path", str(data), "--model", situation.networks["torchvision"],
        "--device", "cpu", "-j", str(situation.workers), "-b", "8", "--epochs", "1", "--train-crop-size", crop,
        "--val-resize-size", crop, "--val-crop-size", crop, "--output-dir", str(out), "--print-freq", "100",
    ]  # fmt: skip


COMMANDS = {"timm": timm_command, "torchvision": torchvision_command}


def losses(name: str, out: Path) -> list[str] | None:
    """The losses of a run; None if the script cannot be seeded or does not write them to a file."""
    if name != "timm":
        return None
    with (out / "x" / "summary.csv").open() as file:
        return [f"{row['train_loss']} {row['eval_loss']}" for row in csv.DictReader(file)]


def run(command: list[str], attached: bool) -> tuple[int, dict[str, Any]]:
    wait_for_quiet(20.0)
    before = [sys.executable, "-m", "stoker", "doctor", "--json", "--"] if attached else []
    done = subprocess.run([*before, *command], capture_output=True, text=True, timeout=600)
    if done.returncode != 0:
        sys.stderr.write(done.stderr[-3000:])
    return done.returncode, json.loads(done.stdout) if attached and done.returncode == 0 else {}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in COMMANDS:
        parser.add_argument(f"--{name}", type=Path, help="train.py in a checkout")
    scripts = {name: path for name, path in vars(parser.parse_args()).items() if path is not None}
    if not scripts:
        parser.error("pass at least one script")
    rows = []
    with tempfile.TemporaryDirectory(prefix="stoker-scripts-") as folder_name:
        for number, situation in enumerate(SITUATIONS):
            data = Path(folder_name) / f"data{number}"
            write_pictures(data, situation.side)
            for name, script in scripts.items():
                outs = [Path(folder_name) / f"{name}-{number}-{kind}" for kind in ("alone", "attached")]
                alone, _ = run(COMMANDS[name](script, situation, data, outs[0]), False)
                code, document = run(COMMANDS[name](script, situation, data, outs[1]), True)
                same = None if losses(name, outs[0]) is None else losses(name, outs[0]) == losses(name, outs[1])
                verdict = document.get("verdict")
                right = alone == code == 0 and same is not False and verdict == situation.verdict
                rows.append({"script": name, "situation": situation.name, "exit_codes": [alone, code],
                             "losses_are_the_same": same, "truth": situation.verdict, "verdict": verdict,
                             "wait_share": document.get("wait_share"), "right": right})  # fmt: skip
                print(json.dumps(rows[-1]), flush=True)
    print(f"wrote {keep('known_scripts', {'rows': rows})}")
    return 0 if all(row["right"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
