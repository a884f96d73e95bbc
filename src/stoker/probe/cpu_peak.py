"""What this machine's CPU can do, measured in about a second: products by number format, and memory bandwidth."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from stoker.probe.datasheets import Datasheet, Format
from stoker.probe.host import usable_ram_bytes

NAME = "this machine's CPU"
# Long enough for products to reach their rate. Many CPUs have no instructions for the half formats, and are fifty times
# slower in them (0.4 GFLOP/s beside 21 on one of 2018): those get a product that is done in a tenth of a second.
SIDES: dict[Format, int] = {"fp32": 768, "fp16": 256, "bf16": 256}
# Beyond the caches of all but the largest servers.
COPIED_BYTES = 128 * 1024**2
SECONDS_EACH = 0.2
_DTYPES: dict[Format, torch.dtype] = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def measure_cpu(seconds_each: float = SECONDS_EACH) -> Datasheet:
    """A datasheet of the cores that torch uses now; others that work at the same time make it smaller."""
    peaks = {name: _product_rate(dtype, SIDES[name], seconds_each) for name, dtype in _DTYPES.items()}
    bandwidth = _copy_rate(seconds_each)
    return Datasheet(
        name=NAME,
        title=f"{NAME} ({torch.get_num_threads()} threads)",
        vram_bytes=usable_ram_bytes(),
        memory_bytes_per_second=bandwidth,
        peak_flops=peaks,
        pcie_bytes_per_second=bandwidth,  # nothing is sent anywhere: a copy in memory
        source="measured here",
        is_cpu=True,
    )


def _product_rate(dtype: torch.dtype, side: int, seconds: float) -> float:
    left, right = torch.rand(side, side).to(dtype), torch.rand(side, side).to(dtype)
    return 2 * side**3 / _best_of(lambda: torch.mm(left, right), seconds)


def _copy_rate(seconds: float) -> float:
    source = torch.ones(COPIED_BYTES // 4)
    target = torch.empty_like(source)
    # Read once and written once.
    return 2 * COPIED_BYTES / _best_of(lambda: target.copy_(source), seconds)


def _best_of(run: Callable[[], object], seconds: float) -> float:
    """The shortest time: others on the machine only ever make it longer."""
    run()  # pages, caches and threads are there after it
    best, ends = float("inf"), time.perf_counter() + seconds
    while True:
        began = time.perf_counter()
        run()
        now = time.perf_counter()
        best = min(best, now - began)
        if now >= ends:
            return best
