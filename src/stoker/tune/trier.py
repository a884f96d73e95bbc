"""Tries settings of a config: each in a fresh process, under a memory limit and a time limit. Whatever they cause is a
result."""

from __future__ import annotations

from collections.abc import Callable

from stoker.core.errors import StokerError
from stoker.io.stores import is_url
from stoker.profile.host import HostConfig
from stoker.trial.fork_server import Ended, ForkServer
from stoker.trial.limits import patience_after
from stoker.trial.trial_server import observed_in, run_trial, trial_server
from stoker.tune.records import Measured, Settings
from stoker.tune.space import config_with

COMPILING_S = 600.0
"""Added for a compiled model: an allowance."""
FOR_ROUNDS_S = 60.0
"""Added for data behind a network: a trial lasts for several rounds of requests, and the first batch for one."""
KEPT_BATCHES = 160
"""Single steps and batches that are kept: the input of one simulation (doctor/what_if.py)."""


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
            "measured", windows=tuple(answer["windows"]), wait_share=observed.wait_share,
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
