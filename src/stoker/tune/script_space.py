"""Which value of a placeholder is worth the next trial, from what the timers saw in the best so far."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from stoker.doctor.checks.facts import Facts
from stoker.doctor.preparing import workers_that_fit
from stoker.doctor.what_if import LoaderModel, model_of
from stoker.profile.observed import Observed
from stoker.tune.loader_space import WAITS, prefetch_candidates, worker_candidates, worker_counts
from stoker.tune.placeholders import Placeholder, Template
from stoker.tune.records import Candidate, Propose, State, Value, key_of

MOST_DOUBLINGS = 6


def proposals(template: Template, cpus: int) -> Propose:
    """Returns the next candidate for `search`; None when none is left."""

    def propose(state: State) -> Candidate | None:
        return next(
            (one for one in _candidates(template, state, cpus) if not state.is_done(state.best | one.change)), None
        )

    return propose


def _candidates(template: Template, state: State, cpus: int) -> Iterator[Candidate]:
    """In the order in which they are worth a trial."""
    measured = state.measured
    if measured is None and all(run.result == "crashed" for run in state.runs.get(key_of(state.original), ())):
        return  # it does not run at all
    observed = None if measured is None else measured.observed
    model = None if observed is None else model_of(observed)
    share = None if measured is None else measured.wait_share
    waits = share is None or share >= WAITS
    if waits and "num_workers" in template:
        free = "prefetch_factor" in template and template["prefetch_factor"].values is None
        prefetch = state.best["prefetch_factor"] if free else None
        yield from _workers(template["num_workers"], state, observed, model, cpus, prefetch)
    if waits and "prefetch_factor" in template:
        yield from _prefetch(template["prefetch_factor"], state, model)
    for place in template.places:
        if place.name == "batch_size" and place.values is None:
            yield from _batch_sizes(place, state)
        elif place.name not in ("num_workers", "prefetch_factor"):
            yield from _given_values(place, state)


def _workers(
    place: Placeholder,
    state: State,
    observed: Observed | None,
    model: LoaderModel | None,
    cpus: int,
    prefetch: Value,
) -> Iterator[Candidate]:
    now = state.best["num_workers"]
    assert isinstance(now, int)
    if observed is not None and Facts(observed).takes_turns and place.values is None:
        return  # the workers wait for one another: more of them do not help
    fit = None if observed is None else workers_that_fit(observed)
    # DataLoader refuses prefetch_factor without workers.
    least = 1 if "prefetch_factor" in state.best else 0
    counts = sorted(n for n in place.values or worker_counts(cpus, now, least=least, most=fit) if isinstance(n, int))
    share = 0.0 if observed is None else observed.wait_share or 0.0
    waiting = f"{100 * share:.0f} % of a step is spent waiting for data" if observed is not None else "not measured yet"
    yield from worker_candidates(
        now, counts, cpus, model, waiting, changed=_was_changed("num_workers", state),
        prefetch=prefetch if isinstance(prefetch, int) else None,
    )  # fmt: skip


def _prefetch(place: Placeholder, state: State, model: LoaderModel | None) -> Iterator[Candidate]:
    now, workers = state.best["prefetch_factor"], state.best.get("num_workers")
    assert isinstance(now, int)
    if place.values is not None:
        yield from _given_values(place, state)
        return
    shown = workers if isinstance(workers, int) else None if model is None else model.setup.workers
    yield from prefetch_candidates(now, shown, model)


def _batch_sizes(place: Placeholder, state: State) -> Iterator[Candidate]:
    """Doubles until memory is full or there is no gain; halves only if the first doubling brought none."""
    now, start = state.best["batch_size"], place.start
    assert isinstance(now, int)
    assert isinstance(start, int)
    seen = _values_seen("batch_size", state)
    if state.measured is None:
        least = min(value for value in seen if isinstance(value, int))
        if least > 1:
            yield Candidate({"batch_size": least // 2}, "it does not run with a larger one")
    elif 2 * now not in seen and now < start << MOST_DOUBLINGS:
        yield Candidate({"batch_size": 2 * now}, "larger batches keep the device busier, until memory is full")
    elif now <= start and now > 1 and now // 2 not in seen:
        yield Candidate({"batch_size": now // 2}, "twice as many did not pay")


def _given_values(place: Placeholder, state: State) -> Iterator[Candidate]:
    """Each value that the user listed, once."""
    seen = _values_seen(place.name, state)
    for value in place.values or ():
        if value not in seen:
            yield Candidate({place.name: value}, "listed in the command")


def _values_seen(name: str, state: State) -> Sequence[Value]:
    """Every value that was run or skipped so far."""
    return [state.original[name], *(step.settings[name] for step in state.steps if name in step.settings)]


def _was_changed(name: str, state: State) -> bool:
    return any(value != state.original[name] for value in _values_seen(name, state))
