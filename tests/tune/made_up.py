"""A trier whose speeds are a formula: searches that take milliseconds."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from stoker.tune.journal import Journal
from stoker.tune.objective import Objective
from stoker.tune.records import Candidate, Listener, Measured, Outcome, Settings, State, Trier, key_of
from stoker.tune.search import Choices, search
from stoker.tune.trials import MOST_TRIALS, Trials

START: Settings = {"num_workers": 1, "loader": "thread", "prefetch_factor": 2}
COUNTS = (0, 1, 2, 3, 4, 6, 8)
Speed = Callable[[Settings], float]


def rises_to_four(settings: Settings) -> float:
    """Best with four worker processes; each step counts."""
    workers = settings["num_workers"]
    assert isinstance(workers, int)
    rate = 100.0 * min(workers, 4) + 50 - 15 * max(0, workers - 4)
    return (
        rate * (1.1 if settings["loader"] == "process" else 1.0) * (1.0 if settings["prefetch_factor"] == 2 else 0.97)
    )


@dataclass
class MadeUp:
    """Answers by formula, with noise; `faults` maps the number of a run to how it ends."""

    speed: Speed = rises_to_four
    noise: float = 0.005
    faults: dict[int, str] = field(default_factory=dict)
    bad: Callable[[Settings], str | None] = lambda _settings: None
    """How these settings always end, if they do not work."""
    ran: list[Settings] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    """How long each run was asked to measure."""

    def run(self, settings: Settings, seconds: float) -> Measured:
        self.ran.append(dict(settings))
        self.seconds.append(seconds)
        result: Any = self.faults.get(len(self.ran)) or self.bad(settings)
        if result is not None and result != "different-training":
            return Measured(result, took_s=1.0, detail="made up")
        rng = np.random.default_rng([0, len(self.ran)])
        rate = self.speed(settings) * float(np.exp(rng.normal(0, self.noise)))
        windows = tuple(rate * float(np.exp(rng.normal(0, self.noise / 2))) for _ in range(4))
        ledger = "other" if result == "different-training" else "same"
        return Measured("measured", windows, wait_share=0.5, took_s=seconds, ledger=ledger)


def search_with(
    trier: Trier, start: Settings, *, budget_s: float = 1e6, trial_s: float = 1.0, journal: Journal | None = None,
    tell: Listener | None = None, most_trials: int = MOST_TRIALS, **choices: Any,
) -> Outcome:  # fmt: skip
    objective = Objective()
    trials = Trials(trier, objective.score, journal, tell, budget_s=budget_s, trial_s=trial_s, most=most_trials)
    return search(trials, Choices(start, **choices), objective)


def neighbours(state: State) -> Candidate | None:
    """More workers, fewer workers, the other engine, more prefetching."""
    now = COUNTS.index(state.best["num_workers"])  # type: ignore[arg-type]
    changes: list[Settings] = [{"num_workers": COUNTS[at]} for at in (now + 1, now - 1) if 0 <= at < len(COUNTS)]
    changes.append({"loader": "process" if state.best["loader"] == "thread" else "thread"})
    changes.append({"prefetch_factor": 2 * int(state.best["prefetch_factor"] or 1)})
    fresh = (change for change in changes if not state.is_done(state.best | change))
    return next((Candidate(change, json.dumps(change)) for change in fresh), None)


def was_run(settings: Settings, trier: MadeUp) -> bool:
    return key_of(settings) in [key_of(one) for one in trier.ran]
