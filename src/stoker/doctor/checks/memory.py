"""Memory that grows until it is full, in the workers or in the loop, and what was seen to get longer there."""

from __future__ import annotations

from stoker.core.finding import Finding
from stoker.core.units import duration_text, size_text
from stoker.doctor.checks.facts import Facts, check
from stoker.doctor.preparing import Filling

RESTART = "end the run in time with Ctrl-C or SIGTERM: it saves, and the same command continues at that step"
"""For our own training, in which no code of the user's keeps anything."""


# The verdict only where nothing takes the loop's time: then it is what ends the run.
@check("memory-grows", "memory grows until it is full", loss=lambda _facts: -1.0)
def memory_grows(facts: Facts) -> Finding | None:
    """What: the workers, or the training process, take more and more memory, and it will be full.

    Why: the kernel kills the run then, often at night. Each worker has its own copy of what the data set keeps, so more
    workers only make it happen sooner: none are advised as long as this goes on.

    A run of ours may fill its caches first (`volume_cache`, `lookahead`): only what grows beyond them counts.

    Example: `self.cache[index] = volume` in __getitem__, 4 workers: 1.2 GB an hour, full after 40 minutes.
    """
    found = facts.filling
    if found is None:
        return None
    hourly = size_text(3600 * found.bytes_per_second)
    who = "the training process grows"
    if found.workers:
        who = "the worker grows" if found.workers == 1 else f"each of {found.workers} workers grows"
        who += f" by {size_text(60 * found.each_bytes_per_second)} a minute"
    return Finding(
        f"{who}, at {hourly} an hour in all: {size_text(found.available_bytes)} of memory are left, and full in "
        f"{duration_text(found.full_in_s)}{_evidence(found)}",
        RESTART if facts.observed.source == "run" else _fix(found),
    )


def _evidence(found: Filling) -> str:
    held = found.held
    if held is None:
        return ""
    if held.keeps_graph:
        return f"; `{held.name}` keeps the autograd graph of every step ({held.before:,}, then {held.now:,})"
    where = " in each worker" if found.workers > 1 else ""
    return f"; `{held.name}` went from {held.before:,} to {held.now:,} entries{where}"


def _fix(found: Filling) -> str:
    held = found.held
    if held is not None and held.keeps_graph:
        return f"keep loss.item() or loss.detach() in `{held.name}`, not the loss itself"
    if not found.workers:
        return "find what the loop keeps" if held is None else f"keep less in `{held.name}`, or empty it every epoch"
    if held is None:
        return (
            "find what the data set keeps, once in each worker; lists of Python objects are copied when they are read, "
            "arrays are not"
        )
    if held.keyed:
        return f"keep a fixed number of entries in `{held.name}`, or fill it before the loader starts: forks share it"
    return f"do not append to `{held.name}` in the data set: every worker has a list of its own"
