"""From a config, a run folder or a script to a diagnosis.

What the doctor is asked about decides what is imported: a script needs neither torch nor our training.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from stoker.core.console import say, say_notes
from stoker.core.errors import UsageError
from stoker.doctor.checks.facts import Facts
from stoker.doctor.checks.verdict import judge
from stoker.doctor.diagnosis import Confirmation, Diagnosis, Prediction
from stoker.doctor.what_if import WORTH_SAYING, what_if
from stoker.profile.observed import LoopTimes, Observed

if TYPE_CHECKING:
    from stoker.doctor.pacing import ScriptPace
    from stoker.doctor.script.recording import TracedStep
    from stoker.profile.host import HostConfig

CONFIG_ENDINGS = (".yaml", ".yml")


def diagnose(
    target: str, overrides: Sequence[str], seconds: float | None, pace: str | None, *, confirm: bool
) -> Diagnosis:
    """Tries a config; reads what a run or a watched script recorded in its folder."""
    if target.endswith(CONFIG_ENDINGS) or Path(target).is_file():
        return _of_config(Path(target), overrides, seconds, pace, confirm=confirm)
    for_config = {
        "--confirm": confirm, "--pace": pace is not None, "--seconds": seconds is not None, "KEY=VALUE": bool(overrides)
    }  # fmt: skip
    for option, given in for_config.items():
        if given:
            raise UsageError("usage", f"{option} needs a config; {target} is a run", hint="stoker doctor CONFIG")
    return _of_folder(Path(target))


def diagnosis_of(observed: Observed) -> Diagnosis:
    """Verdict, findings and predicted speed-ups."""
    return judge(observed, what_if(observed, takes_turns=Facts(observed).takes_turns))


def diagnosis_of_watched(folder: Path) -> Diagnosis:
    from stoker.doctor.script.recording import read_attached

    return diagnosis_of(read_attached(folder))


def diagnose_script(
    script: list[str], steps: int | None, seconds: float | None, pace: str | None, *, stdout_is_ours: bool
) -> tuple[Diagnosis, int]:
    """Runs a script; with its exit code."""
    from stoker.doctor.pacing import read_script_pace
    from stoker.doctor.script.run_script import run_attached

    consumer = None if pace is None else read_script_pace(pace)
    with _stdout_to_stderr() if stdout_is_ours else contextlib.nullcontext():
        ended = run_attached(
            script, steps=steps, seconds=seconds, trace=consumer is not None and consumer.card is not None
        )
    if ended.observed is None:
        nothing = Observed("script", 0, 0, LoopTimes(), missing=ended.notes)
        return judge(nothing), ended.exit_code
    say_notes(ended.notes)
    observed = _with_local_disk(ended.observed)
    if consumer is not None:
        observed = _with_consumer(observed, consumer, ended.traced)
    return diagnosis_of(observed), ended.exit_code


def _with_consumer(observed: Observed, consumer: ScriptPace, traced: TracedStep | str | None) -> Observed:
    """The observation with the consumer in place of the model, where enough is known for it."""
    from stoker.doctor.pacing import paced

    step_s = consumer.seconds(observed, traced)
    if isinstance(step_s, str):
        say(f"note: no step of the script could be traced for --pace ({step_s}); this is the script as it ran")
        say("hint: --pace 400ms, if a step takes that long there")
        return observed
    simulated = paced(observed, step_s, consumer.words(step_s, traced))
    if simulated is None:
        say("note: too few batches were measured for --pace; this is the script as it ran")
    return simulated or observed


def _with_local_disk(observed: Observed) -> Observed:
    """Adds this host's own disk, its speed and its free space, where the samples came from elsewhere."""
    from stoker.io.storage_speed import measure_local_disk

    observed = _with_room(observed)
    storage = observed.storage
    if storage is None or not storage.remote or not storage.bytes_per_sample:
        return observed
    folder = None if storage.local_folder is None else Path(storage.local_folder)
    local = measure_local_disk(folder, storage.bytes_per_sample)
    return replace(observed, storage=replace(storage, local_bytes_per_second=local))


def _with_room(observed: Observed) -> Observed:
    """Adds where a copy could go, where the samples came from elsewhere."""
    from stoker.profile.mounts import find_local_disk

    storage = observed.storage
    if storage is None or not storage.remote or (disk := find_local_disk()) is None:
        return observed
    return replace(observed, storage=replace(storage, local_folder=disk.folder, local_free_bytes=disk.free_bytes))


@contextlib.contextmanager
def _stdout_to_stderr() -> Iterator[None]:
    """Sends what a child prints on stdout to stderr."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)


def _of_folder(path: Path) -> Diagnosis:
    from stoker.doctor.predictions import keep_predictions, settle_predictions
    from stoker.doctor.script.recording import has_records
    from stoker.profile.clock_reading import read_observed
    from stoker.run.folder import RunFolder, find_run

    if has_records(path):
        return diagnosis_of_watched(path)
    folder = find_run(path)
    observed = _with_room(replace(read_observed(folder), config=shlex.quote(str(RunFolder(folder).config_file))))
    settled = settle_predictions(folder, observed)
    diagnosis = diagnosis_of(observed)
    keep_predictions(folder, diagnosis)
    return replace(diagnosis, confirmation=settled)


def _of_config(
    path: Path, overrides: Sequence[str], seconds: float | None, pace: str | None, *, confirm: bool
) -> Diagnosis:
    from stoker.config.reading import load_for_command
    from stoker.doctor.config_trials import DEFAULT_SECONDS, trial_seconds
    from stoker.doctor.pacing import seconds_of_a_step
    from stoker.doctor.predictions import keep_confirmation, keep_predictions, settle_predictions
    from stoker.profile.host import fit_to_machine, read_machine
    from stoker.run.folder import run_folder_for

    config = load_for_command(path, overrides).config
    folder = run_folder_for(config, path).root
    fitted, notes = fit_to_machine(config, read_machine())
    say_notes(notes)
    pace_s = None if pace is None else seconds_of_a_step(pace, path, overrides, fitted.batch_size)
    length = seconds or DEFAULT_SECONDS
    tried = _tried(fitted, length, pace_s, within_s=seconds)
    observed = replace(tried, config=shlex.join([str(path), *overrides]))
    settled = settle_predictions(folder, observed)
    diagnosis = diagnosis_of(observed)
    keep_predictions(folder, diagnosis)
    if not confirm:
        return replace(diagnosis, confirmation=settled)
    best, why_not = to_confirm(diagnosis)
    before = observed.images_per_second
    if best is None or not before:
        say(f"note: --confirm tried nothing: {why_not}")
        return diagnosis
    helps = best.speedup.expected >= WORTH_SAYING
    say(f"trying {best.label}" + ("" if helps else ", although no speed-up is predicted"))
    changed = fitted.model_copy(update=dict(best.settings))
    # As long as before, and only the trial that is compared.
    as_long = trial_seconds(length, pace_s)["together"]
    measured = _tried(changed, as_long, pace_s, only=("together",)).images_per_second
    if not measured:
        return diagnosis
    confirmation = Confirmation(best, measured, measured / before)
    keep_confirmation(folder, confirmation)
    return replace(diagnosis, confirmation=confirmation)


def to_confirm(diagnosis: Diagnosis) -> tuple[Prediction | None, str]:
    """The best of the predictions that are a setting of the config, or why there is none."""
    best = next((prediction for prediction in diagnosis.predictions if prediction.settings), None)
    if best is not None:
        return best, ""
    if not diagnosis.observed.images_per_second:
        return None, "no step was measured"
    if not diagnosis.predictions:
        return None, "too few batches were measured to predict anything; try a higher --seconds"
    others = ", ".join(prediction.label for prediction in diagnosis.predictions)
    return None, f"none of the predictions is a setting that a trial can change ({others})"


def _tried(
    config: HostConfig,
    seconds: float,
    pace_s: float | None,
    only: Sequence[str] | None = None,
    *,
    within_s: float | None = None,
) -> Observed:
    from stoker.core.console import progress_bar
    from stoker.doctor.config_trials import SHARES, run_trials

    run = partial(run_trials, config, seconds, pace_s=pace_s, within_s=within_s, only=only or tuple(SHARES), say=say)
    if sys.stderr.isatty():
        with progress_bar("trials", round(seconds)) as advance:
            return run(progress=lambda _what, done, total: advance(round(done), round(total)))
    shown = ""

    def tell(what: str, done_s: float, total_s: float) -> None:
        nonlocal shown
        if what != shown:
            say(f"{what} ({done_s:.0f} of {total_s:.0f} s)")
        shown = what

    return run(progress=tell)
