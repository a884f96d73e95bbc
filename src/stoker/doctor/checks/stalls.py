"""Waits that come now and then: a slow sample, the beginning of an epoch."""

from __future__ import annotations

import statistics

from stoker.doctor.checks.case import STARVED, Case, without
from stoker.plan.records import Finding

SLOW = 3.0
"""Times the typical batch: a batch of usual samples varies by less than half."""
FEW = 0.25
"""Share of batches: more than that are no exceptions."""
EXCESS = 0.35
"""Share of all the time of making batches that exceptions add, from which they are the cause of the waits."""
SLOW_SAMPLE = 5.0
"""Times a typical sample, to name it."""
NAMED = 3
FEWEST = 16
"""Batches: among fewer nothing is an exception."""


def slow_samples(case: Case) -> Finding | None:
    """What: a few batches take many times what the others take, and all behind them wait, for order is kept.

    Why: more workers only queue behind the same sample; that sample is the thing to look at.

    Example: one 400-megapixel TIFF among photographs: 9 s, every epoch.
    """
    share = slow_share(case)
    if not case.starved or share is None or share < EXCESS:
        return None
    walls = _own_times(case)
    typical = statistics.median(walls)
    slow = [wall for wall in walls if wall > SLOW * typical]
    named = [s for s in case.observed.slow_samples if s.seconds > SLOW_SAMPLE * s.typical_s][:NAMED]
    names = "; ".join(f"{s.name} {s.seconds * 1e3:.0f} ms (typical {s.typical_s * 1e3:.1f})" for s in named)
    return Finding(
        "slow-samples",
        f"{len(slow)} of {len(walls)} batches take {statistics.median(slow) / typical:.0f} times the "
        f"typical {typical * 1e3:.0f} ms, and the others wait behind them" + (f": {names}" if names else ""),
        "shrink, re-encode or leave out those samples" if named else "find what those samples have in common",
        without((case.observed.wait_share or 0.0) * share),
    )


def slow_share(case: Case) -> float | None:
    """Of the time of making batches, what exceptional batches took beyond the typical; None where nothing tells."""
    walls = _own_times(case)
    if len(walls) < FEWEST:
        return None
    typical, total = statistics.median(walls), sum(walls)
    slow = [wall for wall in walls if wall > SLOW * typical]
    if not slow or total <= 0 or len(slow) > FEW * len(walls):
        return 0.0
    return sum(wall - typical for wall in slow) / total


def _own_times(case: Case) -> list[float]:
    """Of each batch, without what it stood in line for a core: that says something about the others. A worker's first
    batch is left out: it imports and opens."""
    begun: set[int] = set()
    times = []
    for batch in case.observed.batches:
        if batch.worker in begun:
            times.append(batch.wall_s - (batch.runq_s or 0.0))
        begun.add(batch.worker)
    return times


def epoch_start_stalls(case: Case) -> Finding | None:
    """What: each epoch begins with a long wait for its first batch.

    Why: without persistent_workers every epoch starts its workers anew: imports, opening the dataset, first batches.

    Example: 32 spawned workers that import torch and open an index: 20 s, every epoch of 3 minutes.
    """
    share = epoch_start_share(case)
    if share is None or share < STARVED:
        return None
    starts, shape = case.observed.epoch_starts_s[1:], case.observed.loader
    mean = statistics.fmean(starts)
    told = f"the first batch of an epoch takes {mean:.1f} s, {share:.0%} of the time"
    if shape is not None and shape.persistent is False:
        message = f"{told}: workers start anew each time"
        return Finding("epoch-start-stalls", message, case.setting("persistent_workers", True), without(share))
    if shape is not None and shape.workers == 0:
        return Finding("epoch-start-stalls", told, case.setting("num_workers", 2))
    return Finding("epoch-start-stalls", told, "longer epochs: repeat the dataset within one")


def epoch_start_share(case: Case) -> float | None:
    """Of the time, what waits for first batches took; the very first of a run cannot be saved."""
    starts = case.observed.epoch_starts_s[1:]
    if not starts or case.observed.elapsed_s <= 0:
        return None
    return sum(starts) / (case.observed.elapsed_s + sum(starts))
