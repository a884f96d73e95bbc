"""Shared memory: where worker processes hand over batches."""

from __future__ import annotations

from stoker.checks.case import Case
from stoker.facts.finding import Finding

TIGHT = 0.8
"""Of /dev/shm: one batch more per worker, or a larger image, and a worker dies of SIGBUS."""


def shared_memory_tight(case: Case) -> Finding | None:
    """What: /dev/shm is nearly full, or will be when every worker has its batches in flight.

    Why: a worker that writes beyond its end is killed by SIGBUS ('DataLoader worker is killed by signal: Bus error').

    Example: docker's 64 MB, 4 workers x 2 batches of 19 MB.
    """
    host, shape = case.observed.host, case.observed.loader
    if host is None or not host.shm_bytes or shape is None or shape.engine != "process" or shape.workers == 0:
        return None
    size = next((b.bytes for b in case.observed.batches if b.bytes is not None), None)
    in_flight = None if size is None else size * shape.workers * (shape.prefetch or 2)
    most = max((value for value in (host.shm_used_bytes, in_flight) if value is not None), default=None)
    if most is None or most < TIGHT * host.shm_bytes:
        return None
    what = "were used" if most == host.shm_used_bytes else "are in flight when all workers are ahead"
    return Finding(
        "shared-memory-tight",
        f"{most / 1e6:,.0f} MB of /dev/shm's {host.shm_bytes / 1e6:,.0f} MB {what}",
        f"docker run --shm-size=8g, or {case.setting('prefetch_factor', 1)}",
    )
