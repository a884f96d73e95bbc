"""`--pace 400ms | 800 | a100-80`: a consumer that takes a given time for a step replaces the model. For a config the
trials have one; for a script it is simulated."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from stoker.core.console import say
from stoker.core.errors import UsageError
from stoker.core.units import duration_text
from stoker.doctor.script.recording import TracedStep
from stoker.doctor.simulation import ThreadWork
from stoker.doctor.what_if import model_of, rate_of
from stoker.plan.records import Rate
from stoker.profile.datasheets import Datasheet, load_datasheet
from stoker.profile.observed import BatchTime, LoopTimes, Observed, StageTime

Timed = TypeVar("Timed", BatchTime, StageTime)
_STEP = re.compile(r"\s*([0-9.]+)\s*(ms|s)\s*")
SHOWN = 64
"""Simulated steps that are kept one by one: they are all alike."""


def step_time_s(text: str) -> float | None:
    """Seconds of a step from '400ms' or '1.2 s'; None if it is something else.

    Raises UsageError: `pace-invalid`."""
    found = _STEP.fullmatch(text)
    if found is None:
        return None
    try:
        seconds = float(found[1]) * (1e-3 if found[2] == "ms" else 1.0)
    except ValueError:
        seconds = math.nan
    if not (math.isfinite(seconds) and seconds > 0):
        raise UsageError("pace-invalid", f"--pace {text}: a step must take some time", hint="--pace 400ms")
    return seconds


@dataclass(frozen=True)
class ScriptPace:
    """A consumer that replaces the model of a script."""

    step_s: float | None = None
    images_per_second: float | None = None
    card: Datasheet | None = None

    def seconds(self, observed: Observed, traced: TracedStep | str | None) -> float | str:
        """How long its step takes, or why that is unknown."""
        if self.step_s is not None:
            return self.step_s
        if self.images_per_second is not None:
            return observed.samples / max(1, observed.steps) / self.images_per_second
        assert self.card is not None
        return traced.seconds_on(self.card) if isinstance(traced, TracedStep) else str(traced)

    def words(self, step_s: float, traced: TracedStep | str | None) -> str:
        said = f"a simulated consumer of {duration_text(step_s)} a step"
        if self.card is None or not isinstance(traced, TracedStep):
            return said
        return f"{said}: the roofline of a step of the script on {self.card.title}, in {traced.precision}"


def read_script_pace(text: str) -> ScriptPace:
    """A time for a step, images per second, or a card.

    Raises UsageError: `pace-invalid`, or the datasheets' error for an unknown card."""
    seconds = step_time_s(text)
    if seconds is not None:
        return ScriptPace(step_s=seconds)
    rate = _images_per_second(text)
    return ScriptPace(card=load_datasheet(text)) if rate is None else ScriptPace(images_per_second=rate)


def seconds_of_a_step(pace: str, path: Path, overrides: Sequence[str], batch_size: int) -> float:
    """How long the consumer of a config's trials takes for a step; says so where that is computed from a rate."""
    seconds = step_time_s(pace)
    if seconds is not None:
        return seconds
    taken = read_pace(pace, path, overrides)
    say(f"note: a consumer of {taken.images_per_second:,.0f} images/s replaces the model ({taken.source})")
    return batch_size / taken.images_per_second


def _images_per_second(text: str) -> float | None:
    try:
        rate = float(text)
    except ValueError:
        return None  # a card, perhaps
    if not (math.isfinite(rate) and rate > 0):
        raise UsageError("pace-invalid", f"--pace {text}: images per second must be above zero", hint="--pace 400ms")
    return rate


def read_pace(text: str, path: Path, overrides: Sequence[str]) -> Rate:
    """A number of images per second, or the one that `stoker plan` computes for a card.

    Raises UsageError: `pace-invalid`, or the datasheets' error for an unknown card.
    """
    number = _images_per_second(text)
    if number is not None:
        return Rate(number, "as given")
    from stoker.plan.planning import WantedMachine, plan_config

    load_datasheet(text)  # an unknown name is an error before anything is traced
    rates = plan_config(path, overrides, WantedMachine(gpu=text, alone=True)).plan.time.rates
    if "accelerator" not in rates:
        raise UsageError(
            "pace-unknown",
            f"--pace {text}: the plan has no images/s for this card",
            hint="--pace 800, if 800 images/s were measured on it",
        )
    return rates["accelerator"]


def paced(observed: Observed, step_s: float, words: str = "a simulated consumer") -> Observed | None:
    """The observation with a consumer that needs `step_s` and no core for a step; None if too little was measured."""
    model = model_of(observed)
    if model is None or not observed.steps:
        return None
    # The script's own model and other programs are gone from the cores: waits for them are left out below as well.
    cores = model.setup.cores if observed.host is None else float(observed.host.cpus)
    setup = replace(model.setup, consumer_threads=1.0, cores=cores)
    rate = rate_of(replace(model, setup=setup, steps=(ThreadWork(0.0, step_s),)))
    wait_s = max(0.0, 1 / rate - step_s)
    steps = observed.steps
    return replace(
        observed,
        times=LoopTimes(
            elapsed_s=steps * (step_s + wait_s),
            wait_s=steps * wait_s,
            compute_s=steps * step_s,
            consumer_cpu_s=0.0,
            consumer_runq_s=observed.times.consumer_runq_s,
            waits_s=(wait_s,) * min(steps, SHOWN),
            steps_s=(step_s,) * min(steps, SHOWN),
        ),
        batches=tuple(map(_without_queueing, observed.batches)),
        stages={name: _without_queueing(stage) for name, stage in observed.stages.items()},
        rates=replace(observed.rates, pace=observed.samples / steps / step_s),
        host=None if observed.host is None else replace(observed.host, cpu_busy_share=None),
        missing=(*observed.missing, f"the model: replaced by {words}"),
    )


def _without_queueing(time: Timed) -> Timed:
    """Without its waits for a core: the script's own model, which took the cores, is gone."""
    if time.runq_s is None:
        return time
    return replace(time, wall_s=max(0.0, time.wall_s - time.runq_s), runq_s=0.0)
