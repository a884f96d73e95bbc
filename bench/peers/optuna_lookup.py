"""Optuna's default sampler on a table of measured settings: many seeds, no settings are run.

Reads {"axes": {name: [values]}, "rows": [{"at": [[index along each axis], ...], "values": [round 1, round 2]}],
"trials", "seeds"} from stdin; a row without values is one that must not be run, and costs a trial. Prints for each
seed the row that was best so far after each trial, in the round that it saw; every other seed sees the other round.
Runs in an environment of its own.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import optuna  # type: ignore[import-not-found]
from optuna.samplers import TPESampler  # type: ignore[import-not-found]
from optuna.trial import TrialState  # type: ignore[import-not-found]


def choices(job: dict[str, Any], seed: int) -> list[int | None]:
    """The row that a study would end with after each trial; None while every trial failed."""
    rows = {tuple(at): number for number, row in enumerate(job["rows"]) for at in row["at"]}
    study = optuna.create_study(direction="maximize", sampler=TPESampler(seed=seed))
    chosen: dict[int, int] = {}
    found: list[int | None] = []
    for _ in range(job["trials"]):
        trial = study.ask()
        # Ordered values as integers, as its users would declare a number of workers; names as categories.
        at = tuple(
            values.index(trial.suggest_categorical(name, values))
            if isinstance(values[0], str)
            else trial.suggest_int(name, 0, len(values) - 1)
            for name, values in job["axes"].items()
        )
        number = rows[at]
        seen = job["rows"][number]["values"]
        if seen:
            chosen[trial.number] = number
            study.tell(trial, seen[seed % len(seen)])
        else:
            study.tell(trial, state=TrialState.FAIL)
        found.append(chosen[study.best_trial.number] if chosen else None)
    return found


def main() -> int:
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    job = json.load(sys.stdin)
    print(json.dumps({"version": optuna.__version__, "chosen": [choices(job, seed) for seed in range(job["seeds"])]}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
