"""The search, with a trier whose speeds are a formula: what it finds, survives and never does."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from stoker.core.finding import Estimate
from stoker.run.json_lines import read_records
from stoker.tune import trials
from stoker.tune.journal import Journal
from stoker.tune.objective import Objective
from stoker.tune.records import Candidate, Measured, Outcome, Propose, Settings, State
from stoker.tune.text import outcome_text
from stoker.tune.trials import MOST_TRIALS, is_cheaper
from tests.tune.made_up import START, MadeUp, neighbours, rises_to_four, search_with, was_run

BEST: Settings = {"num_workers": 4, "loader": "process", "prefetch_factor": 2}
FAULTS = ("out-of-memory", "killed", "hung", "crashed", "different-training")


def tune(trier: MadeUp, start: Settings = START, **keys: Any) -> Outcome:
    return search_with(trier, start, **{"propose": neighbours} | keys)


def one_change(state: State) -> Candidate | None:
    return None if len(state.steps) > 1 else Candidate({"num_workers": 2}, "another number")


def test_the_best_neighbour_is_found_and_confirmed_against_the_original() -> None:
    trier = MadeUp()
    outcome = tune(trier)
    assert outcome.best == BEST
    assert outcome.original == START
    assert outcome.before == pytest.approx(150, rel=0.02)
    assert outcome.after == pytest.approx(495, rel=0.02)
    assert outcome.stopped == "nothing left to try"
    assert outcome.trials == len(trier.ran) <= MOST_TRIALS
    assert [step.decision for step in outcome.steps][:: len(outcome.steps) - 1] == ["baseline", "confirmed"]
    assert outcome.steps[-1].speedup == pytest.approx(3.3, rel=0.03)
    # From fresh starts, in turns: the last two runs are of the original and of the best.
    assert trier.ran[-2:] == [START, BEST]


def test_a_gain_inside_the_noise_is_not_a_gain() -> None:
    start = START | {"num_workers": 0}  # nothing is cheaper
    outcome = tune(MadeUp(speed=lambda _settings: 100.0, noise=0.04), start)
    assert outcome.best == start
    assert not any(step.decision == "confirmed" for step in outcome.steps)


def test_where_repeated_runs_hide_the_answer_trials_take_longer_as_far_as_the_budget_allows() -> None:
    def lengths(noise: float, budget_s: float) -> list[float]:
        trier = MadeUp(speed=lambda _settings: 100.0, noise=noise)
        tune(trier, START | {"num_workers": 8}, propose=one_change, budget_s=budget_s)
        return trier.seconds

    assert set(lengths(0.005, 1e6)) == {1.0}
    short, longer = lengths(0.1, 1e6)[:3], lengths(0.1, 1e6)[3:]
    assert short == [1.0, 1.0, 1.0], "the original twice, and the candidate"
    assert len(longer) >= 2
    assert all(2.0 < length <= 6.0 for length in longer), "both again, so that all are alike"
    limited = lengths(0.1, 80.0)
    assert 1.5 <= limited[3] < 80 / (MOST_TRIALS - 3)
    assert sum(limited) <= 80
    assert limited == sorted(limited)
    assert set(lengths(0.1, 30.0)) == {1.0}, "there is no time for it"


def test_what_the_noise_hides_is_said_with_what_would_help() -> None:
    def said(noise: float, budget_s: float, propose: Propose = one_change) -> str:
        trier = MadeUp(speed=lambda _settings: 100.0, noise=noise)
        outcome = tune(trier, propose=propose, budget_s=budget_s)
        return " ".join(line for line in outcome_text(outcome, None).splitlines() if "cannot be seen" in line)

    assert said(0.005, 30.0) == ""
    assert said(0.1, 10.0).endswith(" in trials of 1 s; a larger --budget makes them longer")
    assert said(0.1, 30.0, lambda _state: None).endswith(
        " % cannot be seen here in trials of 1 s; --trial-seconds 3 would show smaller ones"
    )
    assert said(0.3, 1e6).endswith(" % cannot be seen here in trials of 6 s"), "longer ones would not average it out"


def test_on_a_tie_the_cheaper_setting_wins_only_if_it_is_not_slower() -> None:
    start = START | {"num_workers": 8}
    equal = tune(MadeUp(speed=lambda _settings: 100.0, noise=0.0), start, propose=one_change)
    assert equal.best == start | {"num_workers": 2}
    assert "cheaper" in equal.steps[1].reason
    # Fewer workers with as many batches in flight are cheaper, with more batches in flight they are not.
    eight: Settings = {"num_workers": 8, "prefetch_factor": 1, "lookahead": 5}
    assert is_cheaper(eight | {"num_workers": 2, "prefetch_factor": 4}, eight)
    assert not is_cheaper(eight | {"num_workers": 2, "prefetch_factor": 5}, eight)
    assert not is_cheaper(eight, eight)
    assert is_cheaper({"prefetch_factor": 1}, {"prefetch_factor": 2}), "workers of a script that are not tuned"
    slower = {8: 100.0, 2: 99.0}
    other = tune(MadeUp(speed=lambda s: slower[s["num_workers"]], noise=0.0), start, propose=one_change)  # type: ignore[index]
    assert other.best == start


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_any_run_is_a_result(fault: str) -> None:
    for number in range(1, 16):
        trier = MadeUp(faults={number: fault})
        outcome = tune(trier)
        assert outcome.after is not None, (fault, number)
        assert was_run(outcome.best, trier), (fault, number)
        assert rises_to_four(outcome.best) >= rises_to_four(START)
        assert any(fault in {run.result for run in (*step.measured, *step.against)} for step in outcome.steps) or (
            number > outcome.trials
        )


def test_settings_that_never_work_are_never_returned() -> None:
    for fault in FAULTS:
        trier = MadeUp(bad=lambda s, fault=fault: fault if s["num_workers"] in (4, 3) else None)  # type: ignore[misc]
        outcome = tune(trier)
        assert outcome.best["num_workers"] == 2
        assert any(fault == run.result for step in outcome.steps for run in step.measured)


def test_an_original_that_does_not_run_is_replaced_by_what_does() -> None:
    trier = MadeUp(bad=lambda s: "out-of-memory" if s["num_workers"] == 8 else None)
    outcome = tune(trier, START | {"num_workers": 8})
    assert outcome.before is None
    assert outcome.after is not None
    assert outcome.best["num_workers"] == 4
    assert outcome.steps[-1].decision == "confirmed"


def test_a_winner_that_does_not_hold_is_given_up_for_the_one_before() -> None:
    calls = {"now": 0}

    def fades(settings: Settings) -> float:
        # Four workers are fast until they have been run twice.
        if settings["num_workers"] == 4:
            calls["now"] += 1
            return 800.0 if calls["now"] <= 1 else 100.0
        return rises_to_four(settings)

    trier = MadeUp(speed=fades)
    outcome = tune(trier)
    assert any(step.decision == "not confirmed" for step in outcome.steps)
    assert outcome.best["num_workers"] == 3
    assert was_run(outcome.best, trier)


def test_what_the_plan_refuses_is_never_run() -> None:
    trier = MadeUp()
    refuses = lambda settings: "3 GB of 2 GB" if settings["num_workers"] > 2 else None  # noqa: E731
    outcome = tune(trier, fits=refuses)
    assert all(settings["num_workers"] <= 2 for settings in trier.ran)  # type: ignore[operator]
    assert outcome.best == {"num_workers": 2, "loader": "process", "prefetch_factor": 2}
    skipped = [step for step in outcome.steps if step.decision == "skipped"]
    assert "3 GB of 2 GB" in skipped[0].reason
    # Not even the original.
    outcome = tune(trier, START | {"num_workers": 3}, fits=refuses)
    assert all(settings["num_workers"] <= 2 for settings in trier.ran)  # type: ignore[operator]
    assert outcome.best["num_workers"] == 2


def test_with_time_left_it_comes_back_to_what_the_model_expected_nothing_of() -> None:
    def propose(state: State) -> Candidate | None:
        return None if len(state.steps) > 1 else Candidate({"num_workers": 4}, "more", Estimate(0.96, 1.0, 1.05))

    outcome = tune(MadeUp(speed=lambda settings: 106.0 if settings["num_workers"] == 4 else 100.0), propose=propose)
    assert [step.decision for step in outcome.steps] == ["baseline", "skipped", "kept", "confirmed"]
    assert "predicted to gain nothing" in outcome.steps[1].reason
    assert outcome.steps[2].why == "more; again, as there is time"
    short = tune(MadeUp(), propose=propose, most_trials=7)
    assert [step.decision for step in short.steps] == ["baseline", "skipped"]
    # At the ceiling there is nothing to come back to.
    fast = tune(MadeUp(speed=lambda _settings: 100.0), propose=propose, ceiling=101.0)
    assert [step.decision for step in fast.steps] == ["baseline", "skipped"]
    assert fast.stopped == "compute-bound"


@dataclass
class Scripted:
    """Rates by the number of the run."""

    rates: list[float]
    seconds: list[float] = field(default_factory=list)

    def run(self, settings: Settings, seconds: float) -> Measured:
        self.seconds.append(seconds)
        rate = self.rates[min(len(self.seconds), len(self.rates)) - 1]
        return Measured("measured", (rate,) * 3, wait_share=0.5, took_s=seconds, ledger="same")


def other_engine(state: State) -> Candidate | None:
    return None if len(state.steps) > 1 else Candidate({"loader": "process"}, "no lock")


def test_with_time_left_it_comes_back_to_what_the_noise_hid_in_longer_trials() -> None:
    # The original twice; the other engine, which has bad luck; both in turns; and then what it really is.
    trier = Scripted([100, 115, 100, 104, 100, *([100, 130] * 6)])
    outcome = tune(trier, propose=other_engine)
    decisions = [step.decision for step in outcome.steps]
    assert decisions == ["baseline", "not kept", "kept", "confirmed"], [step.reason for step in outcome.steps]
    assert trier.seconds[-1] > 2 * trier.seconds[0]


def test_runs_in_turns_show_a_gain_that_a_machine_which_slows_down_would_hide() -> None:
    """Each turn is a quarter slower than the one before; the other engine is always a tenth faster."""
    slower = [0.75**turn for turn in range(12)]
    rates = [100.0, 70.0, 100.0] + [rate for speed in slower for rate in (100 * speed, 110 * speed)]
    outcome = tune(Scripted(rates), propose=other_engine)
    assert [step.decision for step in outcome.steps] == ["baseline", "kept", "confirmed"]
    assert outcome.steps[-1].speedup == pytest.approx(1.1, rel=0.02)
    # Rates that vary as much, but not together, show nothing.
    shuffled = [100.0, 70.0, 100.0] + [100 * slower[turn % 5] for turn in range(24)]
    assert tune(Scripted(shuffled), propose=other_engine).best == START


def test_a_confirmation_goes_on_while_the_noise_hides_the_gain_as_far_as_there_is_time() -> None:
    rates = [100.0, 100, 150, 160, 150, 90, 150, 95, 150, 100, 150]
    patient = tune(Scripted(rates), propose=other_engine)
    assert patient.steps[-1].decision == "confirmed"
    assert len(patient.steps[-1].measured) == 4
    hurried = tune(Scripted(rates), propose=other_engine, budget_s=8.0)
    assert hurried.steps[-1].decision == "not confirmed"
    assert len(hurried.steps[-1].measured) == 2


def test_what_a_change_needs_is_made_before_it_runs_and_its_time_is_not_the_budgets(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[Settings] = []
    now_s = 1000.0
    monkeypatch.setattr(trials.time, "monotonic", lambda: now_s)

    def ready(settings: Settings) -> str | None:
        nonlocal now_s
        asked.append(settings)
        now_s += 500.0
        return "the disk is full" if settings["num_workers"] == 2 else None

    def propose(state: State) -> Candidate | None:
        wanted = (2, 4)
        return Candidate({"num_workers": wanted[len(state.steps) - 1]}, "more") if len(state.steps) < 3 else None

    trier = MadeUp()
    outcome = tune(trier, propose=propose, ready=ready)
    assert [(step.decision, step.reason) for step in outcome.steps][1] == ("skipped", "the disk is full")
    assert [settings["num_workers"] for settings in asked] == [2, 4]
    assert not was_run(START | {"num_workers": 2}, trier)
    assert outcome.best["num_workers"] == 4
    assert outcome.took_s == pytest.approx(sum(trier.seconds))


def test_the_number_of_trials_and_the_time_are_kept_to() -> None:
    few = tune(MadeUp(), most_trials=9)
    assert few.trials <= 9
    assert few.stopped == "budget"
    short = tune(MadeUp(), budget_s=12.0)
    assert short.stopped == "budget"
    assert short.took_s <= 12
    assert was_run(short.best, MadeUp(ran=[step.settings for step in short.steps if step.measured]))


def test_ctrl_c_returns_the_best_so_far_and_leaves_the_journal_open(tmp_path: Path) -> None:
    class Interrupting(MadeUp):
        def run(self, settings: Settings, seconds: float) -> Measured:
            if len(self.ran) == 7:
                raise KeyboardInterrupt
            return super().run(settings, seconds)

    journal = opened(tmp_path / "tune.jsonl")
    outcome = tune(Interrupting(), journal=journal)
    journal.close()
    assert outcome.stopped == "interrupted"
    assert outcome.best["num_workers"] == 4
    again = opened(tmp_path / "tune.jsonl")
    assert again.resumed == 7
    again.close()


def opened(path: Path, fact: str = "same") -> Journal:
    journal = Journal(path)
    journal.begin({"same": {"config": fact}})
    return journal


def test_a_killed_search_resumes_from_any_cut_of_its_journal(tmp_path: Path) -> None:
    path = tmp_path / "tune.jsonl"
    journal = opened(path)
    whole = tune(MadeUp(noise=0.0), journal=journal)
    journal.close()
    data = path.read_bytes()
    ends = [at + 1 for at, byte in enumerate(data) if byte == ord("\n")]
    cuts = [ends[0], *(end - 30 for end in ends[1:-1]), *ends[1:-1]]
    for cut in cuts:
        path.write_bytes(data[:cut])
        trials_there = data[:cut].count(b'{"kind": "trial"') - (b'"trial"' in data[:cut].rpartition(b"\n")[2])
        trier = MadeUp(noise=0.0)
        journal = opened(path)
        resumed = tune(trier, journal=journal)
        journal.close()
        assert resumed.best == whole.best
        assert [step.decision for step in resumed.steps] == [step.decision for step in whole.steps]
        assert len(trier.ran) == whole.trials - trials_there, "a recorded trial was run again"
        lines = [record for record in read_records(path) if record["kind"] == "step"]
        assert len(lines) == len(whole.steps)


def test_a_journal_of_something_else_is_started_anew_and_says_why(tmp_path: Path) -> None:
    path = tmp_path / "tune.jsonl"
    tune(MadeUp(), journal=opened(path))
    ended = Journal(path)
    assert ended.begin({"same": {"config": "same"}}) == "that search had ended"
    other = Journal(path)
    assert other.begin({"same": {"config": "changed"}}) == "not the same config"
    path.write_bytes(b"\x00\xff damaged\n{}\n")
    damaged = Journal(path)
    assert damaged.begin({"same": {}}) is not None
    assert damaged.resumed == 0
    for journal in (ended, other, damaged):
        journal.close()


def test_another_training_is_measured_beside_and_never_part_of_the_result() -> None:
    trier = MadeUp(speed=lambda s: rises_to_four(s) * (3 if s.get("precision") else 1))
    trier.bad = lambda settings: "different-training" if settings.get("precision") else None
    asked = [Candidate({"precision": "bf16-mixed"}, "half the memory")]
    outcome = tune(trier, other_training=asked)
    assert "precision" not in outcome.best
    (step,) = outcome.other_training
    assert step.speedup == pytest.approx(3, rel=0.05)
    assert "different training" in step.reason


def timed(rate: float, first_s: float, start_s: float) -> Measured:
    return Measured("measured", (rate,), first_batch_s=first_s, start_s=start_s, epoch_samples=1000)


@pytest.mark.parametrize(
    ("goal", "wins"),
    [("throughput", "fast"), ("epoch-time", "quick to begin"), ("cost", "quick to begin")],
)
def test_each_goal_prefers_what_it_should(goal: Any, wins: str) -> None:
    runs = {"fast": timed(120, 5, 60), "quick to begin": timed(100, 0, 5)}
    objective = Objective(goal, epochs=2)
    assert max(runs, key=lambda name: objective.score(runs[name]) or 0) == wins
    # Over many epochs, compiling pays.
    runs["fast"] = replace(runs["fast"], first_batch_s=0.0)
    assert (Objective("cost", 1).score(runs["fast"]) or 0) < (Objective("cost", 1).score(runs["quick to begin"]) or 0)
    assert (Objective("cost", 99).score(runs["fast"]) or 0) > (Objective("cost", 99).score(runs["quick to begin"]) or 0)
