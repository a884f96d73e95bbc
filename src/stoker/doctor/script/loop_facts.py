"""How a script prepares its samples, and its memory, threads and habits: from what was seen of its processes, and what
its workers and its loop recorded."""

from __future__ import annotations

import os
import statistics
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from stoker.attach.ring import LAST, StepRecord
from stoker.doctor.script.process_watch import SeenProcess
from stoker.doctor.script.timeline import About, FetchFile
from stoker.profile.memory import growth_rate
from stoker.profile.observed import (
    CacheFacts,
    DeviceRead,
    FilterWork,
    Held,
    HotSpot,
    LoopHabits,
    LoopThreads,
    MemoryGrowth,
    Preparation,
)

MOST_OF_IT = 0.5
"""Share of the observation that a worker must have lived for its memory to count."""
STILL_THERE_S = 5.0
"""Seconds before the end of watching: a worker that ended earlier has given its memory back."""
HELPS = 0.05
"""Share of the main thread's CPU time from which another thread counts as computing with it."""
LEAST_WATCHED_S = 1.0
MOST_SPOTS = 8
SMALLEST_SHARE = 0.01
FEWEST_LOOKS = 10
"""With fewer, a share of the time says little."""


def memory_of(seen: Sequence[SeenProcess], loop: int, made: Sequence[FetchFile], about: About) -> MemoryGrowth | None:
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


def preparation_of(files: Sequence[FetchFile]) -> Preparation | None:
    """All workers together; None if none of them recorded anything."""
    habits = [file.habits for file in files]
    seen = sum(each.shapes_seen for each in habits)
    if not files:
        return None
    sizes = [(each.smallest, each.largest) for each in habits if each.shapes_seen]
    private = [each.private_bytes for each in habits if each.private_bytes >= 0]
    smallest = min((size for size, _ in sizes), default=0)
    return Preparation(
        samples=sum(each.samples for each in habits),
        spots=_spots_of(files),
        filters=_filters_of(files),
        caches=_caches_of(files),
        samples_that_read=sum(each.samples_that_read for each in habits),
        opens=sum(each.opens for each in habits),
        files=sum(each.files for each in habits),
        sample_elements=sum(each.elements for each in habits) / seen if seen else None,
        sample_dimensions=max(each.dimensions for each in habits) - 1 if seen else None,
        batches_seen=seen,
        shape_changes=_shape_changes(files),
        shapes=next((file.shapes for file in files if file.shapes), ()),
        size_spread=max(size for _, size in sizes) / smallest if smallest else 1.0,
        worker_bytes=max(private, default=None),
    )


def _shape_changes(files: Sequence[FetchFile]) -> int:
    """How many of the batches seen had another shape than the one before.

    A worker knows only its own batches. The loop takes them from all workers in turn: two workers with one shape each,
    but not the same, are a change at every step."""
    changes = sum(file.habits.shape_changes for file in files)
    steady = [file for file in files if file.worker >= 0 and file.habits.shapes_seen and not file.habits.shape_changes]
    sizes = {file.worker: file.habits.largest for file in steady}
    in_turn = [sizes[worker] for worker in sorted(sizes)]
    different = sum(size != after for size, after in zip(in_turn, [*in_turn[1:], *in_turn[:1]], strict=True))
    seen = sum(file.habits.shapes_seen for file in steady)
    return changes + (seen * different // len(in_turn) if in_turn else 0)


def _spots_of(files: Sequence[FetchFile]) -> tuple[HotSpot, ...]:
    """By function and what it calls, with the line that took most of that time."""
    whole = sum(file.habits.sampled_ns for file in files)
    if not whole or sum(file.habits.looks for file in files) < FEWEST_LOOKS:
        return ()
    times: Counter[tuple[str, str, str]] = Counter()
    lines: dict[tuple[str, str, str], Counter[int]] = {}
    for file in files:
        for took, line, function, called, path in file.spots:
            key = function, called, path
            times[key] += took
            lines.setdefault(key, Counter())[line] += took
    return tuple(
        HotSpot(function, shown_path(path) or path, lines[function, called, path].most_common(1)[0][0],
                min(1.0, took / whole), called or None)
        for (function, called, path), took in times.most_common(MOST_SPOTS)
        if took >= SMALLEST_SHARE * whole
    )  # fmt: skip


def _filters_of(files: Sequence[FetchFile]) -> tuple[FilterWork, ...]:
    calls: Counter[str] = Counter()
    elements: Counter[str] = Counter()
    for file in files:
        for count, size, name in file.worked:
            calls[name] += count
            elements[name] += size
    return tuple(FilterWork(name, calls[name], size) for name, size in elements.most_common())


def _caches_of(files: Sequence[FetchFile]) -> tuple[CacheFacts, ...]:
    found: dict[str, CacheFacts] = {}
    for file in files:
        for entries, size, vanished, name in file.caches:
            before = found.get(name, CacheFacts(name, 0, None, 0))
            known = None if size < 0 else max(size, before.bytes or 0)
            found[name] = CacheFacts(name, max(entries, before.entries), known, before.evicted + vanished)
    return tuple(sorted(found.values(), key=lambda cache: -cache.evicted))


def shown_path(path: str | None) -> str | None:
    """As a user would type it here: relative, if it is below the current folder."""
    if path is None:
        return None
    return path.removeprefix(f"{Path.cwd()}{os.sep}")
