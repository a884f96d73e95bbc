"""Run folders as training leaves them, written instantly, of any length and with any names in them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from stoker.core.files import write_text

BATCH = 64
WAIT_S, COMPUTE_S, OTHER_S = 0.030, 0.065, 0.005
"""Each step takes 0.1 s, 30 % of it waiting."""
HEADER = {
    "kind": "event", "time": 0.0, "event": "clock", "step": 0, "format": 1, "cpus": 8,
    "loader": {"workers": 2, "batch_size": BATCH}, "world": 1, "torch": "2.15.0", "device": "cpu",
}  # fmt: skip


def write_run(
    folder: Path, epochs: int = 3, lines: int = 4, every: int = 10, *, clock: bool = True, faster: float = 1.0,
    longest_s: float = 0.2, **config: Any,
) -> Path:  # fmt: skip
    """A run with the given epochs, lines per epoch and steps per line; `faster` divides its times."""
    folder.mkdir(parents=True, exist_ok=True)
    keys = {"epochs": epochs, "batch_size": BATCH, "model": "resnet50", "lr": 0.2} | config
    (folder / "config.yaml").write_text("".join(f"{key}: {json.dumps(value)}\n" for key, value in keys.items()))
    environment = {"python": "3.11.7", "host": {"name": "box", "cpus": 8}, "packages": {"torch": "2.15.0"}}
    (folder / "environment.json").write_text(json.dumps(environment))
    (folder / "checkpoints").mkdir(exist_ok=True)
    (folder / "checkpoints" / "epoch=2-val_acc1=71.5000.ckpt").write_bytes(b"weights")
    metrics: list[dict[str, Any]] = []
    times: list[dict[str, Any]] = [HEADER]
    wait_s, compute_s, other_s = (seconds / faster for seconds in (WAIT_S, COMPUTE_S, OTHER_S))
    step_s = wait_s + compute_s + other_s
    now_s, step = 1_790_000_000.0, 0
    speeds = {"images_per_second": BATCH / step_s, "wait_share": WAIT_S / (WAIT_S + COMPUTE_S + OTHER_S)}
    for epoch in range(epochs):
        for _ in range(lines):
            step, now_s = step + every, now_s + every * step_s
            about = {"kind": "step", "time": now_s, "step": step, "epoch": epoch}
            metrics.append(about | {"train/loss": 5 / (1 + step / 50), "train/lr": 0.1, **speeds})
            stage = {"wall_s": 0.64, "cpu_s": 0.32, "runq_s": 0.16, "blocked_s": 0.16, "calls": every}
            times.append(
                about
                | {
                    "steps": every, "samples": every * BATCH, "made_samples": every * BATCH, "longest_s": longest_s,
                    "elapsed_s": every * step_s, "wait_s": every * wait_s, "compute_s": every * compute_s,
                    "other_s": every * other_s, "stages": {"decode": stage, "fetch": stage}, "waits_s": [],
                    "steps_s": [], "batches": [], "slowest": [{"name": "slow.jpg", "seconds": 0.05}],
                    "typical_sample_s": 0.001,
                    "memory": {"process_bytes": 1_000_000_000 + step, "available_bytes": 20_000_000_000},
                }
            )  # fmt: skip
        now_s += 2.0
        about = {"kind": "epoch", "time": now_s, "step": step, "epoch": epoch}
        scores = {"val/acc1": 70.0 + 1.5 * epoch / epochs, "val/loss": 1.0, "seconds": lines * every * step_s + 2.0}
        metrics.append(about | {"train/loss": 1.5, "train/acc1": 60.0, **scores, **speeds})
        times.append(about | {"steps": 0, "samples": 0, "elapsed_s": 0.0, "wait_s": 0.0, "validation_s": 2.0})
    write_lines(folder / "metrics.jsonl", metrics)
    if clock:
        write_lines(folder / "clock.jsonl", times)
    return folder


def write_lines(path: Path, records: list[dict[str, Any]]) -> None:
    """Writes atomically, so that a reader following the file never sees half of it."""
    write_text(path, "".join(json.dumps(record) + "\n" for record in records))
