"""Which numbers of workers, and of batches in flight per worker, are worth a run; the same for configs and scripts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from stoker.doctor.what_if import MOST_WORKERS, WORKERS_PER_CORE, LoaderModel, rate_of, speed_up, with_loader
from stoker.tune.ladder import EXPECTED
from stoker.tune.records import Candidate

WORKER_COUNTS = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
"""Numbers that are tried; the number of cores joins them."""
NEARLY_BEST = 0.98
"""Share of the best predicted rate from which fewer workers are enough."""
MOST_PREFETCH = 16
WAITS = 0.02
"""Share of the time that the loop waits, below which the loader has nothing to gain."""


def worker_counts(cpus: int, now: int, *, least: int = 0, most: int | None = None) -> list[int]:
    """The numbers to choose from; `most` is what fits into memory, if known."""
    limit = max(now, min(MOST_WORKERS if most is None else most, MOST_WORKERS, max(4, WORKERS_PER_CORE * cpus)))
    return sorted({count for count in (*WORKER_COUNTS, cpus, now) if least <= count <= limit})


def worker_candidates(
    now: int, counts: Sequence[int], cpus: int, model: LoaderModel | None, waiting: str, *, changed: bool
) -> Iterator[Candidate]:
    """What the simulation expects to be enough, or one for each core; then the neighbours of the best so far.

    `changed`: another number was tried before, so there is nothing to jump to any more.
    """
    one_per_core = min(counts, key=lambda count: abs(count - cpus))
    if now > cpus > 0 and one_per_core < now:
        # Measured on crowded cores, the simulation's times are too long: it asked for 12 processes where 2 were best.
        why = "more workers than cores hinder each other; one for each core"
        yield Candidate({"num_workers": one_per_core}, why)
    elif model is None and not changed:
        yield Candidate({"num_workers": one_per_core}, waiting + "; one worker for each core")
    if model is not None and not changed:
        rates = {count: rate_of(with_loader(count)(model)) for count in counts}
        most = max(rates.values())
        wanted = min(count for count, rate in rates.items() if rate >= NEARLY_BEST * most)
        gain = speed_up(model, with_loader(wanted))
        if wanted != now and (gain.expected >= EXPECTED or now > cpus):
            why = f"{waiting}; {wanted} workers are predicted to be enough"
            yield Candidate({"num_workers": wanted}, why, gain if gain.expected >= EXPECTED else None)
    place = counts.index(now)
    if place + 1 < len(counts):
        more = counts[place + 1]
        # With cores to spare it is always tried: on a busy machine the simulation expected nothing of a first worker.
        predicted = None if model is None or now < cpus else speed_up(model, with_loader(more))
        yield Candidate({"num_workers": more}, waiting + "; one step up", predicted)
    if place > 0:
        fewer = counts[place - 1]
        # The simulation shares cores without loss: it does not know that too many workers hinder each other.
        predicted = None if model is None or now > cpus else speed_up(model, with_loader(fewer))
        if fewer > 0 or predicted is None or predicted.expected > 1:
            yield Candidate({"num_workers": fewer}, "fewer workers hinder each other less", predicted)


def prefetch_candidates(now: int, workers: int | None, model: LoaderModel | None) -> Iterator[Candidate]:
    """Twice as many batches in flight; `workers` is None where their number is not known."""
    if workers != 0 and now < MOST_PREFETCH:
        predicted = None if model is None or workers is None else speed_up(model, with_loader(workers, 2 * now))
        yield Candidate({"prefetch_factor": 2 * now}, "more batches in flight even out slow ones", predicted)
