"""A journal of `stoker tune` as the search itself writes it, from a made-up trier, in milliseconds."""

from __future__ import annotations

from pathlib import Path

from stoker.core.finding import Estimate
from stoker.tune.journal import Journal
from stoker.tune.objective import Objective
from stoker.tune.records import Candidate, Measured, Outcome, Settings, State
from stoker.tune.search import Choices, search
from stoker.tune.trials import Trials

EVIL = "</script><script>window.hacked=1</script>\x1b[2J"
START: Settings = {"num_workers": 1, "prefetch_factor": 2, "decoder": "auto"}
CANDIDATES = (
    Candidate({"num_workers": 4}, "90 % of a step is spent waiting for data", Estimate(1.8, 2.0, 2.2)),
    Candidate({"num_workers": 64}, "one step up"),
    Candidate({"prefetch_factor": 4}, "more in flight", Estimate(0.98, 1.0, 1.02)),
    Candidate({"decoder": EVIL}, "listed in the command"),
)


class MadeUp:
    """Twice as fast with four workers, out of memory with many."""

    def run(self, settings: Settings, seconds: float) -> Measured:
        workers = settings["num_workers"]
        assert isinstance(workers, int)
        if workers > 32:
            return Measured("out-of-memory", detail=f"RuntimeError: {EVIL}\nthe last line", took_s=1.0)
        rate = 100.0 * min(workers, 2) * (0.9 if settings["decoder"] == EVIL else 1.0)
        return Measured("measured", (rate - 1, rate, rate + 1), wait_share=0.4, peak_bytes=2_000_000_000, took_s=1.0)


def write_journal(path: Path, *, end: bool = True) -> Outcome:
    """A search with a candidate of each kind: kept, out of memory, skipped, slower; without its end, as if killed."""
    journal = Journal(path)
    journal.begin({"config": f"a config {EVIL}", "same": {"host": ["box", 2]}, "unit": "images", "original": START})
    waiting = list(CANDIDATES)

    def propose(_state: State) -> Candidate | None:
        return waiting.pop(0) if waiting else None

    objective = Objective()
    trials = Trials(MadeUp(), objective.score, journal, budget_s=1000, trial_s=1)
    outcome = search(trials, Choices(START, propose, ceiling=250.0), objective)
    journal.close()
    if not end:
        lines = path.read_text().splitlines(keepends=True)
        path.write_text("".join(lines[: len(lines) // 2]))
    return outcome
