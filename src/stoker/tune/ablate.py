"""`stoker tune --ablate`: how much each optimisation of a config contributes, measured by switching it off.

From the config as given, one thing is switched off at a time. Each such trial runs between two of the whole config, and
is compared with these: a machine that gets slower meanwhile does not look like a speed-up.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from stoker.data.loader import choose_engine
from stoker.errors import UserError
from stoker.machine.host import HostConfig
from stoker.tune.comparing import FLOOR, compare, spread_of
from stoker.tune.journal import Journal
from stoker.tune.records import Measured, Settings, Trier, Value

ROUNDS = 2
LEAST_LOOKAHEAD = 1_000_000
"""The smallest that the config accepts, in bytes."""
PIXELS = "changes pixels slightly"
OTHER_TRAINING = "another training"
KNOWN_RESULTS = ("measured", "different-training")
"""Results that have a speed: what is switched off here may change the training."""
TOGETHER = "all of these together"


@dataclass(frozen=True)
class Source:
    """Something in a config that may make it fast, and the settings without it."""

    label: str
    without: Settings
    """What switches it off; empty if it is off already."""
    note: str = ""

    @property
    def is_off(self) -> bool:
        return not self.without


@dataclass(frozen=True)
class Contribution:
    """How much faster the whole config is than the one without this source."""

    source: Source
    factor: float | None = None
    """None if it is off already, or could not be measured."""
    spread: float | None = None
    """± so much of the factor, two standard errors."""
    failure: str = ""
    """Why a trial without it gave no speed."""
    runs: tuple[Measured, ...] = ()

    @property
    def verdict(self) -> str:
        """In a few words: off, inside the noise, slower with it, or nothing to add."""
        if self.source.is_off:
            return "off in this config"
        if self.factor is None or self.spread is None:
            return self.failure or "not measured"
        if abs(math.log(self.factor)) <= max(math.log1p(FLOOR), math.log1p(self.spread)):
            return "inside the noise"
        return "faster without it" if self.factor < 1 else ""

    def as_dict(self) -> dict[str, Any]:
        return {
            "label": self.source.label, "change": self.source.without, "factor": self.factor, "spread": self.spread,
            "verdict": self.verdict, "note": self.source.note,
        }  # fmt: skip


@dataclass(frozen=True)
class Ablation:
    """The table."""

    settings: Settings
    """Of the whole config: the keys that are switched off somewhere."""
    rate: float | None
    """Samples per second of the whole config."""
    rows: tuple[Contribution, ...]
    rounds: int
    trials: int
    notes: tuple[str, ...] = field(default=())

    def as_dict(self) -> dict[str, Any]:
        rows = [row.as_dict() for row in self.rows]
        return {
            "samples_per_second": self.rate, "sources": rows, "rounds": self.rounds, "trials": self.trials,
            "notes": list(self.notes),
        }  # fmt: skip


def sources_of(config: HostConfig, *, on_gpu: bool, remote: bool, paced: bool = False) -> list[Source]:
    """Everything in this config that is there for speed; with a paced consumer, only what concerns the input."""
    workers, prefetch = config.num_workers, config.prefetch_factor or 2
    processes = choose_engine(config.loader, workers, volumes=config.task != "classify") == "process"
    engine = "processes, not threads" if processes else "threads, not processes"
    found = [
        _source("workers", workers > 0, {"num_workers": 0, "prefetch_factor": None}, f"{workers}"),
        _source("prefetch_factor", workers > 0 and prefetch > 1, {"prefetch_factor": 1}, f"{prefetch}"),
        _source("engine", workers > 0, {"loader": "thread" if processes else "process"}, engine),
        _source("persistent_workers", workers > 0 and config.persistent_workers, {"persistent_workers": False}),
    ]
    if on_gpu and not paced:
        found.append(_source("pin_memory", config.pin_memory, {"pin_memory": False}))
    if config.task == "classify":
        mode = config.decode_mode
        found += [
            _source("decoder", config.decoder != "pillow", {"decoder": "pillow"}, config.decoder),
            _source("decode_mode", mode != "faithful", {"decode_mode": "faithful"}, mode, PIXELS),
        ]
    if remote:
        size = f"{config.lookahead / 1e6:.0f} MB"
        found += [
            _source("lookahead", config.lookahead > LEAST_LOOKAHEAD, {"lookahead": LEAST_LOOKAHEAD}, size),
            _source("cache_dir", config.cache_dir is not None, {"cache_dir": None}),
            _source("stage_to", config.stage_to is not None, {"stage_to": None}),
        ]
    if paced:
        return found
    found += [
        _source("channels_last", config.channels_last, {"channels_last": False}),
        _source("compile_model", config.compile_model, {"compile_model": False}, config.compile_mode),
        _source("precision", config.precision != "32", {"precision": "32"}, config.precision, OTHER_TRAINING),
    ]
    if on_gpu:
        tf32 = config.matmul_precision != "highest"
        found.append(_source("TF32", tf32, {"matmul_precision": "highest"}, note=OTHER_TRAINING))
    return found


def _source(name: str, is_on: bool, without: dict[str, Value], how: str = "", note: str = "") -> Source:
    """Named by what it is, and how it is set where it is on."""
    if not is_on:
        return Source(name, {})
    return Source(f"{name}: {how}" if how else name, without, note)


def ablate(
    trier: Trier,
    config: HostConfig,
    sources: Sequence[Source],
    *,
    trial_s: float,
    rounds: int = ROUNDS,
    journal: Journal,
    tell: Callable[[str], None],
    has_time: Callable[[], bool] = lambda: True,
    told: Callable[[Contribution], None] = lambda _row: None,
) -> Ablation:
    """The contribution of each source; a round that no time is left for is left out, but never the first.

    `tell` gets what is running, `told` what was found about a source so far. Trials that the journal has from before an
    interruption are not run again.
    """
    switched = [source for source in sources if not source.is_off]
    together = {
        key: value for source in switched if source.note != OTHER_TRAINING for key, value in source.without.items()
    }
    if len(switched) > 1:
        switched.append(Source(TOGETHER, together, "without what is another training" if _differs(switched) else ""))
    full: Settings = {key: getattr(config, key) for source in switched for key in source.without}
    whole: list[Measured] = []
    off: dict[str, list[Measured]] = {source.label: [] for source in switched}
    beside: dict[str, list[Measured]] = {source.label: [] for source in switched}
    trials = done = 0

    def run(settings: Settings, what: str) -> Measured:
        nonlocal trials
        trials += 1
        measured = journal.recorded(settings)
        if measured is None:
            tell(f"{trials}. {what}")
            measured = trier.run(settings, trial_s)
            journal.trial(settings, measured)
        return measured

    while done < rounds and (done == 0 or has_time()):
        whole.append(run(full, "the config as given"))
        if whole[-1].result not in KNOWN_RESULTS:
            _refuse_broken(whole[-1])
        # Backwards in every other round, so that no source always runs on a warmer machine than another.
        for source in switched if done % 2 == 0 else switched[::-1]:
            before = whole[-1]
            off[source.label].append(run(full | source.without, f"without: {source.label}"))
            whole.append(run(full, "the config as given"))
            beside[source.label] += [before, whole[-1]]
            row = _contribution(source, off, beside, whole)
            journal.note("source", **row.as_dict())
            told(row)
        done += 1
    rows = [
        Contribution(source) if source.is_off else _contribution(source, off, beside, whole)
        for source in [*sources, *(source for source in switched if source.label == TOGETHER)]
    ]
    rates = [rate for one in whole if (rate := one.raw_samples_per_second)]
    result = Ablation(full, sum(rates) / len(rates) if rates else None, tuple(rows), done, trials)
    for row in rows:
        if row.source.is_off:
            journal.note("source", **row.as_dict())
    return result


def _differs(sources: Sequence[Source]) -> bool:
    return any(source.note == OTHER_TRAINING for source in sources)


def _contribution(
    source: Source, off: dict[str, list[Measured]], beside: dict[str, list[Measured]], whole: Sequence[Measured]
) -> Contribution:
    runs = off[source.label]
    spread = spread_of([whole, *off.values()], _speed)
    found = compare(beside[source.label], runs, _speed, spread)
    if found is None:
        failed = next((run for run in runs if run.result not in KNOWN_RESULTS), None)
        return Contribution(source, failure="" if failed is None else failed.result, runs=tuple(runs))
    return Contribution(source, found.ratio, math.expm1(found.noise), runs=tuple(runs))


def _speed(measured: Measured) -> float | None:
    return measured.raw_samples_per_second if measured.result in KNOWN_RESULTS else None


def _refuse_broken(measured: Measured) -> None:
    raise UserError(
        "config-does-not-run",
        f"the config as given was not measured: {measured.result}",
        why=measured.detail or "every other trial is compared with it",
        hint="stoker plan CONFIG    # memory; or stoker doctor CONFIG",
    )
