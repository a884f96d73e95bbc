"""Settings, what a trial of them measured, and what was decided: what a search works with, and tune.jsonl holds."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from stoker.core.finding import Estimate
from stoker.profile.observed import Observed

AT_CEILING = 0.95
"""Share of the ceiling from which a search ends: the rest would not be worth the trials."""
EXPECTED = 1.01
"""A predicted speed-up above which a gain is expected."""

Goal = Literal["throughput", "epoch-time", "cost"]
GOALS: tuple[Goal, ...] = ("throughput", "epoch-time", "cost")
ALSO = ("precision", "img_size", "batch_size", "mixing")
"""Changes that would alter the training: measured only on request."""

Value = bool | int | float | str | None
Settings = dict[str, Value]
"""The keys that are tuned, with their values: always all of them, so that any line of the journal can be tried
again."""

Result = Literal["measured", "out-of-memory", "killed", "hung", "crashed", "refused", "different-training"]
"""`refused`: an error of ours about these settings. `different-training`: the samples, crops, labels or the total batch
were not those of the original, so the speed does not count."""


@dataclass(frozen=True)
class Measured:
    """The measurements of one throw-away process."""

    result: Result
    windows: tuple[float, ...] = ()
    """Samples per second, input included, in consecutive parts of the trial after its warm-up."""
    wait_share: float | None = None
    first_batch_s: float | None = None
    """From the start of an epoch to its first batch."""
    start_s: float | None = None
    """From the start of the process to the end of the first step: building, compiling, starting workers."""
    peak_bytes: int | None = None
    """Peak memory of the trial's processes together."""
    took_s: float = 0.0
    ledger: str | None = None
    """Hash of which samples, crops, flips and labels were fed, and of the total batch."""
    detail: str = ""
    """Why it failed, in words."""
    observed: Observed | None = None
    epoch_samples: int | None = None
    """Samples of an epoch, on this rank."""

    @property
    def samples_per_second(self) -> float | None:
        return self.raw_samples_per_second if self.result == "measured" else None

    @property
    def raw_samples_per_second(self) -> float | None:
        """Speed of a different training, which does not count in the search."""
        return sum(self.windows) / len(self.windows) if self.windows else None

    @property
    def failure(self) -> str:
        return FAILURES[self.result] + (f": {self.detail}" if self.detail else "")


def mean_rate(runs: Sequence[Measured]) -> float | None:
    """Samples per second of the runs whose speed counts."""
    rates = [rate for run in runs if (rate := run.samples_per_second) is not None]
    return statistics.fmean(rates) if rates else None


FAILURES = {
    "out-of-memory": "out of memory",
    "killed": "its process was killed",
    "hung": "it hung",
    "crashed": "it crashed",
    "refused": "it was refused",
    "different-training": "a different training",
    "measured": "not measured",
}


class Trier(Protocol):
    """Tries settings: of a config, of a script, or made up in a test."""

    def run(self, settings: Settings, seconds: float) -> Measured:
        """Never raises because of the settings: any failure that they cause is a result."""


@dataclass(frozen=True)
class Candidate:
    change: Settings
    """Only what differs from the best so far."""
    why: str
    """One sentence: which finding or prediction led here."""
    predicted: Estimate | None = None
    """Speed-up over the best so far; None where no model predicts it."""


Decision = Literal["kept", "not kept", "skipped", "baseline", "confirmed", "not confirmed"]


@dataclass(frozen=True)
class Step:
    """One line of the journal: what was tried or left out, why, and what was decided."""

    number: int
    settings: Settings
    change: Settings
    why: str
    decision: Decision
    reason: str
    """Reason for the decision: '+12 % ± 3 %', 'inside the noise', 'the plan says it would not fit: ...'."""
    predicted: Estimate | None = None
    measured: tuple[Measured, ...] = ()
    """Runs of these settings, in the order in which they ran; none if skipped."""
    against: tuple[Measured, ...] = ()
    """Runs of the best so far, in between."""
    speedup: float | None = None
    """Over the best so far."""


Key = tuple[tuple[str, Value], ...]


def key_of(settings: Settings) -> Key:
    """The settings as a dictionary key. Settings without an effect are left out: two that differ only in those are the
    same."""
    silent: set[str] = set()
    if settings.get("num_workers") == 0:
        silent |= {"prefetch_factor", "loader", "persistent_workers"}
    if settings.get("loader") == "thread":
        silent.add("persistent_workers")  # threads are always kept
    if settings.get("compile_model") is False:
        silent.add("compile_mode")
    return tuple(sorted((name, value) for name, value in settings.items() if name not in silent))


@dataclass(frozen=True)
class State:
    """How far a search has come: what the next candidate is chosen from."""

    original: Settings
    best: Settings
    runs: Mapping[Key, Sequence[Measured]]
    """Every run so far."""
    steps: tuple[Step, ...] = ()
    ceiling: float | None = None
    """Samples per second with batches that are always ready; None if not known."""
    left_s: float = math.inf
    """Time left to spend."""

    def is_done(self, settings: Settings) -> bool:
        key = key_of(settings)
        return key in self.runs or any(key_of(step.settings) == key for step in self.steps)

    @property
    def measured(self) -> Measured | None:
        """The newest good run of the best settings."""
        good = [run for run in self.runs.get(key_of(self.best), ()) if run.result == "measured"]
        return good[-1] if good else None

    @property
    def observed(self) -> Observed | None:
        return None if self.measured is None else self.measured.observed

    @property
    def share_of_ceiling(self) -> float | None:
        rate = mean_rate(self.runs.get(key_of(self.best), ()))
        return rate / self.ceiling if rate is not None and self.ceiling else None

    @property
    def is_at_ceiling(self) -> bool:
        return self.share_of_ceiling is not None and self.share_of_ceiling >= AT_CEILING


Propose = Callable[[State], Candidate | None]
Fits = Callable[[Settings], str | None]
"""Why the plan refuses these settings; None if they fit."""
Ready = Callable[[Settings], str | None]
"""Prepares what settings need before they can be run, such as a pack; None, or why it failed. Its time does not count
towards the budget."""


class Listener:
    """Notified of a search's progress; this one ignores everything. Must not raise."""

    def trial_begins(self, number: int, change: Settings, role: str) -> None:
        """A run begins; `role` is baseline, candidate, best, confirmation or whole."""

    def trial_ends(self) -> None: ...

    def lengthened(self, seconds: float, spread: float) -> None:
        """Trials take this long from now on, because repeated runs differ by this standard deviation (a share)."""

    def step(self, step: Step) -> None:
        """A decision was taken."""


@dataclass(frozen=True)
class Outcome:
    original: Settings
    best: Settings
    before: float | None
    """Samples per second of the original and of the best, both from fresh starts at the end, interleaved."""
    after: float | None
    stopped: str
    """'compute-bound', 'budget', 'nothing left to try', 'interrupted', in words for people."""
    ceiling: float | None = None
    trials: int = 0
    took_s: float = 0.0
    steps: tuple[Step, ...] = ()
    other_training: tuple[Step, ...] = ()
    """Measured with --also: faster, but a different training."""
    facts: dict[str, Any] = field(default_factory=dict)
    """Hours and money of the whole run before and after, unit, objective, and what else the page shows."""

    def step_that_set(self, key: str, value: Value) -> Step | None:
        """The last step that changed a key to this value, and was kept."""
        kept = (step for step in reversed(self.steps) if step.decision == "kept")
        return next((step for step in kept if key in step.change and step.change[key] == value), None)
