"""A cold epoch from a real S3 server with 50 ms latency, compared with the same epoch from the local disk.

Server and proxy run on the same cores as the loader and use more CPU per image than decoding does. So in addition to
the plain rates we measure a paced consumer, which takes a batch when an accelerator would and uses no core: there, only
latency can make a difference. The upper bound is the rate that the cores allow with server and proxy on them.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.support.s3_server import BUCKET, running_s3_server

from bench.loaders import PROJECT, Running, link_copies
from bench.rounds import interleave, keep, ratio
from stoker.config import load_config
from stoker.tasks.images.data import choose_decoding, open_loader, open_samples, training_plan
from stoker.tasks.images.image_loader import ImageLoader

LATENCY_MS = 50
COPIES = 3
WORKERS = 2
# A third of what two otherwise idle cores decode, which leaves room for server and proxy.
PACE_IMAGES_PER_S = 250.0


def loader_over(root: str, split: str, work: Path) -> ImageLoader:
    overrides = [f"data_root={root}", "batch_size=64", "pin_memory=false", f"index_dir={work}", "loader=thread"]
    config = load_config(None, overrides).config
    samples = open_samples(config, split)  # type: ignore[arg-type]
    decoding, _ = choose_decoding(config, samples.index)
    return open_loader(config, training_plan(config, samples, decoding), workers=WORKERS)


def epoch_rate(loader: ImageLoader, epoch: int, pace: float | None = None) -> float:
    """Images/s over a whole epoch, including its start."""
    start = time.perf_counter()
    images = 0
    for batch in loader.epoch(epoch):
        images += len(batch)
        if pace is not None:
            time.sleep(max(0.0, start + images / pace - time.perf_counter()))
    return images / (time.perf_counter() - start)


def cpu_seconds(pid: int) -> float:
    """CPU seconds of a process and its descendants."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    own = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return own + sum(cpu_seconds(int(child)) for child in children)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("images", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="stoker-bench-") as name, running_s3_server() as server:
        work = Path(name)
        images = link_copies(arguments.images, work / "images", COPIES)
        for path in sorted(path for path in images.rglob("*") if path.is_file()):
            server.put(f"train/{path.relative_to(images)}", path.read_bytes())
        proxy = subprocess.Popen(
            [sys.executable, "-m", "tests.support.proxy", str(server.port), str(LATENCY_MS)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=PROJECT,
        )  # fmt: skip
        assert proxy.stdout is not None
        endpoint = f"http://127.0.0.1:{proxy.stdout.readline().strip()}"
        os.environ.update(server.environment(endpoint))
        try:
            report(measure(images, work, arguments.rounds, [proxy.pid, server.pid]), [proxy.pid, server.pid])
        finally:
            proxy.kill()
    return 0


def measure(images: Path, work: Path, rounds: int, helpers: list[int]) -> dict[str, object]:
    local = loader_over(str(images), "", work / "local-index")
    remote = loader_over(f"s3://{BUCKET}", "train", work / "remote-index")
    environment = os.environ | {"PYTHONPATH": str(PROJECT), "OBJECTS_URL": f"s3://{BUCKET}/train"}
    one_by_one = subprocess.Popen(
        [sys.executable, "-m", "bench.peers.s3_one_by_one", str(images), str(work / "one"), "--workers", str(WORKERS)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=sys.stderr, text=True, cwd=PROJECT,
        env=environment,
    )  # fmt: skip
    peer = Running(one_by_one, seconds=8.0)
    spent: list[tuple[float, float]] = []
    epochs = iter(range(1_000_000))

    def remote_rate() -> float:
        before = time.process_time() + sum(map(cpu_seconds, helpers))
        rate = epoch_rate(remote, next(epochs))
        spent.append((time.process_time() + sum(map(cpu_seconds, helpers)) - before, len(remote.plan.samples)))
        return rate

    try:
        assert peer.wait_until_ready()
        spreads = interleave(
            {
                "local": lambda: epoch_rate(local, next(epochs)),
                "s3": remote_rate,
                "local paced": lambda: epoch_rate(local, next(epochs), PACE_IMAGES_PER_S),
                "s3 paced": lambda: epoch_rate(remote, next(epochs), PACE_IMAGES_PER_S),
                "one object at a time": peer.measure,
            },
            rounds,
        )
    finally:
        one_by_one.kill()
        local.close()
        remote.close()
    cpu_per_image = sum(seconds for seconds, _ in spent) / sum(images for _, images in spent)
    return {"spreads": spreads, "cpu_s_per_image_with_server": cpu_per_image}


def report(found: dict[str, object], helpers: list[int]) -> None:
    spreads = found["spreads"]
    assert isinstance(spreads, dict)
    cpu = float(found["cpu_s_per_image_with_server"])  # type: ignore[arg-type]
    allowed = len(os.sched_getaffinity(0)) / cpu
    ratios = {
        "s3 / local": ratio(spreads["s3"], spreads["local"]),
        "s3 paced / local paced": ratio(spreads["s3 paced"], spreads["local paced"]),
        "s3 / one object at a time": ratio(spreads["s3"], spreads["one object at a time"]),
    }
    path = keep(
        "object_store",
        {
            "latency_ms": LATENCY_MS,
            "pace_images_per_second": PACE_IMAGES_PER_S,
            "images_per_second": {name: spread.as_dict() for name, spread in spreads.items()},
            "ratios": {name: spread.as_dict() for name, spread in ratios.items()},
            "cpu_ms_per_image_loader_server_proxy": cpu * 1000,
            "images_per_second_that_the_cores_allow": allowed,
            "s3_share_of_that": spreads["s3"].median / allowed,
            "processes_besides_the_loader": len(helpers),
        },
    )
    for name, spread in [*spreads.items(), *ratios.items()]:
        print(f"{name:<28}{spread.median:>9.2f}  ({min(spread.values):.2f}-{max(spread.values):.2f})")
    print(f"two cores allow {allowed:,.0f} images/s with server and proxy on them ({cpu * 1000:.2f} ms per image)")
    print(f"wrote {path}")


if __name__ == "__main__":
    sys.exit(main())
