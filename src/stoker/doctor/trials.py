"""The trials behind `stoker doctor CONFIG`: storage, loader alone, ceiling, both together; each in its own process."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any

from stoker.child import ChildDied, ChildTooSlow, Parent, call
from stoker.clock.observed import AcceleratorFacts, Observed, StorageFacts
from stoker.clock.reading import observed_from
from stoker.clock.values import known_facts
from stoker.config import config_values
from stoker.errors import UserError
from stoker.machine.host import HostConfig, read_machine
from stoker.tasks.image_data import choose_decoding, open_samples

DEFAULT_SECONDS = 60.0
# Shares of the time; starting processes and building models come on top.
SHARES = {"storage": 0.12, "loader": 0.18, "ceiling": 0.18, "together": 0.3}
NAMES = {"storage": "storage", "loader": "loader alone", "ceiling": "ceiling", "together": "loader and model together"}
# One device is enough to see what its loader does; compiling would take longer than everything else.
ALONE = {"devices": 1, "num_nodes": 1, "sync_batchnorm": False, "compile_model": False}
# Errors that concern one trial only. Any other error is about the config or the data, and ends the doctor.
TRIAL_FAILURES = frozenset({"out-of-device-memory", "worker-died", "trial-died", "trial-too-long", "loss-is-no-number"})
# A step of a large model on a CPU takes a minute, a start from a slow disk another.
LEAST_PATIENCE_S = 300.0
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
    began_s, starting_s = time.monotonic(), 0.0
    progress("opening the data", 0.0, seconds)
    open_once(config, say)
    machine = read_machine()
    alone = config.model_copy(update=ALONE)
    job = {"config": config_values(alone), "cpus": machine.cpus, "pace_s": pace_s}
    found: dict[str, dict[str, Any]] = {}
    missing = _left_out(config, pace_s)
    before = 0.0
    lengths = trial_seconds(seconds, pace_s, only)
    for trial in lengths if within_s is None else [name for name in BY_WORTH if name in lengths]:
        took = lengths[trial]
        if within_s is not None:
            left_s = began_s + within_s - time.monotonic() - starting_s
            if starting_s > 0 and left_s < LEAST_TRIAL_S:  # the first is always tried
                missing.append(
                    f"{NAMES[trial]}: no time for it in {within_s:.0f} s; --seconds {4 * within_s:.0f} has some"
                )
                continue
            took = max(LEAST_TRIAL_S, min(took, left_s))
        process_began_s = time.monotonic()

        def tell(done_s: float, trial: str = trial, before: float = before, took: float = took) -> None:
            progress(NAMES[trial], before + min(took, done_s), seconds)

        tell(0.0)
        try:
            found[trial] = try_in_child({**job, "trial": trial, "seconds": took}, tell)
        except UserError as error:
            if error.name not in TRIAL_FAILURES:
                raise
            missing.append(f"{NAMES[trial]}: {error.seen}")
        starting_s = max(starting_s, time.monotonic() - process_began_s - took)
        before += took
    progress("done", seconds, seconds)
    return _observed(config, found, missing, pace_s)


def open_once(config: HostConfig, say: Callable[[str], None]) -> None:
    """Lists, calibrates and indexes once, here: the trials find what was remembered."""
    if config.task == "classify":
        choose_decoding(config, open_samples(config, "train", say=say).index)
    else:
        from stoker.tasks.volumes.data import open_data  # which imports torch

        open_data(config, say)


def trial_seconds(seconds: float, pace_s: float | None, only: Collection[str] = tuple(SHARES)) -> dict[str, float]:
    """Seconds for each trial; a paced consumer has no ceiling to measure."""
    wanted = {trial: SHARES[trial] for trial in only if trial != "ceiling" or pace_s is None}
    return {trial: seconds * share / sum(wanted.values()) for trial, share in wanted.items()}


def try_in_child(job: dict[str, Any], tell: Callable[[float], None]) -> dict[str, Any]:
    """The result of one trial, run in a process of its own."""
    # As `stoker train` does: torch threads that spin while they wait would take the cores from the loader.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    patience_s = max(LEAST_PATIENCE_S, 10 * job["seconds"])
    try:
        result: dict[str, Any] = call(_run_trial, job, on_message=tell, timeout_s=patience_s)
    except ChildTooSlow:
        raise UserError("trial-too-long", f"not finished after {patience_s:.0f} s") from None
    except ChildDied as died:
        raise UserError("trial-died", f"its process {died.how}; often the machine was out of memory") from None
    return result


def _run_trial(job: dict[str, Any], parent: Parent) -> dict[str, Any]:
    # Imported here: only the child needs torch and the training loop.
    from stoker.doctor.trial_process import TRIALS

    return TRIALS[job["trial"]](HostConfig.model_validate(job["config"]), job, parent.send)


def _left_out(config: HostConfig, pace_s: float | None) -> list[str]:
    found, unit = [], "images" if config.task == "classify" else "patches"
    if pace_s is not None:
        found.append(f"the model: replaced by a consumer of {config.batch_size / pace_s:,.0f} {unit}/s")
    if config.compile_model and pace_s is None:
        found.append("torch.compile: the trials ran without it, so the real ceiling is higher")
    ranks = config.devices * config.num_nodes
    if ranks > 1:
        found.append(f"{ranks} ranks: the trials ran one, which had the storage and all cores to itself")
    return found


def _observed(
    config: HostConfig, found: dict[str, dict[str, Any]], missing: list[str], pace_s: float | None
) -> Observed:
    together = found.get("together")
    if together is None:
        seen = Observed(source="trial", steps=0, samples=0, elapsed_s=0.0, wait_s=0.0)
    else:
        seen = replace(observed_from(together["lines"], "the trial"), source="trial", missing=())
    ceiling, storage = found.get("ceiling"), found.get("storage")
    per_second: float | None = config.batch_size / pace_s if pace_s else None
    if ceiling is not None:
        per_second = ceiling["images_per_second"]
        if ceiling["accelerator"] is not None:
            seen = replace(seen, accelerator=known_facts(AcceleratorFacts, ceiling["accelerator"]))
    if storage is not None:
        missing = [*missing, *storage["missing"]]
        seen = replace(seen, storage=known_facts(StorageFacts, storage["storage"]))
    if any(stage.cpu_s is None for stage in seen.stages.values()):
        missing.append("running, run queue and blocking of the workers: this kernel has no /proc/thread-self/schedstat")
    return replace(
        seen,
        ceiling_images_per_second=per_second,
        pace_images_per_second=config.batch_size / pace_s if pace_s else None,
        loader_images_per_second=found["loader"]["images_per_second"] if "loader" in found else None,
        missing=tuple(missing),
    )
