"""The trials behind `stoker doctor CONFIG`: storage, loader alone, ceiling, both together; each in its own process."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any

from stoker.clock.observed import AcceleratorFacts, Observed, StorageFacts
from stoker.clock.reading import known_facts, observed_from
from stoker.config import Config, config_values
from stoker.errors import EXIT_USAGE, ConfigError, UserError
from stoker.machine.host import read_machine
from stoker.tasks.image_data import choose_decoding, open_samples

DEFAULT_SECONDS = 60.0
# Of the time; the rest goes into starting processes and building models, which takes what it takes.
SHARES = {"storage": 0.12, "loader": 0.18, "ceiling": 0.18, "together": 0.3}
NAMES = {"storage": "storage", "loader": "loader alone", "ceiling": "ceiling", "together": "loader and model together"}
# One device shows what its loader does; compiling would take longer than everything else.
ALONE = {"devices": 1, "num_nodes": 1, "sync_batchnorm": False, "compile_model": False}
# What says something about one trial only; any other error is about the config or the data, and ends the doctor.
TRIAL_FAILURES = frozenset({"out-of-device-memory", "worker-died", "trial-died", "trial-too-long", "loss-is-no-number"})
GRACE_S = 5.0
# A step of a large model on a CPU takes a minute, a start from a slow disk another.
LEAST_PATIENCE_S = 300.0

Progress = Callable[[str, float, float], None]
"""What is tried now, and the seconds of all trials that are done, of how many."""


def run_trials(
    config: Config,
    seconds: float = DEFAULT_SECONDS,
    *,
    pace_s: float | None = None,
    only: Collection[str] = tuple(SHARES),
    progress: Progress = lambda _what, _done, _total: None,
    say: Callable[[str], None] = lambda _text: None,
) -> Observed:
    """Everything that short real runs of a config tell; the config is one that is fitted to the machine.

    With `pace_s`, a consumer that takes a batch every so many seconds stands in for the model. `only` names the trials
    that are run, which share the time. A trial that fails is named in `missing`; an error about the config or the data
    is raised, before anything is tried where possible.
    """
    if config.task != "classify":
        raise UserError("task-not-built", f"task: {config.task} cannot be tried yet", hint="task=classify")
    progress("opening the data", 0.0, seconds)
    # Listed and calibrated once, here: the trials find what was kept.
    choose_decoding(config, open_samples(config, "train", say=say).index)
    machine = read_machine()
    workers = config.num_workers if isinstance(config.num_workers, int) else machine.cpus
    alone = config.model_copy(update=ALONE)
    job = {"config": config_values(alone), "workers": workers, "cpus": machine.cpus, "pace_s": pace_s}
    found: dict[str, dict[str, Any]] = {}
    missing = _left_out(config, pace_s)
    before = 0.0
    for trial, took in trial_seconds(seconds, pace_s, only).items():

        def tell(done_s: float, trial: str = trial, before: float = before, took: float = took) -> None:
            progress(NAMES[trial], before + min(took, done_s), seconds)

        tell(0.0)
        try:
            found[trial] = in_another_process({**job, "trial": trial, "seconds": took}, tell)
        except UserError as error:
            if error.name not in TRIAL_FAILURES:
                raise
            missing.append(f"{NAMES[trial]}: {error.seen}")
        before += took
    progress("done", seconds, seconds)
    return _observed(config, found, missing, pace_s)


def trial_seconds(seconds: float, pace_s: float | None, only: Collection[str] = tuple(SHARES)) -> dict[str, float]:
    """What each trial gets of the time; a consumer that keeps a pace has no ceiling to measure."""
    wanted = {trial: SHARES[trial] for trial in only if trial != "ceiling" or pace_s is None}
    return {trial: seconds * share / sum(wanted.values()) for trial, share in wanted.items()}


def in_another_process(job: dict[str, Any], tell: Callable[[float], None]) -> dict[str, Any]:
    """The result of one trial; its process is gone when this returns or raises, whatever happened."""
    reader, writer = os.pipe()
    # As `stoker train` does it: threads of torch that spin while they wait would take the cores from the loader.
    environment = {"OMP_WAIT_POLICY": "PASSIVE", **os.environ}
    process = subprocess.Popen(
        [sys.executable, "-m", "stoker.doctor.trial_process", str(writer)], stdin=subprocess.PIPE, env=environment,
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, pass_fds=[writer], start_new_session=True, text=True,
    )  # fmt: skip
    os.close(writer)  # so that the end of the process is the end of the pipe
    try:
        assert process.stdin is not None
        # Stays open: its end tells the trial that nobody is waiting any more.
        process.stdin.write(json.dumps(job) + "\n")
        process.stdin.flush()
        for message in _messages(reader, max(LEAST_PATIENCE_S, 10 * job["seconds"])):
            if message["kind"] == "progress":
                tell(message["done"])
            elif message["kind"] == "result":
                result: dict[str, Any] = message["result"]
                return result
            elif message["kind"] == "error":
                raise _user_error(message)
            else:
                raise RuntimeError(message["text"])
        raise _died(process.wait(GRACE_S))
    except BrokenPipeError:
        raise _died(process.wait(GRACE_S)) from None
    finally:
        _end(process)
        os.close(reader)


def _messages(reader: int, patience_s: float) -> Iterator[dict[str, Any]]:
    deadline, rest = time.monotonic() + patience_s, b""
    while True:
        ready, _, _ = select.select([reader], [], [], max(0.0, deadline - time.monotonic()))
        if not ready:
            raise UserError("trial-too-long", f"it had not ended after {patience_s:.0f} s")
        data = os.read(reader, 1 << 16)
        if not data:
            return
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            yield json.loads(line)


def _end(process: subprocess.Popen[str]) -> None:
    """In order where it listens, at once with all its workers where it does not."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # a session of its own: nobody else is in it
            process.wait()
    if process.stdin is not None:
        with suppress(BrokenPipeError):
            process.stdin.close()


def _user_error(message: dict[str, Any]) -> UserError:
    if message["exit"] == EXIT_USAGE:
        return ConfigError(message["seen"], name=message["name"], why=message["why"], hint=message["hint"])
    return UserError(message["name"], message["seen"], why=message["why"], hint=message["hint"])


def _died(code: int) -> UserError:
    how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with {code}"
    return UserError("trial-died", f"its process {how}; often the system was out of memory")


def _left_out(config: Config, pace_s: float | None) -> list[str]:
    found = []
    if pace_s is not None:
        found.append(f"the model: a consumer of {config.batch_size / pace_s:,.0f} images/s stood in for it")
    if config.compile_model and pace_s is None:
        found.append("torch.compile: the trials ran without it, so the ceiling with it is higher")
    ranks = (config.devices if isinstance(config.devices, int) else 1) * config.num_nodes
    if ranks > 1:
        found.append(f"{ranks} ranks: one was tried; what they share, storage and cores, is left to it alone")
    return found


def _observed(config: Config, found: dict[str, dict[str, Any]], missing: list[str], pace_s: float | None) -> Observed:
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
