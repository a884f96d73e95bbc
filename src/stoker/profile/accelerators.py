"""Measures the device: how fast batches reach it, how busy it is, and, without one, how fast the CPU computes."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace

import torch

from stoker.profile.datasheets import Datasheet, NumberFormat
from stoker.profile.host import usable_ram_bytes
from stoker.profile.observed import AcceleratorFacts

LINK_QUERY = ("name", "pcie.link.gen.current", "pcie.link.gen.max", "pcie.link.width.current", "pcie.link.width.max")
# nvidia-smi takes a second or two on a host with many devices.
NVIDIA_SMI_TIMEOUT_S = 10.0


def measure_transfer(device: torch.device, batch_bytes: int, seconds: float, pinned: bool) -> AcceleratorFacts | None:
    """Bytes a second from host memory to the device, copied in pieces of a batch's size; None on a CPU.

    The state of the link is read while it is busy: an idle link runs at a lower speed to save power.
    """
    if device.type != "cuda":
        return None
    host = torch.empty(batch_bytes, dtype=torch.uint8, pin_memory=pinned)
    target = torch.empty_like(host, device=device)
    query = _start_link_query(device.index or 0)
    target.copy_(host, non_blocking=True)
    torch.cuda.synchronize(device)  # waits for the device: nothing else is measured here
    began, copied = time.perf_counter(), 0
    while time.perf_counter() - began < seconds or (query is not None and query.poll() is None):
        target.copy_(host, non_blocking=True)
        torch.cuda.synchronize(device)
        copied += batch_bytes
        if time.perf_counter() - began > seconds + NVIDIA_SMI_TIMEOUT_S:
            break
    rate = copied / (time.perf_counter() - began)
    return replace(_link_facts(query), transfer_bytes_per_second=rate, count=torch.cuda.device_count())


def read_link(line: str) -> AcceleratorFacts:
    """The facts in a line of nvidia-smi's output; None for what it reports as '[N/A]'."""
    parts = [part.strip() for part in line.split(",")]
    name, *numbers = [*parts, *[""] * len(LINK_QUERY)][: len(LINK_QUERY)]
    generation, generation_max, width, width_max = (int(part) if part.isdigit() else None for part in numbers)
    return AcceleratorFacts(
        name=name or None,
        pcie_generation=generation,
        pcie_generation_max=generation_max,
        pcie_width=width,
        pcie_width_max=width_max,
    )


def _start_link_query(index: int) -> subprocess.Popen[str] | None:
    uuid = str(torch.cuda.get_device_properties(index).uuid)  # nvidia-smi numbers devices differently from CUDA
    command = ["nvidia-smi", f"--id=GPU-{uuid.removeprefix('GPU-')}", f"--query-gpu={','.join(LINK_QUERY)}"]
    with suppress(OSError):
        return subprocess.Popen(
            [*command, "--format=csv,noheader,nounits"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
    return None


def _link_facts(query: subprocess.Popen[str] | None) -> AcceleratorFacts:
    if query is None:
        return AcceleratorFacts()
    try:
        out, _ = query.communicate(timeout=NVIDIA_SMI_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        query.kill()
        query.wait()
        return AcceleratorFacts()
    return read_link(out.splitlines()[0]) if query.returncode == 0 and out else AcceleratorFacts()


PROFILED_STEPS = 5


def device_busy_share(step: Callable[[], object], device: torch.device) -> float | None:
    """Share of a few steps' time in which a kernel ran; None on a CPU, or where the profiler saw none.

    With batches always ready, a share below 1 means gaps between many small kernels.
    """
    if device.type != "cuda":
        return None
    from torch.profiler import ProfilerActivity, profile

    step()
    torch.cuda.synchronize(device)  # waits for the device: a trial, not training
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(PROFILED_STEPS):
            step()
        torch.cuda.synchronize(device)
    ranges = [
        (event.time_range.start, event.time_range.end)
        for event in profiler.events() or ()
        if event.device_type.name == "CUDA"
    ]
    return covered_share(ranges)


def covered_share(ranges: Iterable[tuple[float, float]]) -> float | None:
    """Share of the time from the first start to the last end that any range covers; ranges may overlap."""
    ordered = sorted(ranges)
    if not ordered:
        return None
    first, reached = ordered[0][0], ordered[0][0]
    covered = 0.0
    for begin, end in ordered:
        if end > reached:
            covered += end - max(begin, reached)
            reached = end
    return covered / (reached - first) if reached > first else None


CPU_NAME = "this machine's CPU"
# Matrices large enough to reach the full rate. Many CPUs have no half-precision instructions and are fifty times slower
# in them (0.4 GFLOP/s against 21 on one of 2018): their product takes a tenth of a second at 256.
MATRIX_SIDES: dict[NumberFormat, int] = {"fp32": 768, "fp16": 256, "bf16": 256}
# Larger than the caches of all but the largest servers.
COPIED_BYTES = 128 * 1024**2
SECONDS_EACH = 0.2
_DTYPES: dict[NumberFormat, torch.dtype] = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def measure_cpu(seconds_each: float | None = None) -> Datasheet:
    """A datasheet of the cores that torch uses, measured in about a second; other load on them makes it smaller."""
    seconds_each = seconds_each or SECONDS_EACH
    peaks = {name: _product_rate(dtype, MATRIX_SIDES[name], seconds_each) for name, dtype in _DTYPES.items()}
    bandwidth = _copy_rate(seconds_each)
    return Datasheet(
        name=CPU_NAME,
        title=f"{CPU_NAME} ({torch.get_num_threads()} threads)",
        vram_bytes=usable_ram_bytes(),
        memory_bytes_per_second=bandwidth,
        peak_flops=peaks,
        pcie_bytes_per_second=bandwidth,  # a copy within memory: there is no link
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
    """The shortest time: other load on the machine only ever makes it longer."""
    run()  # warms up pages, caches and threads
    best, ends = float("inf"), time.perf_counter() + seconds
    while True:
        began = time.perf_counter()
        run()
        now = time.perf_counter()
        best = min(best, now - began)
        if now >= ends:
            return best
