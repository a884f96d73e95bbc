"""Trials of a config: how they are started, and what they observed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from stoker.config import config_values
from stoker.profile.clock_reading import observed_from
from stoker.profile.host import HostConfig
from stoker.profile.observed import LoopRates, Observed
from stoker.tasks.base import task_for
from stoker.trial.fork_server import Ended, ForkServer

ALONE = {"devices": 1, "num_nodes": 1, "sync_batchnorm": False}
"""One rank is enough to see what its loader does, and what its model computes."""


def open_once(config: HostConfig, say: Callable[[str], None]) -> None:
    """Lists, calibrates and indexes once, here: the trials find the saved results."""
    task_for(config).prepare_data(config, say)


def trial_server() -> ForkServer:
    """The server that trials of configs are forked from."""
    return ForkServer("stoker.trial.process")


def run_trial(
    server: ForkServer,
    kind: str,
    config: HostConfig,
    seconds: float,
    *,
    timeout_s: float,
    memory_bytes: int | None = None,
    report: Callable[[float], None] = lambda _seconds: None,
    **job: Any,
) -> Ended:
    """How a trial of this kind ended (`stoker.trial.process` describes `job`); `report` gets the seconds
    measured so far. Any failure that the config causes is a result."""
    job |= {"kind": kind, "config": config_values(config.model_copy(update=ALONE)), "seconds": seconds}
    return server.call(
        "stoker.trial.process:run_trial", job, timeout_s=timeout_s, memory_bytes=memory_bytes, on_message=report
    )


def observed_in(ended: Ended, config: HostConfig, pace_s: float | None) -> Observed:
    """The clock's figures of a `together` trial that was measured."""
    pace = None if pace_s is None else config.batch_size / pace_s
    seen = observed_from(ended.result["lines"], "the trial")
    return replace(seen, source="trial", rates=LoopRates(ceiling=pace, pace=pace))
