"""`stoker tune -- python train.py -j {num_workers}`: from a command with places to a search, and to the fastest one.

Which value of a placeholder is worth the next trial is decided by what the timers saw in the best so far.
"""

from __future__ import annotations

import hashlib
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from stoker.core.console import Answer, say_notes
from stoker.core.errors import UsageError
from stoker.doctor.checks.facts import Facts
from stoker.doctor.preparing import workers_that_fit
from stoker.doctor.what_if import LoaderModel
from stoker.profile.host import read_machine
from stoker.tune.config_search import TuneOptions
from stoker.tune.journal import open_journal, outcome_record
from stoker.tune.objective import Objective
from stoker.tune.records import Candidate, Measured, Outcome, Propose, State, Value, key_of
from stoker.tune.script import CHANGES_TRAINING, Placeholder, ScriptTrier, Template, read_template, refuse_broken
from stoker.tune.search import Choices, search
from stoker.tune.space import WAITS, loader_model, prefetch_candidates, worker_candidates, worker_counts
from stoker.tune.text import Live, outcome_text
from stoker.tune.trials import Trials

MOST_DOUBLINGS = 6
JOURNAL = Path("tune.jsonl")
"""In the current folder: a script has no config to put it beside."""
MOST_FILE_BYTES = 10_000_000


@dataclass(frozen=True)
class TunedScript:
    """The end of a search, and the command that it found."""

    outcome: Outcome
    command: list[str]
    """With the best values."""
    notes: list[str]
    journal: Path

    def answer(self) -> Answer:
        notes = ["", *self.notes] if self.notes else []
        text = "\n".join([outcome_text(self.outcome, None), *notes, "", shlex.join(self.command)])
        found = {"command": self.command, "notes": self.notes, "journal": str(self.journal)}
        return Answer(text, {**outcome_record(self.outcome), **found})


def tune_script(words: Sequence[str], options: TuneOptions) -> TunedScript:
    """Searches; raises UserError if the command does not train as it is given."""
    template = read_template(words)
    if options.goal == "cost":
        raise UsageError(
            "usage", "--for cost needs a config: nobody knows how many epochs a script has", hint="--for epoch-time"
        )
    say_notes(template.notes())
    machine = read_machine()
    live = Live("samples", options.trial_s)
    trier = ScriptTrier(template, memory_limit_bytes=options.ram_bytes, report=live.report)
    facts = {
        "command": shlex.join(template.words), "original": template.start, "goal": options.goal,
        "budget_s": options.budget_s, "trial_s": options.trial_s,
    }  # fmt: skip
    same = {
        "command": list(template.words), "folder": str(Path.cwd()), "script": _digest_of_files(template.words),
        "options": [options.goal, options.trial_s, options.ram_bytes],
    }  # fmt: skip
    journal = open_journal(JOURNAL, facts, same, machine, fresh=options.fresh)
    try:
        objective = Objective(options.goal)
        trials = Trials(trier, objective.score, journal, live, budget_s=options.budget_s, trial_s=options.trial_s)
        # Nobody knows how long the whole run of a script takes.
        told = {"unit": live.unit, "subject": "the script", "hours_before": None, "hours_after": None}
        outcome = search(trials, Choices(template.start, proposals(template, machine.cpus)), objective, told)
        notes = result_notes(outcome)
        journal.note("command", line=template.line(outcome.best), notes=notes)
    finally:
        live.close()
        journal.close()
    if outcome.before is None and outcome.after is None and outcome.stopped != "interrupted":
        failed = next((run for step in outcome.steps for run in step.measured), Measured("crashed", detail="not run"))
        refuse_broken(template.line(template.start), failed)
    return TunedScript(outcome, template.filled(outcome.best), notes, JOURNAL)


def result_notes(outcome: Outcome) -> list[str]:
    """What a user must know about these values."""
    changed = sorted(name for name in CHANGES_TRAINING if outcome.best.get(name) != outcome.original.get(name))
    return [
        f"{name} {outcome.original[name]} -> {outcome.best[name]} changes the training: its learning rate has to be "
        "chosen anew, and its result may differ"
        for name in changed
    ]


def _digest_of_files(words: Sequence[str]) -> str:
    """Hash of the files that the command names: an edited script is another one."""
    found = hashlib.sha256()
    for word in words:
        path = Path(word)
        if path.suffix in (".py", ".sh", ".yaml", ".yml", ".json", ".toml") and path.is_file():
            with path.open("rb") as stream:
                found.update(stream.read(MOST_FILE_BYTES))
    return found.hexdigest()


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
    model = loader_model(state)
    share = None if measured is None else measured.wait_share
    waits = share is None or share >= WAITS
    if waits and "num_workers" in template.places:
        yield from _workers(template, state, model, cpus)
    if waits and "prefetch_factor" in template.places:
        yield from _prefetch(template.places["prefetch_factor"], state, model)
    for place in template.places.values():
        if place.name == "batch_size" and place.values is None:
            yield from _batch_sizes(place, state)
        elif place.name not in ("num_workers", "prefetch_factor"):
            yield from _given_values(place, state)


def _workers(template: Template, state: State, model: LoaderModel | None, cpus: int) -> Iterator[Candidate]:
    place, now, observed = template.places["num_workers"], state.best["num_workers"], state.observed
    assert isinstance(now, int)
    if observed is not None and Facts(observed).takes_turns and place.values is None:
        return  # the workers wait for one another: more of them do not help
    fit = None if observed is None else workers_that_fit(observed)
    # DataLoader refuses prefetch_factor without workers.
    least = 1 if "prefetch_factor" in state.best else 0
    counts = sorted(n for n in place.values or worker_counts(cpus, now, least=least, most=fit) if isinstance(n, int))
    share = 0.0 if observed is None else observed.times.wait_share or 0.0
    waiting = f"{100 * share:.0f} % of a step is spent waiting for data" if observed is not None else "not measured yet"
    changed = any(count != state.original["num_workers"] for count in _values_seen("num_workers", state))
    other = template.places.get("prefetch_factor")
    prefetch = state.best["prefetch_factor"] if other is not None and other.values is None else None
    yield from worker_candidates(
        now, counts, cpus, model, waiting, changed=changed, prefetch=prefetch if isinstance(prefetch, int) else None
    )


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
