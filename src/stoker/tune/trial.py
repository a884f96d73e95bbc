"""Tries settings of a config: each in a fresh process, under a memory limit and a time limit. Whatever they cause is a
result."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from stoker.clock.reading import observed_from
from stoker.config import config_values
from stoker.data.store.stores import is_url
from stoker.errors import ConfigError, StokerError
from stoker.machine.host import HostConfig, allowed_cores
from stoker.tune.copies import Copies, Ended
from stoker.tune.guard import MemoryWatch, be_killed_first, memory_left, patience_after
from stoker.tune.records import Measured, Result, Settings
from stoker.tune.space import config_with

ALONE = {"devices": 1, "num_nodes": 1, "sync_batchnorm": False}
"""One rank is enough to see what its loader does."""
NO_MEMORY = frozenset({"out-of-device-memory", "out-of-memory"})
"""Names of errors that say so."""
KILLED = frozenset({"worker-died"})
COMPILING_S = 600.0
"""On top, for a compiled model: an allowance."""
FOR_ROUNDS_S = 60.0
"""On top, for data behind a network: a trial lasts for several rounds of requests, and the first batch for one."""
DETAIL_LETTERS = 400
TRIAL = "stoker.tune.trial:run_trial"

Report = Callable[[float], None]
"""Called with the seconds measured so far."""


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
        report: Report = lambda _seconds: None,
        copies: Copies | None = None,
    ) -> None:
        """`copies` are those of `trial_copies`, for triers of several configs that share them."""
        self.config = config
        self.first_error: StokerError | None = None
        """What the first run was refused with: an error of the config itself."""
        self._runs = 0
        self._copies = copies or trial_copies()
        self.report = report
        self._pace_s = pace_s
        self._limit_bytes = memory_limit_bytes
        self._cpus, self._ranks = cpus, ranks
        self._patience_s = patience_s
        self._compare_pixels = compare_pixels
        self._first_took_s: float | None = None

    def run(self, settings: Settings, seconds: float) -> Measured:
        """Never raises because of the settings."""
        ended, result, detail, peak_bytes = self._in_child("trial", settings, seconds)
        if result != "measured":
            return Measured(result, took_s=ended.took_s, peak_bytes=peak_bytes, detail=detail)
        answer = ended.result
        if self._first_took_s is None:
            self._first_took_s = ended.took_s
        per_second = None if self._pace_s is None else self.config.batch_size / self._pace_s
        observed = replace(
            observed_from(answer["lines"], "the trial"), source="trial", pace_images_per_second=per_second,
            ceiling_images_per_second=per_second,
        )  # fmt: skip
        return Measured(
            "measured", windows=tuple(answer["windows"]), wait_share=observed.wait_share,
            first_batch_s=answer["first_batch_s"], start_s=answer["start_s"] + self._copies.import_s,
            peak_bytes=peak_bytes, took_s=ended.took_s,
            ledger=answer["ledger"], observed=observed, epoch_samples=answer["epoch_samples"],
        )  # fmt: skip

    def ceiling(self, settings: Settings, seconds: float) -> float | None:
        """Samples per second with batches that are always ready; None if the trial failed."""
        if self._pace_s is not None:
            return self.config.batch_size / self._pace_s
        ended, result, _, _ = self._in_child("ceiling", settings, seconds)
        return float(ended.result["samples_per_second"]) if result == "measured" else None

    def _in_child(self, kind: str, settings: Settings, seconds: float) -> tuple[Ended, Result, str, int | None]:
        """How it ended, what that means, why, and the most memory that it had."""
        # As `stoker train` does: torch threads that spin while they wait would take the cores from the loader.
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
        self._runs += kind == "trial"
        config = config_with(self.config, settings)
        pace_s = self._pace_s
        if pace_s is not None:
            pace_s *= config.batch_size / self.config.batch_size
        job = {
            "kind": kind, "config": config_values(config.model_copy(update=ALONE)), "seconds": seconds,
            "pace_s": pace_s, "cpus": self._cpus, "ranks": self._ranks, "pixels": self._compare_pixels,
        }  # fmt: skip
        patience_s = self._patience(seconds, compiled=bool(config.compile_model))
        with MemoryWatch(memory_left(self._limit_bytes)) as watch:
            ended = self._copies.call(
                TRIAL, job, timeout_s=patience_s, on_message=self.report, on_start=watch.begin
            )  # fmt: skip
        if ended.is_good and watch.exceeded_bytes is None:
            return ended, "measured", "", watch.peak_bytes
        if self._runs <= 1:
            self.first_error = ended.error
        result, detail = ending_of(ended, watch, patience_s)
        return ended, result, detail[:DETAIL_LETTERS], watch.peak_bytes

    def close(self) -> None:
        """Ends the process that trials are copied from."""
        self._copies.close()

    def _patience(self, seconds: float, *, compiled: bool) -> float:
        if self._patience_s is not None:
            return self._patience_s
        remote = self.config.data_root is not None and is_url(self.config.data_root)
        more_s = (COMPILING_S if compiled else 0.0) + (FOR_ROUNDS_S if remote else 0.0)
        return patience_after(self._first_took_s, seconds) + more_s


def trial_copies() -> Copies:
    """What trial processes are copied from."""
    return Copies("stoker.tune.trial_process")


def ending_of(ended: Ended, watch: MemoryWatch, patience_s: float) -> tuple[Result, str]:
    """What a trial that gave no result ended with, and why, in words."""
    if watch.exceeded_bytes is not None:
        return "out-of-memory", watch.words()
    if ended.too_slow:
        return "hung", f"not finished after {patience_s:.0f} s"
    if ended.error is not None:
        seen = _all_problems(ended.error)
        if ended.error.name in NO_MEMORY:
            return "out-of-memory", seen
        return ("killed" if ended.error.name in KILLED else "refused"), seen
    if ended.bug is not None:
        return "crashed", ended.bug.partition("\n")[0]
    if ended.status < 0:
        name = signal.Signals(-ended.status).name if -ended.status in set(signal.Signals) else str(-ended.status)
        return "killed", f"the process was killed by {name}"
    return "crashed", f"the process exited with code {ended.status}"


def _all_problems(error: StokerError) -> str:
    problems = [problem.seen for problem in error.problems] if isinstance(error, ConfigError) else []
    return "; ".join([error.seen, *problems])


def run_trial(job: dict[str, Any], tell: Report) -> dict[str, Any]:
    """In the child."""
    be_killed_first()
    cores = sorted(allowed_cores())
    if job["cpus"] < len(cores) and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, cores[: job["cpus"]])  # the share of one rank
    from stoker.tune.trial_process import KINDS  # imports torch and the training loop

    return KINDS[job["kind"]](HostConfig.model_validate(job["config"]), job, tell)
