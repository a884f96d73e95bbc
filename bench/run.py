"""`make bench`: runs the named benchmarks, or all of them."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

PROJECT = Path(__file__).parents[1]
WITHOUT_DATA = (
    "startup", "index", "augment", "checkpoint", "loop", "clock_cost", "attach_overhead", "what_if", "verdicts", "vram",
    "roofline", "volume_reading", "volume_augment", "document_pipeline", "volume_prediction", "volume_s3",
    "stage", "stage_faults", "auto_loader", "plan_spread", "tune",
)  # fmt: skip
WITH_DATA = (
    "decode", "resize", "interpreter_lock", "loaders", "memory", "object_store", "stage_overlap", "paced", "priority",
    "loader_memory", "cures",
)  # fmt: skip
BY_HAND = {
    "known_scripts": "checkouts of timm and torchvision: python -m bench.known_scripts --help",
    "revisions": "two checkouts of stoker: python -m bench.revisions --help",
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help=f"any of {', '.join(WITHOUT_DATA + WITH_DATA)} (default: all)")
    parser.add_argument("--data", type=Path, help="folder of class folders with real images")
    arguments = parser.parse_args()
    unknown = set(arguments.names) - {*WITHOUT_DATA, *WITH_DATA}
    if unknown:
        parser.error(f"unknown benchmark: {', '.join(sorted(unknown))}")
    code = 0
    for name in arguments.names or (*WITHOUT_DATA, *WITH_DATA):
        if name in WITH_DATA and arguments.data is None:
            print(f"{name}: skipped, needs real images (make bench DATA=folder)")
            continue
        data = [str(arguments.data.resolve())] if name in WITH_DATA else []
        print(f"== {name}", flush=True)
        code |= subprocess.run([sys.executable, "-m", f"bench.{name}", *data], cwd=PROJECT).returncode
    for name, needs in BY_HAND.items():
        if not arguments.names:
            print(f"{name}: skipped, needs {needs}")
    return code


if __name__ == "__main__":
    sys.exit(main())
