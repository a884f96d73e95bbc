"""How long a checkpoint pauses the loop: torch.save compared with our write and snapshot, for ResNet-50, SGD and EMA.

The pause is the time until `save` returns plus the wait before the next update. Computing the gradients in between
takes STEP_S here, spent asleep like a CPU waiting for a GPU; ResNet-50 with a batch of 256 takes four times as long on
an A10G. The time of a snapshot that copies everything at once is listed too.

torch.save leaves its file in the page cache while our write waits for the disk, so the fair comparison is torch.save
with fsync. A snapshot is limited by memory bandwidth, so we also time one contiguous copy of the same number of bytes.
For that the C library uses stores that bypass the cache; for tensor-sized pieces it does not, which halves the speed.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import timm
import torch

from bench.rounds import interleave, keep, ratio
from stoker.train.checkpoint.folder import Checkpoints
from stoker.train.checkpoint.format import flatten, write_checkpoint
from stoker.train.checkpoint.saver import BackgroundWriter, SnapshotBuffer

LARGEST_RATIO = 0.1
TORCH, TORCH_SAFE, OURS = "torch.save", "torch.save and fsync", "write_checkpoint"
STEP_S = 0.1
PAUSE = "pause of the loop"
SNAPSHOT = "snapshot, reused buffer"
FRESH, BARE = "snapshot, fresh buffer", "one copy of as many bytes"


def resnet50_state() -> dict[str, Any]:
    """The state of a run after its first step: 25.6 million parameters, and the momentum and average of each."""
    model = timm.create_model("resnet50").to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    return {
        "model": model.state_dict(),
        "ema": {name: tensor.clone() for name, tensor in model.state_dict().items()},
        "optimizer": optimizer.state_dict(),
        "progress": {"epoch": 1, "step": 5004},
        "rng": torch.get_rng_state(),
    }


def seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def torch_save_and_fsync(state: dict[str, Any], path: Path) -> None:
    with path.open("wb") as stream:
        torch.save(state, stream)
        stream.flush()
        os.fsync(stream.fileno())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--folder", type=Path, help="where to write (default: the system's temporary folder)")
    arguments = parser.parse_args()
    folder = Path(tempfile.mkdtemp(dir=arguments.folder))
    state = resnet50_state()
    size_bytes = sum(tensor.nbytes for tensor in flatten(state).tensors.values())
    bare_source, bare_target = np.ones(size_bytes, dtype=np.uint8), np.zeros(size_bytes, dtype=np.uint8)
    saver = BackgroundWriter(Checkpoints(folder / "async"))
    saver.prepare(state)
    saver.wait()

    buffers = [tensor for name, tensor in state["model"].items() if "running_" in name or "num_batches" in name]

    def pause() -> float:
        at_once_s = saver.save(state, changing=buffers).pause_s
        time.sleep(STEP_S)
        held_s = saver.wait_for_copy()
        assert held_s is not None
        saver.wait()
        return at_once_s + held_s

    def snapshot() -> float:
        pause_s = saver.save(state).pause_s
        saver.wait()  # Disk time is not part of the pause, and must not disturb the next contender.
        return pause_s

    times = interleave(
        {
            TORCH: lambda: seconds(lambda: torch.save(state, folder / "torch.pt")),
            TORCH_SAFE: lambda: seconds(lambda: torch_save_and_fsync(state, folder / "torch_safe.pt")),
            OURS: lambda: seconds(lambda: write_checkpoint(folder / "ours.ckpt", state)),
            PAUSE: pause,
            SNAPSHOT: snapshot,
            FRESH: lambda: seconds(lambda: SnapshotBuffer().take(flatten(state))),
            BARE: lambda: seconds(lambda: np.copyto(bare_target, bare_source)),
        },
        arguments.rounds,
    )
    saver.close()
    shutil.rmtree(folder)
    ratios = {name: ratio(spread, times[TORCH]) for name, spread in times.items()}
    path = keep(
        "checkpoint",
        {
            "state_bytes": size_bytes,
            "seconds": {name: spread.as_dict() for name, spread in times.items()},
            "ratios_to_torch_save": {name: spread.as_dict() for name, spread in ratios.items()},
            "step_s": STEP_S,
            "pause_to_torch_save_and_fsync": ratio(times[PAUSE], times[TORCH_SAFE]).as_dict(),
            "snapshot_to_bare_copy": ratio(times[SNAPSHOT], times[BARE]).as_dict(),
        },
    )
    for name, spread in ratios.items():
        seen = f"({min(spread.values):.3f}-{max(spread.values):.3f})"
        print(f"{name:<26} {times[name].median * 1000:7.1f} ms  {spread.median:6.3f}x  {seen}")
    print(f"wrote {path}")
    return 0 if ratios[PAUSE].median < LARGEST_RATIO else 1


if __name__ == "__main__":
    sys.exit(main())
