"""`stoker tune CONFIG`: from a config to a search, and to tuned.yaml.

Each trial is a fresh process under a memory limit and a time limit; whatever its settings cause is a result.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from stoker.config import config_values
from stoker.config.reading import Resolved, load_for_command
from stoker.core.console import Answer, progress_bar, say, say_notes
from stoker.core.errors import StokerError, UserError
from stoker.doctor.pacing import seconds_of_a_step
from stoker.io.stores import is_url
from stoker.profile.host import HostConfig, Machine, fit_to_machine, read_machine
from stoker.profile.memory import read_memory, used_by_others_bytes
from stoker.tasks.base import task_for
from stoker.tasks.packing import RECORDS, check_destination, claim_destination
from stoker.trial.fork_server import Ended, ForkServer, patience_after
from stoker.trial.trial_server import observed_in, open_once, run_trial, trial_server
from stoker.tune.journal import Journal, open_journal, outcome_record
from stoker.tune.objective import Objective
from stoker.tune.records import Fits, Goal, Measured, Outcome, Settings
from stoker.tune.result import DEFAULT_NAME, check_target, journal_path, write_tuned
from stoker.tune.search import Choices, search
from stoker.tune.space import Surroundings, config_with, other_training, proposer, settings_of
from stoker.tune.text import Live, outcome_text
from stoker.tune.trials import Trials

DEFAULT_BUDGET_S = 20 * 60.0
DEFAULT_TRIAL_S = 6.0
COMPILING_S = 600.0
"""Added for a compiled model: an allowance."""
FOR_ROUNDS_S = 60.0
"""Added for data behind a network: a trial lasts for several rounds of requests, and the first batch for one."""
KEPT_BATCHES = 160
"""Single steps and batches that are kept: the input of one simulation (doctor/what_if.py)."""


@dataclass(frozen=True)
class TuneOptions:
    budget_s: float = DEFAULT_BUDGET_S
    trial_s: float = DEFAULT_TRIAL_S
    goal: Goal = "throughput"
    pace: str | None = None
    write: Path | None = None
    also: tuple[str, ...] = ()
    price_per_hour: float | None = None
    ram_bytes: int | None = None
    """For the training itself; None: all that is available on this machine."""
    packed: tuple[str, ...] = ()
    """The same data in other places, to be tried as `data_root`."""
    pack: Path | None = None
    """A folder for packs of the data, to be made and tried."""
    force: bool = False
    fresh: bool = False

    @property
    def other_places(self) -> bool:
        """Whether the same data is also read from elsewhere."""
        return bool(self.packed) or self.pack is not None


@dataclass(frozen=True)
class Tuned:
    outcome: Outcome
    target: Path | None
    """The result; None if the search was interrupted."""
    journal: Path

    def answer(self) -> Answer:
        files = {"tuned": None if self.target is None else str(self.target), "journal": str(self.journal)}
        return Answer(outcome_text(self.outcome, self.target), {**outcome_record(self.outcome), **files})


@dataclass(frozen=True)
class Opened:
    """A config that is ready for trials."""

    config: HostConfig
    machine: Machine
    cpus: int
    """Cores of one rank."""
    pace_s: float | None
    remarks: list[str]
    trier: ConfigTrier
    live: Live


def open_config(resolved: Resolved, path: Path, overrides: Sequence[str], options: TuneOptions) -> Opened:
    """Fits the config to this machine, opens its data once, and prints what is special about its trials."""
    machine = _machine(options.ram_bytes)
    config, notes = fit_to_machine(resolved.config, machine)
    say_notes(notes)
    pace_s = None if options.pace is None else seconds_of_a_step(options.pace, path, overrides, config.batch_size)
    with progress_bar("opening the data", None):
        open_once(config, say)
    ranks = config.devices * config.num_nodes
    cpus = max(1, machine.cpus // config.devices)
    shared = f"{ranks} ranks: the trials run one of them, with its share of the cores ({cpus}) and of the memory"
    remarks = [shared] if ranks > 1 else []
    say_notes(remarks)
    live = Live(task_for(config).unit, options.trial_s)
    trier = ConfigTrier(
        config, pace_s=pace_s, memory_limit_bytes=_memory_limit(options.ram_bytes, config.devices), cpus=cpus,
        ranks=ranks, compare_pixels=options.other_places, report=live.report,
    )  # fmt: skip
    return Opened(config, machine, cpus, pace_s, remarks, trier, live)


def tune_config(path: Path, overrides: Sequence[str], options: TuneOptions) -> Tuned:
    """Searches, and writes the result beside the config.

    Raises UserError for problems of the config itself, as `stoker train` does.
    """
    target = options.write or path.with_name(DEFAULT_NAME)
    resolved = load_for_command(path, overrides)
    check_target(target, path, force=options.force)
    if options.pack is not None and resolved.config.data_root is not None:
        check_destination(resolved.config.data_root, options.pack)
    opened = open_config(resolved, path, overrides, options)
    config, machine, trier, live = opened.config, opened.machine, opened.trier, opened.live
    start = settings_of(config)
    if options.other_places:
        start["data_root"] = config.data_root
    facts = {
        "config": str(path), "overrides": list(overrides), "original": start, "goal": options.goal, "unit": live.unit,
        "budget_s": options.budget_s, "trial_s": options.trial_s,
    }  # fmt: skip
    pack = None if options.pack is None else str(options.pack.absolute())
    asked = [options.goal, options.pace, options.trial_s, options.ram_bytes, list(options.packed), pack]
    same = {"config": config_values(config), "options": asked}
    journal = open_journal(journal_path(target), facts, same, machine, fresh=options.fresh)
    packs: Packs | None = None
    try:
        if options.pack is not None:
            packs = Packs(options.pack, config, journal)
        around = _surroundings(opened, options, packs)
        began_s = time.monotonic()
        ceiling = _ceiling(trier, start, options.trial_s, journal, live)
        left_s = options.budget_s - (time.monotonic() - began_s)
        objective = Objective(options.goal, config.epochs, config.limit_val_batches != 0, options.price_per_hour)
        choices = Choices(
            start, proposer(around), plan_fits(config, path, machine), Choices.ready if packs is None else packs.ready,
            ceiling, other_training(options.also, around),
        )  # fmt: skip
        trials = Trials(trier, objective.score, journal, live, budget_s=left_s, trial_s=options.trial_s)
        told = {"unit": live.unit, "config": path.name, "notes": opened.remarks, "paced": options.pace}
        outcome = search(trials, choices, objective, told)
    finally:
        live.close()
        trier.close()
        journal.close()
    if outcome.before is None and outcome.after is None and outcome.stopped != "interrupted":
        raise _does_not_run(path, outcome, trier.first_error)
    assert journal.path is not None
    if outcome.stopped == "interrupted":
        if packs is not None and packs.made:
            say(f"note: the packs in {options.pack} stay until the same command has resumed and ended")
        return Tuned(outcome, None, journal.path)
    if packs is not None:
        packs.keep_only(outcome.best)
    # Also if nothing changed: otherwise the file of an earlier search would be taken for this one's.
    write_tuned(target, path, resolved, overrides, outcome, machine)
    return Tuned(outcome, target, journal.path)


class ConfigTrier:
    """Runs a config with changed settings; expects a config that `fit_to_machine` returned."""

    def __init__(
        self,
        config: HostConfig,
        *,
        pace_s: float | None = None,
        memory_limit_bytes: int | None = None,
        cpus: int = 1,
        ranks: int = 1,
        patience_s: float | None = None,
        compare_pixels: bool = False,
        report: Callable[[float], None] = lambda _seconds: None,
        server: ForkServer | None = None,
    ) -> None:
        """`report` gets the seconds measured so far; `server` is one that triers of several configs share."""
        self.config = config
        self.first_error: StokerError | None = None
        """The error that the first run was refused with: one of the config itself."""
        self._runs = 0
        self._server = server or trial_server()
        self.report = report
        self._pace_s = pace_s
        self._limit_bytes = memory_limit_bytes
        self._cpus, self._ranks = cpus, ranks
        self._patience_s = patience_s
        self._compare_pixels = compare_pixels
        self._first_took_s: float | None = None

    def run(self, settings: Settings, seconds: float) -> Measured:
        """Never raises because of the settings."""
        self._runs += 1
        ended = self._in_child("together", settings, seconds)
        if ended.how != "measured":
            if self._runs == 1:
                self.first_error = ended.error
            return Measured(ended.how, took_s=ended.took_s, peak_bytes=ended.peak_bytes, detail=ended.detail)
        if self._first_took_s is None:
            self._first_took_s = ended.took_s
        answer, observed = ended.result, observed_in(ended, self.config, self._pace_s)
        return Measured(
            "measured", windows=tuple(answer["windows"]), wait_share=observed.times.wait_share,
            first_batch_s=answer["first_batch_s"], start_s=answer["start_s"] + self._server.import_s,
            peak_bytes=ended.peak_bytes, took_s=ended.took_s, ledger=answer["ledger"], observed=observed,
            epoch_samples=answer["epoch_samples"],
        )  # fmt: skip

    def ceiling(self, settings: Settings, seconds: float) -> float | None:
        """Samples per second with batches that are always ready; None if the trial failed."""
        if self._pace_s is not None:
            return self.config.batch_size / self._pace_s
        ended = self._in_child("ceiling", settings, seconds)
        return float(ended.result["images_per_second"]) if ended.how == "measured" else None

    def close(self) -> None:
        """Ends the process that trials are forked from."""
        self._server.close()

    def _in_child(self, kind: str, settings: Settings, seconds: float) -> Ended:
        config = config_with(self.config, settings)
        scale = config.batch_size / self.config.batch_size
        remote = self.config.data_root is not None and is_url(self.config.data_root)
        more_s = (COMPILING_S if config.compile_model else 0.0) + (FOR_ROUNDS_S if remote else 0.0)
        return run_trial(
            self._server, kind, config, seconds, report=self.report, memory_bytes=self._limit_bytes,
            timeout_s=self._patience_s or patience_after(self._first_took_s, seconds) + more_s,
            pace_s=None if self._pace_s is None else self._pace_s * scale, cpus=self._cpus, ranks=self._ranks,
            pixels=self._compare_pixels, keep=KEPT_BATCHES,
        )  # fmt: skip


def plan_fits(config: HostConfig, path: Path | None, machine: Machine) -> Fits:
    """The plan's quick check of settings: those that it refuses would run out of memory, and are never run."""
    from stoker.plan.guard import quick_plan  # imports torch

    def fits(settings: Settings) -> str | None:
        plan = quick_plan(config_with(config, settings), path, machine)
        return plan.refused[0].seen if plan.refused else None

    return fits


def _machine(ram_bytes: int | None) -> Machine:
    """This machine; with a limit for the training itself, that much on top of what other programs use."""
    machine = read_machine()
    if ram_bytes is None:
        return machine
    limit = ram_bytes + (used_by_others_bytes() or 0)
    return replace(machine, ram_bytes=limit if machine.ram_bytes is None else min(machine.ram_bytes, limit))


def _memory_limit(ram_bytes: int | None, ranks_here: int) -> int | None:
    """Memory limit of one rank."""
    state = read_memory()
    known = [] if state is None else [state.available_bytes]
    total = min([*known, *([] if ram_bytes is None else [ram_bytes])], default=None)
    return None if total is None or (ram_bytes is None and ranks_here == 1) else total // ranks_here


def _surroundings(opened: Opened, options: TuneOptions, packs: Packs | None) -> Surroundings:
    config, splits, paced = opened.config, True, opened.pace_s is not None
    if not paced and config.gradient_accumulation > 1 and config.mixup_alpha == config.cutmix_alpha == 0:
        splits = has_batch_norm(config)
    decoded_bytes = task_for(config).decoded_bytes(config)
    if decoded_bytes is not None:
        # All ranks of the node share one cache's size, and each decodes all volumes.
        decoded_bytes *= config.devices if isinstance(config.devices, int) else 1
    return Surroundings(
        config, opened.cpus, cuda=bool(opened.machine.accelerators), paced=paced,
        remote=config.data_root is not None and is_url(config.data_root), splits_change_training=splits,
        goal=options.goal, decoded_bytes=decoded_bytes, mapped=frozenset() if packs is None else packs.mapped,
        packed=(*options.packed, *(() if packs is None else packs.places)),
    )  # fmt: skip


def has_batch_norm(config: HostConfig) -> bool:
    """Whether the network's statistics depend on how an update is divided into batches."""
    from torch.nn.modules.batchnorm import _BatchNorm

    from stoker.plan.tracing import build_without_memory

    step = task_for(config).traceable_step(config)
    return any(isinstance(module, _BatchNorm) for module in build_without_memory(step.build_model).modules())


def _ceiling(trier: ConfigTrier, start: Settings, seconds: float, journal: Journal, live: Live) -> float | None:
    noted = journal.noted("ceiling")
    if noted is not None:
        value = noted.get("samples_per_second")
        return float(value) if isinstance(value, (int, float)) else None
    live.begin("the ceiling: batches that are already in memory")
    found = trier.ceiling(start, seconds)
    live.close()
    journal.note("ceiling", samples_per_second=found)
    return found


def _does_not_run(path: Path, outcome: Outcome, error: StokerError | None) -> StokerError:
    if error is not None:
        return error
    baseline = outcome.steps[0]
    return UserError(
        "config-does-not-run",
        f"{path}: {baseline.reason}",
        why="there is nothing to compare with, and no smaller setting ran either",
        hint=f"stoker verify {path}",
    )


# Packs.

FAR_SLOWER = 1.5
"""A variant is left out if reading a sample takes this many times as long as with the fastest, in their trial. In a
whole loader reading is only a part, so closer ones are measured."""


class Packs:
    """The packs of one search, below a folder."""

    def __init__(self, folder: Path, config: HostConfig, journal: Journal) -> None:
        """Looks at the data; raises UserError if it cannot be packed there."""
        assert config.data_root is not None
        check_destination(config.data_root, folder)
        self._folder = folder.expanduser().absolute()
        self._journal = journal
        self._ours: set[str] = set(_noted_names(journal, "packs"))
        """Packs made by this search, before an interruption or after it."""
        self._ready: dict[str, str | None] = {}
        self._items = task_for(config).items
        self._variants = task_for(config).pack_variants(config)
        self._names = _noted_names(journal, "layouts") or self._worth_trying()

    @property
    def places(self) -> tuple[str, ...]:
        """The candidates for `data_root`, in the order in which they are tried."""
        return tuple(str(self._folder / name) for name in self._names)

    @property
    def mapped(self) -> frozenset[str]:
        """The packs that are read as they are, without decoding."""
        return frozenset(place for place in self.places if Path(place).name in self._variants.mapped)

    def ready(self, settings: Settings) -> str | None:
        """Makes the pack that these settings need; None, or why it cannot be made."""
        name = self._name_of(settings)
        if name is None:
            return None
        if name not in self._ready:
            self._ready[name] = self._make(name)
        return self._ready[name]

    def keep_only(self, best: Settings) -> None:
        """Removes the packs of this search that its result does not use."""
        for name in sorted(self._ours - {self._name_of(best)}):
            root = self._folder / name
            with claim_destination(root):
                self._variants.remove(root)
            _remove_empty(root)
        _remove_empty(self._folder)

    @property
    def made(self) -> bool:
        return bool(self._ours)

    def _name_of(self, settings: Settings) -> str | None:
        return next((name for name in self._names if settings.get("data_root") == str(self._folder / name)), None)

    def _make(self, name: str) -> str | None:
        root = self._folder / name
        if name not in self._ours:
            if root.exists():
                return None  # not ours to change; a trial shows whether it has the same pixels
            # Before the first byte: after a kill, the pack must be recognised as ours.
            self._ours.add(name)
            self._journal.note("packs", names=sorted(self._ours))
        try:
            say(f"packed in {root}: {self._variants.make(name, root)}")
        except StokerError as error:
            return error.seen
        return None

    def _worth_trying(self) -> list[str]:
        """The variants to try, the fastest in their trial first."""
        if len(self._variants.names) == 1:
            return list(self._variants.names)
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(
                "destination-not-writable", f"{self._folder} cannot be made: {error.strerror or error}",
                why="packs would be written there", hint=f"ls -ld {self._folder.parent}",
            ) from None  # fmt: skip
        try:
            times = self._variants.trial(self._folder / ".stoker-tune-trial")
        except StokerError as error:
            say(f"note: the {self._items} are not tried packed: {error.seen}")
            return []
        finally:
            _remove_empty(self._folder)  # the trial's files are gone, others stay
        ranked = sorted(times, key=times.__getitem__)
        names = [name for name in ranked if times[name] <= FAR_SLOWER * times[ranked[0]]]
        self._journal.note("layouts", names=names, seconds=times)
        each = [f"{name} {1e3 * times[name]:.2f} ms" + ("" if name in names else " (left out)") for name in ranked]
        say(f"{self._variants.timed}: {', '.join(each)}")
        return names


def _noted_names(journal: Journal, kind: str) -> list[str]:
    noted: dict[str, Any] = journal.noted(kind) or {}
    names = noted.get("names")
    return [name for name in names if isinstance(name, str)] if isinstance(names, list) else []


def _remove_empty(folder: Path) -> None:
    """Removes a folder in which nothing but our own empty records is left."""
    records = folder / RECORDS
    (records / "lock").unlink(missing_ok=True)
    below = [path for path in records.rglob("*") if path.is_dir()] if records.is_dir() else []
    for path in (*sorted(below, reverse=True), records, folder):
        with suppress(OSError):  # not empty, or not there
            path.rmdir()
