"""A scenario made ready: its config, its consumer's pace, its memory, and what runs settings on it."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from bench.tune_scenarios import MB, Scenario, points_of
from stoker.config import load_config
from stoker.io.stores import is_url
from stoker.plan.guard import quick_plan
from stoker.profile.host import HostConfig, Machine, fit_to_machine, read_machine, usable_cpus
from stoker.tasks.volumes.pack.cases_packing import pack
from stoker.tasks.volumes.pack.write_volume import LAYOUTS
from stoker.trial.fork_server import ForkServer
from stoker.trial.trial_server import open_once, trial_server
from stoker.tune.config_search import ConfigTrier, TuneOptions, plan_fits, tune_config
from stoker.tune.records import Fits, Key, Measured, Outcome, Settings, key_of
from stoker.tune.space import Surroundings, config_with, settings_of

LOADER_ALONE: Settings = {"num_workers": 2, "loader": "thread", "prefetch_factor": 4}
"""What a pace is relative to, with far look-ahead and large caches."""
TAKES_NO_TIME_S = 1e-4
WORTH_A_SECOND_RUN, MOST_SECOND_RUNS = 0.9, 3
"""A share of the best so far: a point of the grid below it is not measured again, nor one that so many others beat."""


@dataclass
class Bed:
    """Everything that the benchmark does to one scenario."""

    scenario: Scenario
    path: Path
    config: HostConfig
    machine: Machine
    pace_s: float
    loader_samples_per_second: float
    """Samples per second of two threads, when nobody waits."""
    ram_bytes: int | None
    start: Settings
    fits: Fits
    server: ForkServer
    """Shared by all trials of the scenario; each scenario has its own, with the addresses of its server."""
    ledgers: set[str] = field(default_factory=set)
    """What each trial trained on."""
    trials: int = 0

    @property
    def pace_samples_per_second(self) -> float:
        return self.config.batch_size / self.pace_s

    @property
    def around(self) -> Surroundings:
        return Surroundings(
            self.config, self.machine.cpus, paced=True,
            remote=self.config.data_root is not None and is_url(self.config.data_root),
        )  # fmt: skip

    def open_trier(self, *, limit: int | None = None, patience_s: float | None = None) -> ConfigTrier:
        return ConfigTrier(
            self.config, pace_s=self.pace_s, memory_limit_bytes=limit or self.ram_bytes, cpus=self.machine.cpus,
            patience_s=patience_s, server=self.server, compare_pixels=self.scenario.packed,
        )  # fmt: skip

    def run(self, settings: Settings, seconds: float) -> Measured:
        measured = self.open_trier().run(settings, seconds)
        self.note([measured])
        rate = measured.samples_per_second
        sys.stderr.write(f"  {shown(settings)}: {'-' if rate is None else f'{rate:,.1f}/s'} {measured.detail}\n")
        return measured

    def note(self, runs: Iterable[Measured]) -> None:
        for measured in runs:
            self.trials += 1
            if measured.ledger is not None:
                self.ledgers.add(measured.ledger)

    def tune(self, seconds: float) -> Outcome:
        """What the command does."""
        options = TuneOptions(
            budget_s=self.scenario.budget_s, trial_s=seconds, pace=f"{1e3 * self.pace_s:.6f}ms",
            ram_bytes=self.ram_bytes, write=self.path.with_name("tuned.yaml"), force=True, fresh=True,
            pack=self.path.with_name("packs") if self.scenario.packed else None,
        )  # fmt: skip
        outcome = tune_config(self.path, (), options).outcome
        for step in outcome.steps:
            self.note((*step.measured, *step.against))
        return outcome


@contextmanager
def made_ready(scenario: Scenario, root: str, work: Path, seconds: float) -> Iterator[Bed]:
    """Writes the config, opens the data, and measures the loader alone to know what the pace is relative to."""
    folder = work / scenario.name.replace(" ", "-").replace(",", "").replace("/", "-")
    folder.mkdir(parents=True, exist_ok=True)
    path, machine = folder / "config.yaml", read_machine()
    keys: dict[str, Any] = {"data_root": root, "pin_memory": False, **scenario.keys, **scenario.start}
    if scenario.volumes:
        # Longer than any trial; three scrolls of which one is for validation.
        keys |= {"task": "segment3d", "model": "small_unet", "folds": 3, "steps_per_epoch": 100_000}
    else:
        # The model is never built for a paced consumer; the plan counts its memory.
        keys |= {"task": "classify", "model": "test_resnet", "index_dir": str(work / "index")}
    if "lookahead" in keys:
        keys["lookahead"] = f"{keys['lookahead'] // MB}MB"  # as a user has to write it
    path.write_text("".join(f"{key}: {json.dumps(value)}\n" for key, value in keys.items()))
    config = fit_to_machine(load_config(path, ()).config, machine)[0]
    open_once(config, lambda line: print(line, file=sys.stderr))
    start = settings_of(config)
    if scenario.packed:
        start["data_root"] = config.data_root
        scenario = replace(scenario, axes=scenario.axes | {"data_root": packed_in_all_layouts(config, folder)})
    alone = {"lookahead": 256 * MB, **({"volume_cache": 256 * MB} if scenario.volumes else {})}
    ram_bytes = None
    if scenario.batches_of_room is not None:
        image_bytes = 3 * config.img_size**2
        ram_bytes = needed_bytes(config, path, machine)
        ram_bytes += scenario.batches_of_room * config.batch_size * image_bytes
    with closing(trial_server()) as server:
        trier = ConfigTrier(config, pace_s=TAKES_NO_TIME_S, cpus=machine.cpus, server=server)
        measured = trier.run(start | LOADER_ALONE | alone, seconds)
        rate = measured.samples_per_second
        if rate is None:
            raise RuntimeError(f"{scenario.name}: the loader alone: {measured.result}: {measured.detail}")
        yield Bed(
            scenario, path, config, machine, config.batch_size / (scenario.pace * rate), rate, ram_bytes, start,
            plan_fits(config, path, machine) if ram_bytes is None else _fits_into(ram_bytes, config, path, machine),
            server,
        )  # fmt: skip


def packed_in_all_layouts(config: HostConfig, folder: Path) -> tuple[str, ...]:
    """The data as it is, and packs of it for the grid; tune makes its own."""
    assert config.data_root is not None
    found = [config.data_root]
    for name in LAYOUTS:
        place = folder / "grid" / name
        pack(config, place, workers=usable_cpus(), layout=name)
        found.append(str(place))
    return tuple(found)


def needed_bytes(config: HostConfig, path: Path, machine: Machine) -> int:
    """What the plan says that a config needs, without other programs: these change while we look."""
    budget = quick_plan(config, path, machine).ram
    return budget.total_bytes - budget.parts.get("system", 0)


def _fits_into(ram_bytes: int, config: HostConfig, path: Path, machine: Machine) -> Fits:
    def fits(settings: Settings) -> str | None:
        needed = needed_bytes(config_with(config, settings), path, machine)
        if needed <= ram_bytes:
            return None
        return f"it needs {needed / 1e6:,.0f} MB, and there are {ram_bytes / 1e6:,.0f}"

    return fits


@dataclass
class Row:
    """A point of the grid."""

    settings: Settings
    at: list[list[int]]
    """Its places on the axes: several, where a value has no effect."""
    values: list[float] = field(default_factory=list)
    refused: str | None = None
    """Why it would not fit, by the plan."""

    @property
    def mean(self) -> float:
        return sum(self.values) / len(self.values) if self.values else 0.0

    def value(self, number: int) -> float:
        """The value of a round; points far from the best have only one."""
        return self.values[min(number, len(self.values) - 1)]


def measure_grid(bed: Bed, seconds: float, rounds: int, order: random.Random) -> list[Row]:
    """Every point once, in random order; the best ones again in each further round."""
    rows = rows_of(bed.scenario, bed.start)
    for row in rows:
        row.refused = bed.fits(row.settings) if bed.ram_bytes is not None else None
    for number in range(rounds):
        best = max((row.mean for row in rows), default=0.0)
        chosen = [row for row in rows if row.refused is None and row.mean >= WORTH_A_SECOND_RUN * best]
        if number:
            chosen = sorted(chosen, key=lambda row: row.mean)[-MOST_SECOND_RUNS:]
        order.shuffle(chosen)
        for row in chosen:
            rate = bed.run(row.settings, seconds).samples_per_second
            if rate is not None:
                row.values.append(rate)
        sys.stderr.write(f"  grid, round {number + 1}: {len(chosen)} of {len(rows)} points\n")
    return rows


def rows_of(scenario: Scenario, start: Settings) -> list[Row]:
    rows = {key_of(point): Row(point, []) for point in points_of(scenario, start)}
    axes = scenario.axes
    for at in _places([len(values) for values in axes.values()]):
        change = {name: values[place] for (name, values), place in zip(axes.items(), at, strict=True)}
        rows[key_of(start | change)].at.append(at)
    return list(rows.values())


def _places(sizes: Sequence[int]) -> list[list[int]]:
    found: list[list[int]] = [[]]
    for size in sizes:
        found = [[*before, place] for before in found for place in range(size)]
    return found


def fresh_rounds(
    bed: Bed, contenders: dict[str, Settings], seconds: float, rounds: int, order: random.Random, *, apart: float
) -> dict[str, list[Measured]]:
    """The runs of each contender, round by round; the same settings are run once per round.

    One more round where the first ones disagree by more than `apart`."""
    distinct: dict[Key, Settings] = {key_of(settings): settings for settings in contenders.values()}
    found: dict[Key, list[Measured]] = {key: [] for key in distinct}
    number = 0
    while number < rounds or (number == rounds and _disagree(found.values(), apart)):
        keys = list(distinct)
        order.shuffle(keys)
        for key in keys:
            found[key].append(bed.run(distinct[key], seconds))
        number += 1
    return {name: found[key_of(settings)] for name, settings in contenders.items()}


def _disagree(groups: Iterable[list[Measured]], apart: float) -> bool:
    rates = [[run.samples_per_second or 0.0 for run in runs] for runs in groups]
    return any(max(each) > (1 + apart) * min(each) for each in rates)


def shown(settings: Settings) -> str:
    """The settings that a grid varies, in short."""
    names: dict[str, Callable[[Any], str]] = {
        "num_workers": lambda value: f"{value} x",
        "loader": str,
        "prefetch_factor": lambda value: f"prefetch {value}",
        "lookahead": lambda value: f"ahead {value // MB} MB",
        "volume_cache": lambda value: f"cache {value // MB} MB",
        "data_root": lambda value: Path(value).name if Path(value).name in LAYOUTS else "as they are",
    }
    return ", ".join(word(settings[name]) for name, word in names.items() if name in settings)
