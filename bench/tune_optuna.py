"""Optuna's default sampler on the scenarios of `bench/tune.py`: on the table of the grid, and for real.

The table is far coarser than what tune searches, so a study often tries everything; but trials cost nothing there, so
many seeds show how much luck is in a study. For real, it searches what tune searches, with the same trials, as many of
them, in a single study: that is what a user would do.
"""

from __future__ import annotations

import json
import statistics
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from bench.loaders import PROJECT
from bench.peers.environments import python_of
from bench.tune_bed import Bed, Row
from bench.tune_scenarios import ENGINES, MB
from stoker.tune.records import Settings
from stoker.tune.space import MOST_LOOKAHEAD, MOST_PREFETCH, worker_counts
from stoker.tune.trials import MOST_TRIALS

CACHES = (0, 256 * MB, 1024 * MB, 4096 * MB)
"""Values that tune would try, one after the other."""
NEARLY_ALWAYS = 0.9
"""Share of the seeds that must be within 5 %, to say how many trials are needed."""

Space = dict[str, Any]
Answer = Callable[[dict[str, Any]], float | None]
"""Samples per second of what was asked for; None if it fails."""


@dataclass
class Optuna:
    """A running program that proposes settings."""

    version: str
    _stdin: IO[str]
    _stdout: IO[str]

    def study(self, space: Space, trials: int, seed: int, answer: Answer) -> list[int | None]:
        """The number of the best trial so far, after each trial."""
        self._say({"space": space, "trials": trials, "seed": seed})
        for _ in range(trials):
            self._say({"value": answer(json.loads(self._stdout.readline())["ask"])})
        best: list[int | None] = json.loads(self._stdout.readline())["best"]
        return best

    def _say(self, document: dict[str, Any]) -> None:
        self._stdin.write(json.dumps(document) + "\n")
        self._stdin.flush()


@contextmanager
def started(work: Path) -> Iterator[Optuna | None]:
    """None if it cannot be installed here."""
    python = python_of("optuna")
    if python is None:
        yield None
        return
    command = [str(python), "-m", "bench.peers.optuna_study"]
    with (
        (work / "optuna.log").open("w") as log,
        subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, cwd=PROJECT
        ) as peer,
    ):
        assert peer.stdin is not None
        assert peer.stdout is not None
        yield Optuna(json.loads(peer.stdout.readline())["version"], peer.stdin, peer.stdout)
        peer.stdin.close()


def space_of(bed: Bed) -> Space:
    """What tune chooses from in this scenario."""
    now = bed.start["num_workers"]
    assert isinstance(now, int)
    space: Space = {
        "num_workers": {"low": 0, "high": worker_counts(bed.around.cpus, now)[-1]},
        "loader": list(ENGINES),
        "prefetch_factor": {"low": 1, "high": MOST_PREFETCH, "log": True},
    }
    if bed.around.remote:
        space["lookahead"] = {"low": 1, "high": MOST_LOOKAHEAD // MB, "log": True}
    if bed.scenario.packed:
        space["data_root"] = list(bed.scenario.axes["data_root"])
    if bed.scenario.volumes:
        space["volume_cache"] = {"low": 0, "high": len(CACHES) - 1}
    return space


def search_for_real(optuna: Optuna, bed: Bed, trials: int, seconds: float, seed: int) -> Settings | None:
    """The settings that a study ends with, if any ran. What the plan refuses costs it a trial, as running it would."""
    tried: list[Settings] = []

    def answer(asked: dict[str, Any]) -> float | None:
        settings = bed.start | asked
        if "lookahead" in asked:
            settings["lookahead"] = asked["lookahead"] * MB
        if "volume_cache" in asked:
            settings["volume_cache"] = CACHES[asked["volume_cache"]]
        tried.append(settings)
        return None if bed.fits(settings) is not None else bed.run(settings, seconds).samples_per_second

    best = optuna.study(space_of(bed), trials, seed, answer)[-1]
    return None if best is None else tried[best]


def search_in_table(
    optuna: Optuna, bed: Bed, rows: list[Row], trials: int, seeds: int, within: float
) -> tuple[Settings | None, dict[str, Any]]:  # fmt: skip
    """What the median seed chooses, and how good the choices of all are: each sees one round of the grid, and is judged
    by the other, relative to the point that was best in the one it saw."""
    axes = bed.scenario.axes
    space = {
        name: list(values) if isinstance(values[0], str) else {"low": 0, "high": len(values) - 1}
        for name, values in axes.items()
    }
    at = {tuple(place): number for number, row in enumerate(rows) for place in row.at}
    measured = [number for number, row in enumerate(rows) if row.values]
    chosen: list[list[int | None]] = []
    for seed in range(seeds):
        asked_for: list[int] = []

        def answer(asked: dict[str, Any], asked_for: list[int] = asked_for, saw: int = seed % 2) -> float | None:
            place = tuple(axes[name].index(value) if isinstance(value, str) else value for name, value in asked.items())
            asked_for.append(at[place])
            row = rows[at[place]]
            return row.value(saw) if row.values else None

        best = optuna.study(space, MOST_TRIALS, seed, answer)
        chosen.append([None if number is None else asked_for[number] for number in best])

    def share_of(seed: int, after: int) -> float:
        saw, other, choice = seed % 2, 1 - seed % 2, chosen[seed][after - 1]
        best = max(measured, key=lambda number: rows[number].value(saw))
        # A study without a single good trial ends with nothing.
        return 0.0 if choice is None else rows[choice].value(other) / rows[best].value(other)

    def share_within(after: int) -> float:
        return statistics.fmean(share_of(seed, after) >= 1 - within for seed in range(seeds))

    ranked = sorted((share_of(seed, trials), seed) for seed in range(seeds))
    shares, median_choice = [share for share, _ in ranked], chosen[ranked[(seeds - 1) // 2][1]][trials - 1]
    enough = next((after for after in range(1, MOST_TRIALS + 1) if share_within(after) >= NEARLY_ALWAYS), None)
    return None if median_choice is None else rows[median_choice].settings, {
        "seeds": seeds,
        "trials": trials,
        "mean_share_of_grid": round(statistics.fmean(shares), 4),
        "median_share_of_grid": round(statistics.median(shares), 4),
        "worst_tenth": round(shares[len(shares) // 10], 4),
        "within": round(share_within(trials), 3),
        "trials_until_within": enough,
    }
