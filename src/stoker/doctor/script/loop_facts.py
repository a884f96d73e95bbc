"""Facts about a script's memory, threads and habits, from what was seen of its processes and what its loop recorded."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from stoker.attach.ring import LAST, StepRecord
from stoker.doctor.script.process_watch import SeenProcess
from stoker.doctor.script.starting import shown_path
from stoker.doctor.script.timeline import About, FetchFile
from stoker.profile.growth import growth_rate
from stoker.profile.observed import DeviceRead, Held, LoopHabits, LoopThreads, MemoryGrowth

MOST_OF_IT = 0.5
"""Share of the observation that a worker must have lived for its memory to count."""
STILL_THERE_S = 5.0
"""Seconds before the end of watching: a worker that ended earlier has given its memory back."""
HELPS = 0.05
"""Share of the main thread's CPU time from which another thread counts as computing with it."""
LEAST_WATCHED_S = 1.0


def memory_of(seen: Sequence[SeenProcess], loop: int, made: Sequence[FetchFile], about: About) -> MemoryGrowth | None:
    """How fast the loop's process and the workers that made these batches grow."""
    if not seen:
        return None
    watched_s = max(each.last_s for each in seen) - min(each.first_s for each in seen)
    ended_s = max(each.last_s for each in seen)
    pids = {file.pid for file in made} - {loop}
    alive = [
        each
        for each in seen
        if each.pid in pids
        and each.last_s - each.first_s >= MOST_OF_IT * watched_s
        and each.last_s >= ended_s - STILL_THERE_S
    ]
    rates = [rate for each in alive if (rate := _rate(each)) is not None]
    process = next((each for each in seen if each.pid == loop), None)
    own = None if process is None else _rate(process)
    if own is None and not rates:
        return None
    grown = [each.points[-1][1] - each.points[0][1] for each in alive]
    return MemoryGrowth(
        watched_s=watched_s,
        worker_bytes_per_second=statistics.median(rates) if rates else None,
        loop_bytes_per_second=own,
        worker_grown_bytes=statistics.median(grown) if grown else None,
        loop_grown_bytes=None if process is None else process.points[-1][1] - process.points[0][1],
        held=_held(made, loop, about),
    )


def _rate(process: SeenProcess) -> float | None:
    """Growth of its memory, or of its own pages if those grow faster: these also count pages that a fork has copied."""
    rates = [rate for points in (process.points, process.own_points) if (rate := growth_rate(points)) is not None]
    return max(rates, default=None)


def _held(made: Sequence[FetchFile], loop: int, about: About) -> tuple[Held, ...]:
    found: dict[tuple[str, bool], Held] = {}
    for file in made:
        for before, now, keyed, name in file.grown:
            key = name, file.pid != loop
            if key not in found or now - before > found[key].now - found[key].before:
                found[key] = Held(name, before, now, in_worker=file.pid != loop, keyed=bool(keyed))
    for name, said in about.held.items():
        with suppress(KeyError, TypeError, ValueError):
            found[name, False] = Held(
                name, int(said["before"]), int(said["now"]), in_worker=False,
                keeps_graph=bool(said["keeps_graph"]), keyed=bool(said["keyed"]),
            )  # fmt: skip
    return tuple(sorted(found.values(), key=lambda held: (not held.keeps_graph, held.before - held.now)))


def threads_of(seen: Sequence[SeenProcess], loop: int, made: Sequence[FetchFile], about: About) -> LoopThreads | None:
    """The threads that torch computes with in the loop's process, and all others of the workers."""
    process = next((each for each in seen if each.pid == loop), None)
    threads = about.facts.get("threads")
    if process is None or not isinstance(threads, int) or process.last_s - process.first_s < LEAST_WATCHED_S:
        return None
    times = process.thread_times_s()
    if loop not in times:
        return None
    main_cpu_s, main_runq_s = times.pop(loop)
    busiest = sorted(times.values(), reverse=True)[: max(0, threads - 1)]
    others = [(cpu_s, runq_s) for cpu_s, runq_s in busiest if cpu_s >= HELPS * main_cpu_s]
    pids = {file.pid for file in made} - {loop}
    workers = [(each.pid, each.thread_times_s()) for each in seen if each.pid in pids]
    beside = (cpu_s for pid, found in workers for thread, (cpu_s, _) in found.items() if thread != pid)
    ranks = about.facts.get("ranks_here")
    return LoopThreads(
        watched_s=process.last_s - process.first_s,
        threads=threads,
        main_cpu_s=main_cpu_s,
        main_runq_s=main_runq_s,
        others_cpu_s=sum(cpu_s for cpu_s, _ in others),
        others_runq_s=sum(runq_s for _, runq_s in others),
        others=len(others),
        ranks=ranks if isinstance(ranks, int) else 1,
        worker_cpu_s=sum(found.get(pid, (0.0, 0.0))[0] for pid, found in workers) if workers else None,
        worker_threads_cpu_s=sum(beside) if workers else None,
    )


def habits_of(about: About, records: Sequence[StepRecord], feeding: Sequence[int]) -> LoopHabits:
    """What the loop said about itself, and how it validates."""
    facts, shape = about.facts, about.loaders.get(feeding[0], {})
    validations, validation_wait_s = validations_of(records, set(feeding))
    builds = shape.get("builds")
    return LoopHabits(
        reads=tuple(_reads(facts.get("reads"))),
        in_eval_mode=facts.get("in_eval_mode"),
        eval_at=shown_path(facts.get("eval_at")),
        eval_layers=int(facts.get("eval_layers") or 0),
        cudnn_benchmark=facts.get("cudnn_benchmark"),
        loader_builds=builds if isinstance(builds, int) else 1,
        loader_at=shown_path(shape.get("iterated_at")) or None,
        validations=validations,
        validation_wait_s=validation_wait_s,
    )


def _reads(said: Any) -> list[DeviceRead]:
    found = []
    for row in said if isinstance(said, list) else ():
        with suppress(TypeError, ValueError):
            call, place, per_step, on_device = row
            found.append(DeviceRead(str(call), shown_path(str(place)) or "", float(per_step), bool(on_device)))
    return found


def validations_of(records: Sequence[StepRecord], feeding: set[int]) -> tuple[int, float | None]:
    """How many validations ended, each after an epoch of training, and how long they waited for data."""
    count, wait_ns = 0, 0
    trained = validating = False
    for record in records:
        if record.loader in feeding:
            trained, validating = True, False
            continue
        wait_ns += record.exit_ns - record.enter_ns + record.iterator_us * 1000
        validating = validating or not record.flags & LAST
        if record.flags & LAST and trained and validating:
            count, trained = count + 1, False
    return count, wait_ns / 1e9 if wait_ns else None
