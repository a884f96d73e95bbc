"""Which numbers of workers, and of batches in flight per worker, are worth a run; the same for configs and scripts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from stoker.core.finding import Estimate
from stoker.doctor.what_if import (
    MOST_WORKERS,
    WORKERS_PER_CORE,
    Change,
    LoaderModel,
    rate_of,
    speed_up,
    with_loader,
)
from stoker.tune.records import EXPECTED, Candidate, Settings

WORKER_COUNTS = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
"""Numbers that are tried; the number of cores is added."""
NEARLY_BEST = 0.98
"""Share of the best predicted rate from which fewer workers are enough."""
MOST_PREFETCH = 16
MOST_KEPT_PREFETCH = 8
"""Limit for the prefetch that changes along with the number of workers; a higher one has to prove itself alone."""
WAITS = 0.02
"""Share of the time that the loop waits, below which the loader has nothing to gain."""


def worker_counts(cpus: int, now: int, *, least: int = 0, most: int | None = None) -> list[int]:
    """The numbers to choose from; `most` is what fits into memory, if known."""
    limit = max(now, min(MOST_WORKERS if most is None else most, MOST_WORKERS, max(4, WORKERS_PER_CORE * cpus)))
    return sorted({count for count in (*WORKER_COUNTS, cpus, now) if least <= count <= limit})


def worker_candidates(
    now: int, counts: Sequence[int], cpus: int, model: LoaderModel | None, waiting: str, *, changed: bool,
    prefetch: int | None = None,
) -> Iterator[Candidate]:  # fmt: skip
    """What the simulation expects to be enough, or one for each core; then the neighbours of the best so far.

    `changed`: another number was tried before, so the search no longer jumps. `prefetch`: batches in flight
    per worker, if they may change too. Fewer workers then keep as many batches in flight: with huge images among small
    ones, 8 workers with one batch each beat 2 with one, because of the batches; but 6 with one had 0.79 of the speed
    of 2 with eight.
    """

    def to(count: int) -> Settings:
        change: Settings = {"num_workers": count}
        if prefetch is not None and 0 < count < now:
            in_flight = min(MOST_KEPT_PREFETCH, -(-now * prefetch // count))
            change |= {"prefetch_factor": in_flight} if in_flight > prefetch else {}
        return change

    def predicted(change: Settings) -> Estimate | None:
        return None if model is None else speed_up(model, _change_of(change))

    one_per_core = min(counts, key=lambda count: abs(count - cpus))
    if now > cpus > 0 and one_per_core < now:
        # Times measured on crowded cores are too long for the simulation: it asked for 12 processes where 2 were best.
        why = "more workers than cores hinder each other; one for each core"
        yield Candidate(to(one_per_core), why)
    elif model is None and not changed:
        yield Candidate({"num_workers": one_per_core}, waiting + "; one worker for each core")
    if model is not None and not changed:
        wanted, in_flight = _enough(model, counts, prefetch)
        change: Settings = {"num_workers": wanted}
        change |= {} if prefetch in (None, in_flight) or wanted == 0 else {"prefetch_factor": in_flight}
        gain = speed_up(model, _change_of(change))
        if wanted != now and (gain.expected >= EXPECTED or now > cpus):
            each = f" with {in_flight} batches each" if "prefetch_factor" in change else ""
            why = f"{waiting}; {wanted} workers{each} are predicted to be enough"
            yield Candidate(change, why, gain if gain.expected >= EXPECTED else None)
    place = counts.index(now)
    if place + 1 < len(counts):
        change = to(counts[place + 1])
        # With cores to spare a first worker is always tried: on a busy machine the simulation predicted no gain.
        yield Candidate(change, waiting + "; one step up", None if now < cpus else predicted(change))
    if place > 0:
        change = to(counts[place - 1])
        # The simulation shares cores without loss: it does not know that too many workers slow each other down.
        gain_of_fewer = None if now > cpus else predicted(change)
        if change["num_workers"] or gain_of_fewer is None or gain_of_fewer.expected > 1:
            yield Candidate(change, "fewer workers hinder each other less", gain_of_fewer)


def _enough(model: LoaderModel, counts: Sequence[int], prefetch: int | None) -> tuple[int, int | None]:
    """The fewest workers that the simulation expects to be enough, with the fewest batches in flight for each."""
    more = [] if prefetch is None else [2**n * prefetch for n in (1, 2, 3) if 2**n * prefetch <= MOST_KEPT_PREFETCH]
    factors = [prefetch, *more]
    rates = {(count, each): rate_of(with_loader(count, each)(model)) for count in counts for each in factors}
    most = max(rates.values())
    return next(choice for choice, rate in rates.items() if rate >= NEARLY_BEST * most)


def _change_of(settings: Settings) -> Change:
    workers, prefetch = settings["num_workers"], settings.get("prefetch_factor")
    assert isinstance(workers, int)
    return with_loader(workers, prefetch if isinstance(prefetch, int) else None)


def prefetch_candidates(now: int, workers: int | None, model: LoaderModel | None) -> Iterator[Candidate]:
    """Twice as many batches in flight; `workers` is None where their number is not known."""
    if workers != 0 and now < MOST_PREFETCH:
        predicted = None if model is None or workers is None else speed_up(model, with_loader(workers, 2 * now))
        yield Candidate({"prefetch_factor": 2 * now}, "more batches in flight even out slow ones", predicted)
