"""CPU threads that wait for one another are named with the number that fits, and those that have cores are not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from stoker.doctor.checks.verdict import judge
from stoker.profile.observed import HostFacts, LoopThreads, Observed
from tests.doctor.checks.observations import STEPS, batches, healthy, starved


def computing(threads: LoopThreads | None, fast_s: float, slow_s: float, cpus: int = 2, **changes: Any) -> Observed:
    """A loop whose steps take this long, every tenth one as fast as without a crowd."""
    steps = tuple(fast_s if number % 10 == 0 else slow_s for number in range(STEPS))
    return healthy(
        elapsed_s=sum(steps), wait_s=0.0, compute_s=sum(steps), waits_s=(0.0,) * STEPS, steps_s=steps,
        consumer_cpu_s=0.5 * sum(steps), batches=batches(cpu=0.001), host=HostFacts(cpus=cpus), threads=threads,
        **changes,
    )  # fmt: skip


# Measured: a linear layer of 256, two threads beside two busy processes on two cores: 59 ms a step, and 4 ms with one.
SMALL = LoopThreads(
    3.0, threads=2, main_cpu_s=0.70, main_runq_s=2.30, others_cpu_s=0.70, others_runq_s=2.27, others=1
)  # fmt: skip
# The same with a layer of 2048, whose operations take longer than a turn on a core: 396 ms, and 349 with one.
LARGE = LoopThreads(
    3.0, threads=2, main_cpu_s=0.62, main_runq_s=2.34, others_cpu_s=0.65, others_runq_s=2.16, others=1
)  # fmt: skip


def test_threads_of_small_operations_that_find_no_core_are_the_verdict() -> None:
    found = judge(computing(SMALL, 0.00114, 0.065))
    assert found.verdict == "threads-wait-for-each-other"
    assert found.findings[0].seen == (
        "torch computes with 2 threads on 2 cores, and they wait for a core 76% of the time they could run: "
        "a step computes for 58.6 ms"
    )
    assert "OMP_NUM_THREADS=1" in found.findings[0].fix
    assert 3 < found.findings[0].speedup.expected < 15


def test_threads_of_large_operations_or_with_cores_or_that_were_not_measured_are_not() -> None:
    assert judge(computing(LARGE, 0.300, 0.406)).verdict != "threads-wait-for-each-other"
    quiet = replace(SMALL, main_runq_s=0.1, others_runq_s=0.1)
    for threads in (quiet, None, replace(SMALL, others=0, others_cpu_s=0.0, others_runq_s=0.0)):
        assert judge(computing(threads, 0.00114, 0.065)).verdict != "threads-wait-for-each-other"


def test_more_threads_than_cores_are_named_for_all_ranks_together() -> None:
    ranks = replace(LARGE, threads=16, others=3, ranks=4)
    found = {each.name: each for each in judge(computing(ranks, 0.3, 0.4, cpus=16)).findings}
    said = found["threads-wait-for-each-other"]
    assert "16 threads in each of 4 ranks on 16 cores" in said.seen
    assert "OMP_NUM_THREADS=3" in said.fix  # cores are left for the workers


def test_threads_that_libraries_start_in_workers_are_named_where_cores_are_short() -> None:
    threads = LoopThreads(4.0, 1, 0.1, 0.0, worker_cpu_s=4.0, worker_threads_cpu_s=3.0)
    full = starved(cpu=0.04, runq=0.04, host=HostFacts(cpus=2, cpu_busy_share=1.0), threads=threads)
    found = {each.name: each for each in judge(full).findings}
    assert "take 0.8 of 2 cores, 43% of the workers' CPU time" in found["workers-start-threads"].seen
    assert "cv2.setNumThreads(0)" in found["workers-start-threads"].fix
    for changed in (
        replace(full, threads=replace(threads, worker_threads_cpu_s=0.2)),
        replace(full, threads=replace(threads, worker_threads_cpu_s=None)),
        starved(cpu=0.04, host=HostFacts(cpus=32), threads=threads),
    ):
        assert "workers-start-threads" not in {each.name for each in judge(changed).findings}
