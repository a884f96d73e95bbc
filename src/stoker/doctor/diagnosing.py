"""From a config, a run folder or a script to a diagnosis."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from stoker.clock.observed import Observed
from stoker.console import say, say_notes
from stoker.doctor.checks.case import Case
from stoker.doctor.checks.verdict import judge
from stoker.doctor.predictions_file import keep_confirmation, keep_predictions, settle_predictions
from stoker.doctor.records import Confirmation, Diagnosis
from stoker.doctor.what_if import WORTH_SAYING, what_if
from stoker.errors import UsageError
from stoker.machine.datasheets import load_datasheet
from stoker.machine.host import HostConfig
from stoker.plan.planning import Wanted, plan_config

# From an observation to a diagnosis: what the checks say, with what each change would bring.


def diagnosis_of(observed: Observed) -> Diagnosis:
    """Verdict, findings and predictions."""
    return judge(observed, what_if(observed, takes_turns=Case(observed).takes_turns))


def diagnosis_of_watched(folder: Path) -> Diagnosis:
    """The same of the record that `stoker.watch()` left in a folder."""
    from stoker.doctor.attach.reading import read_attached

    return diagnosis_of(read_attached(folder))


# `--pace`: an accelerator that is not here, as the images that it would take in a second.


@dataclass(frozen=True)
class Pace:
    """How fast the consumer of the trials is."""

    images_per_second: float
    how: str
    """'as given', or whose roofline it is."""


def read_pace(text: str, path: Path, overrides: Sequence[str]) -> Pace:
    """A number of images a second, or the card's name for which `stoker plan` computes one.

    Raises UsageError: `pace-invalid`, or what the datasheets say of a name that they do not know.
    """
    number = _number(text)
    if number is not None:
        if not (math.isfinite(number) and number > 0):
            raise UsageError("pace-invalid", f"--pace {text}: images a second are above zero", hint="--pace 800")
        return Pace(number, "as given")
    load_datasheet(text)  # a name that nobody knows is said before anything is traced
    rates = plan_config(path, overrides, Wanted(gpu=text, gpus=1, nodes=1)).plan.time.rates
    if "accelerator" not in rates:
        raise UsageError(
            "pace-unknown",
            f"--pace {text}: the plan could not compute what it takes in a second",
            hint="--pace 800, where 800 images/s are what was measured on it",
        )
    rate = rates["accelerator"]
    return Pace(rate.images_per_second, rate.source)


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


# From a config, a run folder or a script to a diagnosis.

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
    from stoker.doctor.attach.running import run_attached

    with _stdout_to_stderr() if apart else _as_it_is():
        ended = run_attached(script, steps=steps, seconds=seconds)
    if ended.observed is None:
        nothing = Observed(source="script", steps=0, samples=0, elapsed_s=0.0, wait_s=0.0, missing=ended.notes)
        return judge(nothing), ended.exit_code
    say_notes(ended.notes)
    return diagnosis_of(_with_local_disk(ended.observed)), ended.exit_code


def _with_local_disk(observed: Observed) -> Observed:
    """How fast this host's own disk would be, where the samples came from elsewhere."""
    from stoker.machine.storage import measure_local_disk

    storage = observed.storage
    if storage is None or not storage.remote or not storage.bytes_per_sample:
        return observed
    local = measure_local_disk(None, storage.bytes_per_sample)
    return replace(observed, storage=replace(storage, local_bytes_per_second=local))


def _of_folder(path: Path) -> Diagnosis:
    from stoker.clock.reading import read_observed
    from stoker.doctor.attach.records import has_records
    from stoker.run.folder import find_run

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
    from stoker.config.reading import load_for_command
    from stoker.doctor.trials import DEFAULT_SECONDS, trial_seconds
    from stoker.machine.host import fit_to_machine, read_machine
    from stoker.run.folder import run_folder_for

    config = load_for_command(path, overrides, None).config
    folder = run_folder_for(config, path).root
    fitted, notes = fit_to_machine(config, read_machine())
    say_notes(notes)
    pace_s = None
    if pace is not None:
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


def _tried(config: HostConfig, seconds: float, pace_s: float | None, only: Sequence[str] | None = None) -> Observed:
    from stoker.console import progress_bar
    from stoker.doctor.trials import SHARES, run_trials

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
