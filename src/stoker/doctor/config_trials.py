"""The trials behind `stoker doctor CONFIG`: storage, loader alone, ceiling, both together; each in its own process."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from dataclasses import replace

from stoker.profile.clock_reading import NEWEST, known_facts
from stoker.profile.host import HostConfig, read_machine
from stoker.profile.observed import AcceleratorFacts, LoopRates, LoopTimes, Observed, StorageFacts
from stoker.tasks.base import task_for
from stoker.trial.fork_server import Ended, patience_after
from stoker.trial.trial_server import observed_in, open_once, run_trial, trial_server

DEFAULT_SECONDS = 60.0
# Shares of the time; starting processes and building models come on top.
SHARES = {"storage": 0.12, "loader": 0.18, "ceiling": 0.18, "together": 0.3}
NAMES = {"storage": "storage", "loader": "loader alone", "ceiling": "ceiling", "together": "loader and model together"}
# Errors that concern one trial only. Any other error is about the config or the data, and ends the doctor.
TRIAL_FAILURES = frozenset({"out-of-device-memory", "out-of-memory", "worker-died", "loss-not-finite"})
BY_WORTH = ("together", "ceiling", "storage", "loader")
"""What a verdict needs most comes first where time is short."""
LEAST_TRIAL_S = 1.0

TrialProgress = Callable[[str, float, float], None]
"""What is being tried, the seconds of all trials done so far, and how many seconds there are in total."""


def run_trials(
    config: HostConfig,
    seconds: float = DEFAULT_SECONDS,
    *,
    pace_s: float | None = None,
    within_s: float | None = None,
    only: Collection[str] = tuple(SHARES),
    progress: TrialProgress = lambda _what, _done, _total: None,
    say: Callable[[str], None] = lambda _text: None,
) -> Observed:
    """What short real runs of a config show; expects a config that `fit_to_machine` returned.

    With `pace_s`, a consumer that takes a batch every `pace_s` seconds replaces the model. `only` names the trials to
    run, which share the time. A trial that fails is listed in `missing`; an error about the config or the data is
    raised, if possible before the first trial. With `within_s`, everything ends after about that time, including the
    start of each process: the last trials are shortened or left out, and listed.
    """
    began_s, starting_s, before = time.monotonic(), 0.0, 0.0
    progress("opening the data", 0.0, seconds)
    open_once(config, say)
    # Compiling would take longer than everything else.
    plain, cpus = config.model_copy(update={"compile_model": False}), read_machine().cpus
    found: dict[str, Ended] = {}
    missing = _left_out(config, pace_s)
    lengths = trial_seconds(seconds, pace_s, only)
    server = trial_server()
    try:
        for kind in lengths if within_s is None else [name for name in BY_WORTH if name in lengths]:
            took = lengths[kind]
            if within_s is not None:
                left_s = began_s + within_s - time.monotonic() - starting_s
                if starting_s > 0 and left_s < LEAST_TRIAL_S:  # the first is always tried
                    missing.append(
                        f"{NAMES[kind]}: no time for it in {within_s:.0f} s; --seconds {4 * within_s:.0f} has some"
                    )
                    continue
                took = max(LEAST_TRIAL_S, min(took, left_s))

            def report(done_s: float, kind: str = kind, before: float = before, took: float = took) -> None:
                progress(NAMES[kind], before + min(took, done_s), seconds)

            report(0.0)
            ended = run_trial(
                server, kind, plain, took, timeout_s=patience_after(None, took), report=report, pace_s=pace_s,
                cpus=cpus, keep=NEWEST, whole=True,
            )  # fmt: skip
            if ended.how == "measured":
                found[kind] = ended
            else:
                ended.reraise(but_for=TRIAL_FAILURES)
                missing.append(f"{NAMES[kind]}: {ended.detail}")
            starting_s = max(starting_s, ended.took_s - took)
            before += took
    finally:
        server.close()
    progress("done", seconds, seconds)
    return _observed(config, found, missing, pace_s)


def trial_seconds(seconds: float, pace_s: float | None, only: Collection[str] = tuple(SHARES)) -> dict[str, float]:
    """Seconds for each trial; a paced consumer has no ceiling to measure."""
    wanted = {trial: SHARES[trial] for trial in only if trial != "ceiling" or pace_s is None}
    return {trial: seconds * share / sum(wanted.values()) for trial, share in wanted.items()}


def _left_out(config: HostConfig, pace_s: float | None) -> list[str]:
    found, unit = [], task_for(config).unit
    if pace_s is not None:
        found.append(f"the model: replaced by a consumer of {config.batch_size / pace_s:,.0f} {unit}/s")
    if config.compile_model and pace_s is None:
        found.append("torch.compile: the trials ran without it, so the real ceiling is higher")
    ranks = config.devices * config.num_nodes
    if ranks > 1:
        found.append(f"{ranks} ranks: the trials ran one, which had the storage and all cores to itself")
    return found


def _observed(config: HostConfig, found: dict[str, Ended], missing: list[str], pace_s: float | None) -> Observed:
    if "together" in found:
        seen = replace(observed_in(found["together"], config, pace_s), missing=())
    else:
        pace = None if pace_s is None else config.batch_size / pace_s
        seen = Observed("trial", 0, 0, LoopTimes(), LoopRates(ceiling=pace, pace=pace))
    if "ceiling" in found:
        ceiling = found["ceiling"].result
        seen = replace(seen, rates=replace(seen.rates, ceiling=ceiling["images_per_second"]))
        if ceiling["accelerator"] is not None:
            seen = replace(seen, accelerator=known_facts(AcceleratorFacts, ceiling["accelerator"]))
    if "storage" in found:
        missing = [*missing, *found["storage"].result["missing"]]
        seen = replace(seen, storage=known_facts(StorageFacts, found["storage"].result["storage"]))
    if "loader" in found:
        seen = replace(seen, rates=replace(seen.rates, loader=found["loader"].result["images_per_second"]))
    if any(stage.cpu_s is None for stage in seen.stages.values()):
        missing.append("running, run queue and blocking of the workers: this kernel has no /proc/thread-self/schedstat")
    return replace(seen, missing=tuple(missing))
