"""Studies of Optuna's default sampler, one after another; whoever starts this program measures the settings.

The first line that it prints is its version. It reads a study a line: {"space": {name: [categories] or {"low", "high",
"log"}}, "trials", "seed"}. For each trial it prints {"ask": {name: value}} and reads {"value": number}, null for
settings that failed; then it prints {"best": [number of the best trial so far, after each trial]}. Runs in an
environment of its own.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import optuna  # type: ignore[import-not-found]
from optuna.samplers import TPESampler  # type: ignore[import-not-found]
from optuna.trial import TrialState  # type: ignore[import-not-found]


def run_study(job: dict[str, Any]) -> list[int | None]:
    """The best trial after each one; None while every trial failed."""
    study = optuna.create_study(direction="maximize", sampler=TPESampler(seed=job["seed"]))
    any_good, best = False, []
    for _ in range(job["trials"]):
        trial = study.ask()
        asked = {name: suggest(trial, name, values) for name, values in job["space"].items()}
        say({"ask": asked})
        value = json.loads(sys.stdin.readline())["value"]
        if value is None:
            study.tell(trial, state=TrialState.FAIL)
        else:
            any_good = True
            study.tell(trial, value)
        best.append(study.best_trial.number if any_good else None)
    return best


def suggest(trial: Any, name: str, values: Any) -> Any:
    """As its users would declare them: numbers as integers, names as categories."""
    return trial.suggest_categorical(name, values) if isinstance(values, list) else trial.suggest_int(name, **values)


def say(document: dict[str, Any]) -> None:
    print(json.dumps(document), flush=True)


def main() -> int:
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    say({"version": optuna.__version__})
    for line in sys.stdin:
        say({"best": run_study(json.loads(line))})
    return 0


if __name__ == "__main__":
    sys.exit(main())
