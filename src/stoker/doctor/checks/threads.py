"""CPU threads that find no core: those that torch computes with in the loop, and those of libraries in the workers."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass

from stoker.core.finding import Estimate, Finding
from stoker.core.units import duration_text
from stoker.doctor.checks.facts import QUEUEING, Facts, check

WORTH = 1.2
"""A speed-up of the step from which threads are blamed: below it, the estimate may be wrong by as much."""
FEWEST_STEPS = 20
FAST = 0.05
"""Share of the steps that count as the fastest: those in which all threads happened to run at once."""
BESIDE = 0.25
"""Share of the workers' CPU time in threads beside their own, from which they are worth mentioning."""
LEAST_S = 0.005
"""A batch, of all such threads: handing it over takes a thread too, and so do our own looks; together about 1 ms."""
CROWDED = 0.85
"""Share of all cores in use: below it, threads of workers find idle cores."""


@dataclass(frozen=True)
class Crowd:
    """How long a step computes now, and with the number of threads that fits."""

    threads: int
    computing_s: float
    queueing: float
    """Share of the time in which the other threads could run that they had no core."""
    speedup: Estimate | None
    """Speed-up of the whole step."""


def crowd_of(facts: Facts) -> Crowd | None:
    """The loop's threads, if they wait for cores.

    What the step would take is between two bounds: a thread does no more useful work than it does while the others run
    too (the rest may be spinning at a barrier), and no more than in the fastest steps."""
    observed, seen, host = facts.observed, facts.observed.threads, facts.observed.host
    if seen is None or host is None or not seen.others or not seen.main_cpu_s:
        return None
    if len(observed.times.steps_s) < FEWEST_STEPS:
        return None
    wanted = seen.others_cpu_s + seen.others_runq_s
    queueing = seen.others_runq_s / wanted if wanted > 0 else 0.0
    if queueing < QUEUEING or not observed.steps or observed.times.elapsed_s <= 0:
        return None
    # Cores are left for the workers, and for what other programs use.
    busy = 0.0 if host.cpu_busy_share is None else max(0.0, host.cpu_busy_share * host.cpus - facts.own_cores)
    free = (host.cpus - (facts.cores_used or 0.0) - busy) / max(1, seen.ranks)
    fitting = max(1, min(seen.threads - 1, int(free)))
    period_s, computing_s = observed.times.elapsed_s / observed.steps, statistics.fmean(observed.times.steps_s)
    a_step = period_s / seen.watched_s
    main_s, main_runq_s = seen.main_cpu_s * a_step, seen.main_runq_s * a_step
    other_s, team = seen.others_cpu_s * a_step / seen.others, seen.others + 1
    idle_s = max(0.0, computing_s - main_s - main_runq_s)  # the loop sleeps, or waits for a device
    fastest_s = sorted(observed.times.steps_s)[int(FAST * len(observed.times.steps_s))]
    least_s = team * main_s * min(1.0, other_s / max(1e-9, computing_s - idle_s))
    most_s = min(main_s + seen.others * other_s, team * max(fastest_s / 10, fastest_s - idle_s))
    least_s = min(least_s, most_s)
    # One thread meets those that are left in the queue.
    crowd = max(1.0, (seen.main_cpu_s + seen.main_runq_s) / seen.main_cpu_s - (team - fitting) / host.cpus)

    def speedup(useful_s: float) -> float:
        then_s = idle_s + useful_s / min(team, fitting) * crowd
        return period_s / max(1e-9, period_s - computing_s + then_s)

    expected = speedup(math.sqrt(least_s * most_s))
    if expected < WORTH:
        return Crowd(fitting, computing_s, queueing, None)
    return Crowd(fitting, computing_s, queueing, Estimate(max(1.0, speedup(most_s)), expected, speedup(least_s)))


def _lost(facts: Facts) -> float:
    """Share of the time that a step takes longer than with threads that fit; the verdict only if that is known."""
    found = crowd_of(facts)
    return -1.0 if found is None or found.speedup is None else 1 - 1 / found.speedup.expected


@check("threads-wait-for-each-other", "the loop's CPU threads wait for one another", loss=_lost)
def threads_wait_for_each_other(facts: Facts) -> Finding | None:
    """What: torch divides each operation of the loop among CPU threads, and some of them find no core.

    Why: the others wait at the end of every operation until the last one has had its turn, spinning on the cores that
    it needs. With fewer threads a small step takes milliseconds less, for every operation in it.

    Example: a linear layer, 2 threads on 2 cores beside 2 busy workers: 59 ms a step, and 4 ms with OMP_NUM_THREADS=1.
    """
    found, seen, host = crowd_of(facts), facts.observed.threads, facts.observed.host
    if found is None or seen is None or host is None:
        return None
    here = f" in each of {seen.ranks} ranks" if seen.ranks > 1 else ""
    too_many = seen.threads * seen.ranks > host.cpus
    if found.speedup is None and not too_many:
        return None
    return Finding(
        f"torch computes with {seen.threads} threads{here} on {host.cpus} cores, and they wait for a core "
        f"{found.queueing:.0%} of the time they could run: a step computes for {duration_text(found.computing_s)}",
        f"OMP_NUM_THREADS={found.threads} before the command, or torch.set_num_threads({found.threads}); where the "
        "threads are needed, OMP_WAIT_POLICY=passive",
        found.speedup,
    )


@check("workers-start-threads")
def workers_start_threads(facts: Facts) -> Finding | None:
    """What: libraries in the workers compute with threads of their own, and all cores are in use.

    Why: torch uses one thread in a worker, but OpenCV and BLAS start one for each core, in each worker. They take cores
    from other workers and from the loop, and wait for one another.

    Example: cv2.resize in 8 workers on 8 cores: 64 threads.
    """
    seen, host, shape = facts.observed.threads, facts.observed.host, facts.observed.loader
    if seen is None or host is None or shape is None or not shape.workers:
        return None
    if seen.worker_cpu_s is None or seen.worker_threads_cpu_s is None or seen.watched_s <= 0:
        return None
    beside = seen.worker_threads_cpu_s / max(1e-9, seen.worker_cpu_s + seen.worker_threads_cpu_s)
    cores = seen.worker_threads_cpu_s / seen.watched_s
    full = facts.own_cores >= CROWDED * host.cpus or facts.waits_for_cores
    if beside < BESIDE or cores * facts.observed.times.elapsed_s < LEAST_S * facts.observed.steps or not full:
        return None
    return Finding(
        f"threads that libraries start in the workers take {cores:.1f} of {host.cpus} cores, "
        f"{beside:.0%} of the workers' CPU time, and there are no idle cores for them",
        "in worker_init_fn: cv2.setNumThreads(0); for NumPy and SciPy OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1",
    )
