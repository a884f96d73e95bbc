"""Searches in which one trial is killed, hangs, runs out of memory or loses its data: each must end with a valid
result.

All faults happen to a real process, from outside. Trials without a fault run once and are remembered for the next
search, so that twenty searches take minutes.
"""

from __future__ import annotations

import os
import resource
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from bench.tune_bed import Bed
from stoker.profile.memory import tree_pids
from stoker.tune.config_search import ConfigTrier
from stoker.tune.objective import Objective
from stoker.tune.records import Key, Measured, Outcome, Settings, key_of
from stoker.tune.search import Choices, search
from stoker.tune.space import proposer
from stoker.tune.trials import Trials

LEAST_PATIENCE_S = 15.0
"""For a trial that hangs; the product takes a multiple of what the first one took, at least half a minute."""
LITTLE_MEMORY = 150_000_000
"""Less than torch takes."""
ADDRESSES = 1_500_000_000
"""Address space of a process, less than torch's libraries need."""
STARTING_S = 0.03
"""After the start of the process: while it opens its data."""
BUDGET_S = 20 * 60.0
MARK = "STOKER_BENCH_TUNE"
"""An environment variable by which processes that were left behind are found."""
ENDING_S = 3.0

Hit = Callable[[int], object]
"""What happens to the process with this number."""


def _send(number: int, pid: int) -> None:
    os.kill(pid, number)


def _kill_workers(pid: int) -> None:
    for each in tree_pids(pid)[1:] or [pid]:
        with suppress(ProcessLookupError):
            os.kill(each, signal.SIGKILL)


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def _kill_original(pid: int) -> None:
    """The process that trials are copied from."""
    os.kill(_parent(pid), signal.SIGKILL)


def _take_addresses(pid: int) -> None:
    resource.prlimit(pid, resource.RLIMIT_AS, (ADDRESSES, ADDRESSES))


@dataclass(frozen=True)
class Fault:
    """What goes wrong, and in which trial of a search."""

    name: str
    trials: tuple[int, ...]
    """The trials that are hit in two searches, counted from 0: the first two have the original settings."""
    starting: Hit | None = None
    measuring: Hit | None = None
    data: str | None = None
    """What happens to the data while the trial measures: `pipes` that nobody writes to, or `vanish`."""
    little_memory: bool = False


FAULTS = (
    Fault("killed while it starts", (0, 3), starting=partial(_send, signal.SIGKILL)),
    Fault("killed while it measures", (1, 4), measuring=partial(_send, signal.SIGKILL)),
    Fault("crashes in native code", (0, 5), measuring=partial(_send, signal.SIGSEGV)),
    Fault("aborts while it starts", (2,), starting=partial(_send, signal.SIGABRT)),
    Fault("what it was copied from is killed", (6,), measuring=_kill_original),
    Fault("its workers are killed", (1, 2), measuring=_kill_workers),
    Fault("stops while it starts", (2, 4), starting=partial(_send, signal.SIGSTOP)),
    Fault("stops while it measures", (1, 5), measuring=partial(_send, signal.SIGSTOP)),
    Fault("exceeds its memory", (2, 3), little_memory=True),
    Fault("cannot allocate", (3, 6), starting=_take_addresses),
    Fault("its files become pipes", (2,), data="pipes"),
    Fault("its files vanish", (4,), data="vanish"),
)


@dataclass
class FaultyTrier:
    """Runs settings for real, with a fault in one trial; remembers what the others measured."""

    open_trier: Callable[..., ConfigTrier]
    fault: Fault | None
    at: int
    data: Path
    known: dict[Key, Measured]
    trials: int = 0
    faulty: Measured | None = None
    ran: set[Key] = field(default_factory=set)
    """What was measured without a fault, in this search."""

    def run(self, settings: Settings, seconds: float) -> Measured:
        number, key = self.trials, key_of(settings)
        self.trials += 1
        if self.fault is not None and number == self.at:
            self.faulty = self._run_with_fault(self.fault, settings, seconds)
            if self.faulty.result == "measured":
                self.ran.add(key)
            return self.faulty
        if key not in self.known:
            self.known[key] = self.open_trier().run(settings, seconds)
        if self.known[key].result == "measured":
            self.ran.add(key)
        return self.known[key]

    def _run_with_fault(self, fault: Fault, settings: Settings, seconds: float) -> Measured:
        usual_s = max((measured.took_s for measured in self.known.values()), default=0.0)
        patience_s = max(LEAST_PATIENCE_S, 2 * usual_s)
        trier = self.open_trier(patience_s=patience_s, **({"limit": LITTLE_MEMORY} if fault.little_memory else {}))
        before, hit = set(tree_pids(os.getpid())), threading.Event()

        def victims() -> list[int]:
            """The trial's process: what is new, but neither what it was copied from nor what is below it."""
            new = [pid for pid in tree_pids(os.getpid()) if pid not in before]
            with suppress(OSError):  # one of them has ended
                return [pid for pid in new if _parent(pid) != os.getpid()][:1]
            return []

        def strike(act: Hit) -> None:
            if not hit.is_set():
                hit.set()
                for pid in victims():
                    with suppress(ProcessLookupError):
                        act(pid)

        def strike_at_start(act: Hit) -> None:
            end_s = time.monotonic() + patience_s
            while not victims() and time.monotonic() < end_s:
                time.sleep(0.005)
            time.sleep(STARTING_S)
            strike(act)

        if fault.starting is not None:
            threading.Thread(target=strike_at_start, args=(fault.starting,), daemon=True).start()
        with damaged(self.data, fault.data) as damage:
            if fault.measuring is not None:
                act = fault.measuring
                trier.report = lambda _seconds: strike(act)
            elif fault.data is not None:
                trier.report = lambda _seconds: damage()
            return trier.run(settings, seconds)


@contextmanager
def damaged(folder: Path, kind: str | None) -> Iterator[Callable[[], None]]:
    """A function that takes the files of a folder away, once, or puts pipes in their places that nobody writes to."""
    aside, pipes = folder.with_name(folder.name + ".aside"), folder.with_name(folder.name + ".pipes")
    for path in folder.rglob("*") if kind == "pipes" else ():
        if path.is_file():
            pipe = pipes / path.relative_to(folder)
            pipe.parent.mkdir(parents=True, exist_ok=True)
            os.mkfifo(pipe)

    def damage() -> None:
        if aside.exists():
            return
        folder.rename(aside)
        if kind == "pipes":
            pipes.rename(folder)  # at once: files that are missing for a while would be another fault

    try:
        yield damage
    finally:
        shutil.rmtree(pipes, ignore_errors=True)
        if aside.exists():
            shutil.rmtree(folder, ignore_errors=True)
            aside.rename(folder)


def _marked() -> set[int]:
    """All processes that descend from this one, orphans included: they have inherited the mark."""
    found, mark = set(), f"{MARK}={os.getpid()}".encode()
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if mark in (folder / "environ").read_bytes().split(b"\0"):
                found.add(int(folder.name))
    return found


def _left_behind(before: set[int]) -> set[int]:
    """New processes that do not end within a moment, but for the one that trials are forked from: it waits for more."""
    end_s = time.monotonic() + ENDING_S
    while True:
        left = set()
        for pid in _marked() - before:
            with suppress(OSError):
                if _parent(pid) != os.getpid():
                    left.add(pid)
        if not left or time.monotonic() > end_s:
            return left
        time.sleep(0.1)


def survive(bed: Bed, seconds: float) -> list[dict[str, Any]]:
    """One row per search; expects a scenario that was made ready, whose data is in a folder."""
    known: dict[Key, Measured] = {}
    os.environ[MARK] = str(os.getpid())
    bed.server.close()  # it starts anew with the mark
    assert bed.config.data_root is not None
    data = Path(bed.config.data_root)

    def tuned(fault: Fault | None, at: int) -> tuple[FaultyTrier, Outcome]:
        trier = FaultyTrier(bed.open_trier, fault, at, data, known)
        choices = Choices(bed.start, proposer(bed.around), bed.fits, ceiling=bed.pace_samples_per_second)
        trials = Trials(trier, Objective().score, budget_s=BUDGET_S, trial_s=seconds)
        outcome = search(trials, choices, Objective())
        return trier, outcome

    without, _ = tuned(None, 0)
    rows: list[dict[str, Any]] = []
    for fault in FAULTS:
        for wanted in fault.trials:
            at = min(wanted, without.trials - 1)
            before = _marked()
            row: dict[str, Any] = {"fault": fault.name, "trial": at}
            try:
                trier, outcome = tuned(fault, at)
            except Exception as error:  # a search that raises did not survive; the others still count
                row |= {"result": None, "survived": False, "error": f"{type(error).__name__}: {error}"}
            else:
                injected = trier.faulty is not None and trier.faulty.result != "measured"
                valid = key_of(outcome.best) in trier.ran and not _left_behind(before)
                row |= {
                    "result": None if trier.faulty is None else trier.faulty.result,
                    "detail": "" if trier.faulty is None else trier.faulty.detail,
                    "stopped": outcome.stopped, "trials": outcome.trials, "survived": injected and valid,
                }  # fmt: skip
            rows.append(row)
            sys.stderr.write(f"{'survived' if row['survived'] else 'LOST'}  {fault.name}, trial {at}: {row}\n")
    return rows
