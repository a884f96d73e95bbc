"""From the records of all workers to how a script prepares its samples."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from stoker.doctor.script.timeline import FetchFile
from stoker.profile.observed import CacheFacts, FilterWork, HotSpot, Preparation

MOST_SPOTS = 8
SMALLEST_SHARE = 0.01
FEWEST_LOOKS = 10
"""With fewer, a share of the time says little."""


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
    here = str(Path.cwd()) + os.sep
    return path.removeprefix(here)
