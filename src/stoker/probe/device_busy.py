"""How much of its time an accelerator has work while it is fed: many small kernels leave gaps between them."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

PROFILED_STEPS = 5


def device_busy_share(step: Callable[[], object], device: torch.device) -> float | None:
    """Share of the time of a few steps in which some kernel ran; None on a CPU, or where the profiler saw none."""
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
    """Share of the time from the first begin to the last end that lies in any of the ranges; they may overlap."""
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
