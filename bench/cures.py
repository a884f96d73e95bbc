"""The speed-up from staging and packing: predicted from trials without them, then measured.

Staging: samples on a real S3 server behind a proxy with high latency or low bandwidth, then the same files on the local
disk. Packing: the original files, then shards of 500 px, both local. The consumer takes almost no time, so that the
loader is the only bottleneck. Server and proxy run on the same cores as the loader, and the prediction assumes that
they would keep running: it underestimates the gain from staging by the share of the cores that they use.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tests.support.s3_server import BUCKET, running_s3_server

from bench.loaders import PROJECT, link_copies
from bench.quiet import wait_for_quiet
from bench.rounds import keep
from stoker.config import load_config
from stoker.doctor.config_trials import run_trials
from stoker.doctor.diagnosing import diagnosis_of
from stoker.doctor.what_if import model_of
from stoker.profile.host import HostConfig, fit_to_machine, read_machine

COPIES = 5
SECONDS = 16.0
PACE_S = 0.002
"""Per batch of 32: 16,000 images/s."""
LARGEST_ERROR = 0.25


@dataclass(frozen=True)
class Situation:
    """A data set that is slow to load for one reason."""

    name: str
    fix: str
    latency_ms: float = 0.0
    megabytes_per_second: float | None = None
    settings: tuple[str, ...] = ()


SITUATIONS = (
    Situation("S3 at 8 MB/s", "staging", latency_ms=20, megabytes_per_second=8),
    Situation("S3 at 400 ms, 1 MB ahead", "staging", latency_ms=400, settings=("lookahead=1MB",)),
    Situation("original files", "packing"),
)


def config_of(root: str, work: Path, settings: tuple[str, ...] = ()) -> HostConfig:
    words = [f"data_root={root}", "task=classify", "batch_size=32", "num_workers=2", "pin_memory=false", *settings,
             f"index_dir={work / 'index'}"]  # fmt: skip
    return fit_to_machine(load_config(None, words).config, read_machine())[0]


@contextmanager
def proxied(port: int, latency_ms: float, megabytes_per_second: float | None) -> Iterator[str]:
    """The URL of a proxy to the server on this port, as a process of its own."""
    numbers = [port, latency_ms, *([megabytes_per_second] if megabytes_per_second else [])]
    proxy = subprocess.Popen(
        [sys.executable, "-m", "tests.support.proxy", *map(str, numbers)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=PROJECT,
    )  # fmt: skip
    try:
        assert proxy.stdout is not None
        yield f"http://127.0.0.1:{proxy.stdout.readline().strip()}"
    finally:
        proxy.kill()
        proxy.wait()


def tried(before: HostConfig, after: HostConfig, fix: str) -> dict[str, Any]:
    """One prediction and the speed-up measured afterwards."""
    wait_for_quiet(20.0)
    seen = run_trials(before, SECONDS, pace_s=PACE_S, only=("storage", "together"))
    prediction = next(one for one in diagnosis_of(seen).predictions if one.id == fix)
    wait_for_quiet(20.0)
    measured = run_trials(after, SECONDS / 2, pace_s=PACE_S, only=("together",)).images_per_second
    was = seen.images_per_second
    assert was
    assert measured
    gain, model = prediction.speedup, model_of(seen)
    return {
        "before": round(was, 1), "after": round(measured, 1), "measured_speedup": round(measured / was, 3),
        "predicted": {name: round(value, 3) for name, value in asdict(gain).items()},
        "error": round(gain.expected / (measured / was) - 1, 4), "inside": gain.low <= measured / was <= gain.high,
        "cores_of_others": None if model is None else round(2 - model.setup.cores, 2),
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("images", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="stoker-bench-") as name, running_s3_server() as server:
        work = Path(name)
        local, packed = work / "local", work / "packed"
        images = link_copies(arguments.images, local / "train", COPIES)
        for path in sorted(path for path in images.rglob("*") if path.is_file()):
            server.put(f"train/{path.relative_to(images)}", path.read_bytes())
        pack = [sys.executable, "-m", "stoker", "pack", str(local), str(packed), "--longest", "500", "--quality", "90"]
        subprocess.run(pack, check=True, capture_output=True)
        for number in range(arguments.rounds):
            for situation in SITUATIONS:
                with proxied(server.port, situation.latency_ms, situation.megabytes_per_second) as endpoint:
                    os.environ.update(server.environment(endpoint))
                    stages = situation.fix == "staging"
                    before = config_of(f"s3://{BUCKET}" if stages else str(local), work, situation.settings)
                    after = config_of(str(local if stages else packed), work, situation.settings)
                    row = {"situation": situation.name, "cure": situation.fix, "round": number + 1}
                    rows.append(row | tried(before, after, situation.fix))
                print(rows[-1], flush=True)
    errors = sorted(abs(row["error"]) for row in rows)
    document = {
        "median_error": errors[len(errors) // 2], "worst_error": errors[-1],
        "inside_the_80_percent_interval": sum(row["inside"] for row in rows) / len(rows), "rows": rows,
    }  # fmt: skip
    print(f"wrote {keep('cures', document)}")
    return 0 if document["median_error"] <= LARGEST_ERROR else 1


if __name__ == "__main__":
    sys.exit(main())
