"""From a config, a run folder or a script to a diagnosis."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from stoker.checks import judge
from stoker.commands.diagnosing import diagnosis_of, diagnosis_of_watched
from stoker.config import Config
from stoker.errors import UsageError
from stoker.facts.diagnosis import Confirmation, Diagnosis
from stoker.facts.observed import Observed
from stoker.output.predictions_file import keep_confirmation, keep_predictions, settle_predictions
from stoker.output.text import say, say_notes
from stoker.tuning.what_if import WORTH_SAYING

CONFIG_ENDINGS = (".yaml", ".yml")


def diagnose(
    target: str | None,
    overrides: Sequence[str],
    script: list[str] | None,
    steps: int | None,
    seconds: float | None,
    *,
    pace: str | None,
    confirm: bool,
    json: bool,
) -> tuple[Diagnosis, int]:
    """The diagnosis, and the exit code of a script."""
    if script is not None:
        return _of_script(script, steps, seconds, apart=json)
    assert target is not None
    if target.endswith(CONFIG_ENDINGS) or Path(target).is_file():
        return _of_config(Path(target), overrides, seconds, pace, confirm=confirm), 0
    for_config = {
        "--confirm": confirm, "--pace": pace is not None, "--seconds": seconds is not None, "KEY=VALUE": bool(overrides)
    }  # fmt: skip
    for option, given in for_config.items():
        if given:
            raise UsageError("usage", f"{option} is for a config; {target} is a run", hint="stoker doctor CONFIG")
    return _of_folder(Path(target)), 0


def _of_script(script: list[str], steps: int | None, seconds: float | None, *, apart: bool) -> tuple[Diagnosis, int]:
    from stoker.attach.running import run_attached

    with _stdout_to_stderr() if apart else _as_it_is():
        ended = run_attached(script, steps=steps, seconds=seconds)
    if ended.observed is None:
        nothing = Observed(source="script", steps=0, samples=0, elapsed_s=0.0, wait_s=0.0, missing=ended.notes)
        return judge(nothing), ended.exit_code
    say_notes(ended.notes)
    return diagnosis_of(_with_local_disk(ended.observed)), ended.exit_code


def _with_local_disk(observed: Observed) -> Observed:
    """How fast this host's own disk would be, where the samples came from elsewhere."""
    from stoker.probe.local_disk import measure_local_disk

    storage = observed.storage
    if storage is None or not storage.remote or not storage.bytes_per_sample:
        return observed
    local = measure_local_disk(None, storage.bytes_per_sample)
    return replace(observed, storage=replace(storage, local_bytes_per_second=local))


def _of_folder(path: Path) -> Diagnosis:
    from stoker.attach.records import has_records
    from stoker.output.clock_reading import read_observed
    from stoker.run_folder import find_run

    if has_records(path):
        return diagnosis_of_watched(path)
    folder = find_run(path)
    observed = read_observed(folder)
    settled = settle_predictions(folder, observed)
    diagnosis = diagnosis_of(observed)
    keep_predictions(folder, diagnosis)
    return replace(diagnosis, confirmation=settled)


def _of_config(
    path: Path, overrides: Sequence[str], seconds: float | None, pace: str | None, *, confirm: bool
) -> Diagnosis:
    from stoker.config.loading import load_for_command
    from stoker.config.machine import fit_to_machine
    from stoker.probe.host import read_machine
    from stoker.run_folder import run_folder_for
    from stoker.tasks.doctor_trials import DEFAULT_SECONDS, trial_seconds

    config = load_for_command(path, overrides, None).config
    folder = run_folder_for(config, path).root
    fitted, notes = fit_to_machine(config, read_machine())
    say_notes(notes)
    pace_s = None
    if pace is not None:
        from stoker.commands.pace import read_pace

        taken = read_pace(pace, path, overrides)
        pace_s = fitted.batch_size / taken.images_per_second
        say(f"note: a consumer of {taken.images_per_second:,.0f} images/s stands in for the model ({taken.how})")
    length = seconds or DEFAULT_SECONDS
    observed = _tried(fitted, length, pace_s)
    settled = settle_predictions(folder, observed)
    diagnosis = diagnosis_of(observed)
    keep_predictions(folder, diagnosis)
    if not confirm:
        return replace(diagnosis, confirmation=settled)
    best = next((p for p in diagnosis.predictions if p.settings and p.speedup.expected >= WORTH_SAYING), None)
    before = observed.images_per_second
    if best is None or not before:
        say("note: no change of a setting is predicted to help; there is nothing to confirm")
        return diagnosis
    say(f"trying {best.label}")
    changed = fitted.model_copy(update=dict(best.settings))
    # As long as before, and only what is compared.
    as_long = trial_seconds(length, pace_s)["together"]
    measured = _tried(changed, as_long, pace_s, only=("together",)).images_per_second
    if not measured:
        return diagnosis
    confirmation = Confirmation(best, measured, measured / before)
    keep_confirmation(folder, confirmation)
    return replace(diagnosis, confirmation=confirmation)


def _tried(config: Config, seconds: float, pace_s: float | None, only: Sequence[str] | None = None) -> Observed:
    from stoker.output.progress import progress_bar
    from stoker.tasks.doctor_trials import SHARES, run_trials

    trials = tuple(SHARES) if only is None else only
    shown = ""

    def tell(what: str, done_s: float, total_s: float) -> None:
        nonlocal shown
        if what != shown:
            say(f"{what} ({done_s:.0f} of {total_s:.0f} s)")
        shown = what

    if not sys.stderr.isatty():
        return run_trials(config, seconds, pace_s=pace_s, only=trials, progress=tell, say=say)
    with progress_bar("trials", round(seconds)) as advance:
        return run_trials(
            config, seconds, pace_s=pace_s, only=trials, say=say,
            progress=lambda _what, done, total: advance(round(done), round(total)),
        )  # fmt: skip


@contextmanager
def _stdout_to_stderr() -> Iterator[None]:
    """What a child prints on stdout goes to stderr meanwhile."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)


@contextmanager
def _as_it_is() -> Iterator[None]:
    yield
