"""`stoker tune CONFIG --ablate`: how much each optimisation of a config contributes, measured by switching it off.

From the config as given, one thing is switched off at a time. Each such trial runs between two of the whole config, and
is compared with these: a machine that gets slower meanwhile does not look like a speed-up.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stoker.config import config_values
from stoker.config.reading import load_for_command
from stoker.core.console import Answer, format_table, say
from stoker.core.errors import UsageError, UserError
from stoker.core.units import count, rate_text
from stoker.io.stores import is_url
from stoker.loader.loader import choose_engine
from stoker.profile.host import HostConfig
from stoker.tasks.base import task_for
from stoker.tune.config_search import TuneOptions, open_config
from stoker.tune.journal import open_journal
from stoker.tune.objective import Objective
from stoker.tune.records import Measured, Settings, Value, mean_rate
from stoker.tune.text import settings_text
from stoker.tune.trials import FLOOR, Trials

NAME = "ablate.jsonl"
ROUNDS = 2
LEAST_LOOKAHEAD = 1_000_000
"""The smallest that the config accepts, in bytes."""
PIXELS = "changes pixels slightly"
OTHER_TRAINING = "another training"
TOGETHER = "all of these together"


@dataclass(frozen=True)
class Optimisation:
    """Something in a config that may make it fast, and the settings without it."""

    label: str
    without: Settings
    """What switches it off; empty if it is off already."""
    note: str = ""


@dataclass(frozen=True)
class Contribution:
    """How much faster the whole config is than the one without this optimisation."""

    source: Optimisation
    factor: float | None = None
    """None if it is off already, or could not be measured."""
    spread: float | None = None
    """Two standard errors, as a share of the factor."""
    failure: str = ""
    """Why a trial without it gave no speed."""

    @property
    def verdict(self) -> str:
        """In a few words: off, inside the noise, slower with it, or nothing to add."""
        if not self.source.without:
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
    rate: float | None
    """Samples per second of the whole config."""
    rows: tuple[Contribution, ...]
    rounds: int
    trials: int

    def as_dict(self) -> dict[str, Any]:
        return {
            "samples_per_second": self.rate, "sources": [row.as_dict() for row in self.rows], "rounds": self.rounds,
            "trials": self.trials, "notes": [],
        }  # fmt: skip


def ablate_config(path: Path, overrides: Sequence[str], options: TuneOptions) -> Answer:
    if options.other_places:
        seen = "--packed and --pack are for a search; --ablate switches off what the config has"
        hint = f"stoker tune {path} --ablate data_root={(*options.packed, 'DIR')[0]}"
        raise UsageError("usage", seen, hint=hint)
    if options.also or options.write is not None:
        raise UsageError("usage", "--ablate writes no config", hint=f"stoker tune {path} --ablate")
    opened = open_config(load_for_command(path, overrides), path, overrides, options)
    config, live = opened.config, opened.live
    remote = config.data_root is not None and is_url(config.data_root)
    on_gpu, paced = bool(opened.machine.accelerators), opened.pace_s is not None
    sources = sources_of(config, on_gpu=on_gpu, remote=remote, paced=paced)
    facts = {
        "what": "ablation", "config": str(path), "overrides": list(overrides), "unit": live.unit,
        "trial_s": options.trial_s, "budget_s": options.budget_s, "pace": options.pace,
    }  # fmt: skip
    same = {"config": config_values(config), "options": [options.pace, options.trial_s, options.ram_bytes]}
    journal = open_journal(path.with_name(NAME), facts, same, opened.machine, fresh=options.fresh)
    trials = Trials(
        opened.trier, Objective().score, journal, live, budget_s=options.budget_s, trial_s=options.trial_s,
        same_training=False,
    )  # fmt: skip
    try:
        found = ablate(trials, config, sources, lambda row: say("  ".join(cell for cell in _cells(row) if cell)))
        journal.note("end", stopped=f"{count(found.rounds, 'round')}", before=found.rate, trials=found.trials)
    finally:
        live.close()
        opened.trier.close()
        journal.close()
    assert journal.path is not None
    return Answer(ablation_text(found, live.unit), {**found.as_dict(), "journal": str(journal.path)})


def sources_of(config: HostConfig, *, on_gpu: bool, remote: bool, paced: bool = False) -> list[Optimisation]:
    """Everything in this config that is there for speed; with a paced consumer, only what concerns the input."""
    task, workers, prefetch = task_for(config), config.num_workers, config.prefetch_factor or 2
    processes = choose_engine(config.loader, workers, volumes=task.releases_gil) == "process"
    engine = "processes, not threads" if processes else "threads, not processes"
    found = [
        _source("workers", workers > 0, {"num_workers": 0, "prefetch_factor": None}, f"{workers}"),
        _source("prefetch_factor", workers > 0 and prefetch > 1, {"prefetch_factor": 1}, f"{prefetch}"),
        _source("engine", workers > 0, {"loader": "thread" if processes else "process"}, engine),
        _source("persistent_workers", workers > 0 and config.persistent_workers, {"persistent_workers": False}),
    ]
    if on_gpu and not paced:
        found.append(_source("pin_memory", config.pin_memory, {"pin_memory": False}))
    if "decoder" in task.tuned_keys:
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


def _source(name: str, is_on: bool, without: dict[str, Value], how: str = "", note: str = "") -> Optimisation:
    """Named by what it is, and how it is set where it is on."""
    if not is_on:
        return Optimisation(name, {})
    return Optimisation(f"{name}: {how}" if how else name, without, note)


def ablate(
    trials: Trials,
    config: HostConfig,
    sources: Sequence[Optimisation],
    told: Callable[[Contribution], None] = lambda _row: None,
) -> Ablation:
    """The contribution of each optimisation; the second round is left out if the first took half of the budget.

    `told` is called with the findings about an optimisation so far.
    """
    switched = [source for source in sources if source.without]
    same = [source for source in switched if source.note != OTHER_TRAINING]
    if len(switched) > 1:
        without = {key: value for source in same for key, value in source.without.items()}
        note = "without what is another training" if len(same) < len(switched) else ""
        switched.append(Optimisation(TOGETHER, without, note))
    full: Settings = {key: getattr(config, key) for source in switched for key in source.without}
    rows = {source.label: Contribution(source) for source in (*sources, *switched)}
    off: dict[str, list[Measured]] = {source.label: [] for source in switched}
    beside: dict[str, list[Measured]] = {source.label: [] for source in switched}
    whole: list[Measured] = []
    rounds = 0
    while rounds < ROUNDS and (rounds == 0 or trials.spent_s < trials.budget_s / 2):
        whole.append(trials.run(full, {}, "whole"))
        if whole[-1].result != "measured":
            raise UserError(
                "config-does-not-run", f"the config as given was not measured: {whole[-1].result}",
                why=whole[-1].detail or "every other trial is compared with it",
                hint="stoker plan CONFIG    # memory; or stoker doctor CONFIG",
            )  # fmt: skip
        # Backwards in every other round, so that no setting always runs on a warmer machine than another.
        for source in switched if rounds % 2 == 0 else switched[::-1]:
            off[source.label].append(trials.run(full | source.without, source.without, "candidate"))
            whole.append(trials.run(full, {}, "whole"))
            beside[source.label] += whole[-2:]
            row = rows[source.label] = _contribution(source, trials, beside[source.label], off[source.label])
            trials.journal.note("source", **row.as_dict())
            told(row)
        rounds += 1
    for source in sources:
        if not source.without:
            trials.journal.note("source", **rows[source.label].as_dict())
    return Ablation(mean_rate(whole), tuple(rows.values()), rounds, trials.count)


def _contribution(
    source: Optimisation, trials: Trials, beside: Sequence[Measured], off: Sequence[Measured]
) -> Contribution:
    found = trials.noise.compare(beside, off)
    if found is None:
        failed = next((run.result for run in off if run.result != "measured"), "")
        return Contribution(source, failure=failed)
    return Contribution(source, found.ratio, math.expm1(found.noise))


def ablation_text(ablation: Ablation, unit: str) -> str:
    whole = "" if ablation.rate is None else f"; with all of them: {rate_text(ablation.rate, unit)}"
    table = format_table([_cells(row) for row in ablation.rows], ("optimisation", "without it", "speed-up", ""))
    runs = f"{count(ablation.trials, 'trial')} in {count(ablation.rounds, 'round')}, each beside the whole config"
    return "\n".join([f"speed-up by source, each measured by switching it off{whole}", "", table, "", runs])


def _cells(row: Contribution) -> tuple[str, str, str, str]:
    speed = "" if row.factor is None else f"{row.factor:.2f}x ± {row.spread or 0:.0%}".replace("%", " %")
    remarks = "; ".join(text for text in (row.verdict, row.source.note) if text)
    without = settings_text(row.source.without) if row.source.without and row.source.label != TOGETHER else ""
    return row.source.label, without, speed, remarks
