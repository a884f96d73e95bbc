"""`stoker tune` against an exhaustive grid, Optuna's default sampler and `num_workers = cpu_count / 2`.

For each scenario (bench/tune_scenarios.py) tune runs as the command does, with a paced consumer. The grid over workers,
engine and prefetching (or look-ahead, or cache) is measured with the same trials, in random order; its best points
twice. Optuna searches the table of the grid with as many trials as tune ran, or, with --for-real, the space that tune
searches (bench/tune_optuna.py). The largest of many noisy values is too large, so at the end everybody's choice is
measured again in fresh rounds, in turns; the shares come from those, and the grid's own figures are kept beside them.

Decoding an image takes a fixed CPU time, and so does a patch (bench/steady): a core of a shared host is by a third
faster in one second than in the next, and that hid differences of a tenth.

Then twenty searches in which one trial is killed, hangs, crashes or runs out of memory (bench/tune_faults.py).
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from bench.quiet import wait_for_quiet
from bench.rounds import RESULTS, Spread, keep, ratio
from bench.tune_bed import Bed, Row, fresh_rounds, made_ready, measure_grid, shown
from bench.tune_data import Data
from bench.tune_faults import survive
from bench.tune_optuna import Optuna, search_for_real, search_in_table, started
from bench.tune_scenarios import FAULTY, SCENARIOS, Scenario
from stoker.run.environment import describe_environment
from stoker.tune.records import Measured, Outcome, Settings, key_of

STEADY = Path(__file__).parent / "steady"
WITHIN = 0.05
MOST_TRIALS, MOST_MINUTES = 25, 20
WINS = 10 / 12
EQUAL = 0.02
"""Shares that differ by less are called equal: tune itself calls no smaller gain one."""
FAULTS_MINUTES = 5.0
FRESH = 2.0
"""Times the length of a trial: these decide."""
APART = 0.05
Result = dict[str, Any]


def measure(scenario: Scenario, data: Data, work: Path, optuna: Optuna | None, arguments: argparse.Namespace) -> Result:
    """One row of the result."""
    order = random.Random(scenario.name)
    began_s = time.monotonic()
    with data.served(scenario) as root, made_ready(scenario, root, work, arguments.seconds) as bed:
        outcome = bed.tune(arguments.seconds)
        rows = measure_grid(bed, arguments.seconds, arguments.grid_rounds, order)
        contenders = {
            "tune": outcome.best,
            "grid": max(rows, key=lambda row: row.mean).settings,
            "cpu_count / 2": bed.start | {"num_workers": max(1, (os.cpu_count() or 1) // 2)},
            "start": bed.start,
        }
        peer: Result | None = None
        if optuna is not None:
            choice, table = search_in_table(optuna, bed, rows, outcome.trials, arguments.seeds, WITHIN)
            if arguments.for_real:
                # A seed of its own for each scenario: the same one would begin every study with the same settings.
                choice = search_for_real(optuna, bed, outcome.trials, arguments.seconds, order.randrange(2**31))
            peer = {"version": optuna.version, "for_real": arguments.for_real, "in_the_table": table}
            contenders |= {} if choice is None else {"optuna": choice}
        runs = fresh_rounds(bed, contenders, FRESH * arguments.seconds, arguments.rounds, order, apart=APART)
        took_minutes = (time.monotonic() - began_s) / 60
        row = row_of(bed, outcome, rows, peer, contenders, runs)
        return row | {"minutes": round(took_minutes, 1), "commit": revision()}


def row_of(
    bed: Bed, outcome: Outcome, rows: list[Row], peer: Result | None, contenders: dict[str, Settings],
    found: dict[str, list[Measured]],
) -> Result:  # fmt: skip
    spreads = {name: Spread(tuple(run.samples_per_second or 0.0 for run in runs)) for name, runs in found.items()}
    share = _ratio(spreads["tune"], spreads["grid"])
    pace, fresh_best = bed.pace_samples_per_second, max(spread.median for spread in spreads.values())
    ran = {key_of(step.settings): step.settings for step in outcome.steps if step.measured}
    return {
        "scenario": bed.scenario.name,
        "limited_by": bed.scenario.limit,
        "budget_s": bed.scenario.budget_s,
        "share_of_grid": share.as_dict(),
        "within": share.median >= 1 - WITHIN,
        "speedup_over_start": _ratio(spreads["tune"], spreads["start"]).as_dict(),
        "over_half_the_cores": _ratio(spreads["tune"], spreads["cpu_count / 2"]).as_dict(),
        "over_optuna": _ratio(spreads["tune"], spreads["optuna"]).as_dict() if "optuna" in spreads else None,
        "optuna": peer,
        "limit_samples_per_second": {
            "pace": round(pace, 1),
            "loader_of_two_threads": round(bed.loader_samples_per_second, 1),
            "fastest_seen": round(fresh_best, 1),
        },
        "tune": {
            "trials": outcome.trials,
            "minutes": round(outcome.took_s / 60, 2),
            "stopped": outcome.stopped,
            "steps": [
                {"change": step.change, "decision": step.decision, "reason": step.reason} for step in outcome.steps
            ],
            "ran_what_would_not_fit": sum(bed.fits(settings) is not None for settings in ran.values()),
        },
        "settings": {name: shown(settings) for name, settings in contenders.items()},
        "samples_per_second": {name: spread.as_dict() for name, spread in spreads.items()},
        "peak_megabytes": {
            name: round(max(run.peak_bytes or 0 for run in runs) / 1e6) for name, runs in found.items()
        },
        "grid": [
            {"settings": shown(row.settings), "rounds": [round(value, 2) for value in row.values]}
            | ({"would_not_fit": row.refused} if row.refused else {})
            for row in rows
        ],
        "grid_best_over_worst": round(
            max(row.mean for row in rows) / min(row.mean for row in rows if row.values), 3
        ),
        "grid_noise": _noise(rows),
        "same_training": len(bed.ledgers) == 1,
    }  # fmt: skip


def _ratio(ours: Spread, theirs: Spread) -> Spread:
    """Settings that could not be run have a rate of zero: whatever ran is better than those."""
    return ratio(ours, Spread(tuple(value or 1e-9 for value in theirs.values)))


def _noise(rows: list[Row]) -> float | None:
    """Median difference between two runs of the same point."""
    found = [abs(row.values[0] / row.values[1] - 1) for row in rows if len(row.values) > 1]
    return round(statistics.median(found), 4) if found else None


def summary_of(rows: list[Result], faults: list[Result]) -> Result:
    """The figures to publish."""
    # A study in which nothing ran has lost.
    against_optuna = [row["over_optuna"]["median"] - 1 if row["over_optuna"] else 1.0 for row in rows if row["optuna"]]
    against_half = [row["over_half_the_cores"]["median"] - 1 for row in rows]
    return {
        "scenarios": len(rows),
        "within_5_percent": sum(row["within"] for row in rows),
        "share_of_grid": _range([row["share_of_grid"]["median"] for row in rows]),
        "trials": _range([row["tune"]["trials"] for row in rows]),
        "minutes": _range([row["tune"]["minutes"] for row in rows]),
        "against_optuna": _wins(against_optuna),
        "against_half_the_cores": _wins(against_half),
        "ran_what_would_not_fit": sum(row["tune"]["ran_what_would_not_fit"] for row in rows),
        "same_training": all(row["same_training"] for row in rows),
        "faults": len(faults),
        "faults_survived": sum(row["survived"] for row in faults),
    }


def _range(values: list[float]) -> Result:
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def _wins(differences: list[float]) -> Result:
    """Equal is neither: where the consumer or the storage limits, every choice is as good."""
    better, worse = sum(each > EQUAL for each in differences), sum(each < -EQUAL for each in differences)
    return {"better": better, "equal": len(differences) - better - worse, "worse": worse}


def reached(summary: Result) -> bool:
    count = summary["scenarios"]
    return bool(
        summary["within_5_percent"] == count
        and summary["trials"]["max"] <= MOST_TRIALS
        and summary["minutes"]["max"] <= MOST_MINUTES
        and summary["against_optuna"]["better"] >= WINS * count
        and summary["against_half_the_cores"]["better"] >= WINS * count
        and summary["ran_what_would_not_fit"] == 0
        and summary["same_training"]
        and summary["faults_survived"] == summary["faults"]
    )


def line_of(row: Result) -> str:
    share, peer, half = row["share_of_grid"], row["optuna"], row["over_half_the_cores"]
    other = "-" if peer is None or row["over_optuna"] is None else f"{row['over_optuna']['median']:.2f}"
    return (
        f"{row['scenario']:<34}{share['median']:.3f} ({share['min']:.3f}-{share['max']:.3f}) of the grid's best, "
        f"{other}x Optuna, {half['median']:.2f}x cpu_count / 2, {row['speedup_over_start']['median']:.2f}x the start; "
        f"{row['tune']['trials']} trials, {row['tune']['minutes']:.1f} min, {row['tune']['stopped']}; "
        f"{row['settings']['tune']} (grid: {row['settings']['grid']})"
    )


def earlier(seconds: float) -> tuple[list[Result], list[Result], str | None]:
    """The rows of an unfinished run with the same length of trials, its faults, and the commit of these."""
    try:
        document = json.loads((RESULTS / "tune" / "result.json").read_text())["measured"]
    except (OSError, ValueError, KeyError):
        return [], [], None
    if document["seconds"] != seconds:
        return [], [], None
    return document["rows"], document["faults"], document["faults_commit"]


def revision() -> str:
    """A run takes hours, and may be resumed after a commit: each row says which one it was measured on."""
    return str(describe_environment()["git"]["revision"])[:7]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("images", nargs="?", type=Path, help="class folders with real photos (default: made-up ones)")
    parser.add_argument("--only", action="append", help="scenarios whose name contains this, or `faults`; repeatable")
    parser.add_argument("--resume", action="store_true", help="keep the rows that results/tune has")
    parser.add_argument("--minutes", type=float, help="begin no other scenario after this time; --resume continues")
    parser.add_argument("--seconds", type=float, default=1.2, help="that a trial measures")
    parser.add_argument("--rounds", type=int, default=2, help="fresh rounds; one more where they disagree")
    parser.add_argument("--grid-rounds", type=int, default=2)
    parser.add_argument("--seeds", type=int, default=50, help="of Optuna")
    parser.add_argument("--for-real", action="store_true", help="Optuna also runs a study with trials of its own")
    parser.add_argument("--patience", type=float, default=20.0, help="seconds to wait for idle cores")
    parser.add_argument("--dry", action="store_true", help="do not write to results/")
    arguments = parser.parse_args()
    rows, faults, faults_commit = earlier(arguments.seconds) if arguments.resume else ([], [], None)
    done = {row["scenario"] for row in rows}
    wanted = [scenario for scenario in SCENARIOS if scenario.name not in done and _asked(arguments.only, scenario.name)]
    inject = not faults and _asked(arguments.only, "faults")
    began_s = time.monotonic()

    def spent() -> float:
        return (time.monotonic() - began_s) / 60

    def kept() -> None:
        complete = {row["scenario"] for row in rows} == {scenario.name for scenario in SCENARIOS} and bool(faults)
        if not arguments.dry:
            document = {"seconds": arguments.seconds, "complete": complete, "summary": summary_of(rows, faults)}
            keep("tune", document | {"rows": rows, "faults": faults, "faults_commit": faults_commit})

    with tempfile.TemporaryDirectory(prefix="stoker-tune-") as name:
        work = Path(name)
        os.environ["XDG_CACHE_HOME"] = str(work / "cache")
        with Data(work / "data", arguments.images) as data, started(work) as optuna:
            os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(STEADY), os.environ.get("PYTHONPATH")]))
            for number, scenario in enumerate(wanted):
                if arguments.minutes is not None and spent() >= arguments.minutes:
                    break
                left = ""
                if number:
                    minutes = spent() / number * (len(wanted) - number) + (FAULTS_MINUTES if inject else 0.0)
                    left = f", about {minutes:.0f} min left"
                sys.stderr.write(f"== {scenario.name} ({number + 1} of {len(wanted)}{left})\n")
                wait_for_quiet(arguments.patience)
                rows.append(measure(scenario, data, work, optuna, arguments))
                print(line_of(rows[-1]), flush=True)
                kept()
            if inject and (arguments.minutes is None or spent() < arguments.minutes):
                sys.stderr.write("== faults\n")
                with data.served(FAULTY) as root, made_ready(FAULTY, root, work, arguments.seconds) as bed:
                    faults, faults_commit = survive(bed, arguments.seconds), revision()
                print(f"{sum(row['survived'] for row in faults)} of {len(faults)} faults survived", flush=True)
                if rows:
                    kept()
    if not rows:
        return 0 if faults and all(row["survived"] for row in faults) else 1
    summary = summary_of(rows, faults)
    print(json.dumps(summary, indent=2))
    return 0 if reached(summary) else 1


def _asked(only: list[str] | None, name: str) -> bool:
    return only is None or any(word in name for word in only)


if __name__ == "__main__":
    sys.exit(main())
