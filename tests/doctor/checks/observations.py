"""Made-up observations for testing the checks: a healthy loop, and ways to break it."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

from stoker.profile.observed import BatchTime, HostFacts, LoaderShape, LoopTimes, Observed, StageTime

STEPS = 100
BATCH = 8


def healthy(**changes: Any) -> Observed:
    """100 steps of 100 ms without any wait; 2 workers on 8 cores."""
    observed = Observed(
        source="script",
        steps=STEPS,
        samples=STEPS * BATCH,
        times=LoopTimes(
            elapsed_s=10.0,
            wait_s=0.05,
            compute_s=9.9,
            other_s=0.05,
            consumer_cpu_s=1.0,
            waits_s=(0.0005,) * STEPS,
            steps_s=(0.0995,) * STEPS,
        ),
        loader=LoaderShape(workers=2, prefetch=2, engine="process", persistent=True, batch_size=BATCH),
        batches=batches(cpu=0.01),
        host=HostFacts(cpus=8),
    )
    return changed(observed, **changes)


def changed(observed: Observed, **changes: Any) -> Observed:
    """With other values, also of its times."""
    times = {one.name: changes.pop(one.name) for one in fields(LoopTimes) if one.name in changes}
    return replace(observed, times=replace(observed.times, **times), **changes)


def starved(*, cpu: float, runq: float = 0.0, blocked: float = 0.0, workers: int = 2, **changes: Any) -> Observed:
    """Busy workers that need the given seconds per batch; the loop takes 5 ms per step."""
    wall = cpu + runq + blocked
    every = max(wall / max(1, workers), 0.005) if workers else wall + 0.005
    shape = LoaderShape(
        workers=workers, prefetch=2 if workers else None, engine="process" if workers else "main", batch_size=BATCH
    )
    made = batches(cpu=cpu, runq=runq, blocked=blocked)
    changes = {"loader": shape, "stages": stages(other=made), "host": HostFacts(cpus=8)} | changes
    return healthy(
        elapsed_s=every * STEPS,
        wait_s=(every - 0.005) * STEPS,
        compute_s=0.005 * STEPS,
        other_s=None,
        consumer_cpu_s=0.05,
        waits_s=(every - 0.005,) * STEPS,
        steps_s=(0.005,) * STEPS,
        batches=made,
        **changes,
    )


def batches(*, cpu: float, runq: float = 0.0, blocked: float = 0.0, count: int = STEPS) -> tuple[BatchTime, ...]:
    return (BatchTime(cpu + runq + blocked, cpu, runq, blocked, BATCH),) * count


def stages(**made: tuple[BatchTime, ...]) -> dict[str, StageTime]:
    """Stages with the same times as these batches."""
    return {
        name: StageTime(
            wall_s=sum(b.wall_s for b in each),
            cpu_s=sum(b.cpu_s or 0.0 for b in each),
            runq_s=sum(b.runq_s or 0.0 for b in each),
            blocked_s=sum(b.blocked_s or 0.0 for b in each),
            calls=len(each),
        )
        for name, each in made.items()
    }
