"""A user's command with places for the values that are tuned, `python train.py -j {num_workers} -b {batch_size=64}`,
and trials of it: each runs the command with the doctor's timers attached, under a memory limit and a time limit."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import tempfile
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from stoker.core.errors import UsageError, UserError, nearest
from stoker.doctor.script.run_script import kill_all, refuse_what_cannot_work, run_attached
from stoker.profile.observed import Observed
from stoker.trial.fork_server import ForkServer, patience_after
from stoker.tune.journal import from_record
from stoker.tune.records import Measured, Result, Settings, Value

_NAME = r"[A-Za-z_][A-Za-z0-9_-]*"
_PLACE = re.compile(rf"\{{\{{({_NAME}(?:=[^{{}}]*)?)\}}\}}|\{{({_NAME})(?:=([^{{}}]*))?\}}")
"""A placeholder, or `{{name}}`, which is passed on as `{name}`. JSON does not match: its names are in quotes."""
_CUT_OFF = re.compile(rf"\{{({_NAME})=[^{{}}]*$")
_WORKER_FLAG = re.compile(r"-j|--(?:num[-_]|data[-_]|n[-_])?workers")

LEAST = {"num_workers": 0, "prefetch_factor": 1, "batch_size": 1}
"""The names whose values we choose ourselves, and their smallest value."""
DATALOADER_DEFAULTS = {"num_workers": 0, "prefetch_factor": 2}
CHANGES_TRAINING = frozenset({"batch_size"})
MOST_WORDS = "a name that stoker does not know needs its values, separated by |, the first being the one to start from"


@dataclass(frozen=True)
class Placeholder:
    name: str
    start: Value
    values: tuple[Value, ...] | None = None
    """What the user allows; None for a name whose values we choose."""
    assumed: bool = False
    """Whether the start is DataLoader's default, because the command names none."""


@dataclass(frozen=True)
class Template:
    words: tuple[str, ...]
    places: dict[str, Placeholder]

    @property
    def start(self) -> Settings:
        return {name: place.start for name, place in self.places.items()}

    def filled(self, settings: Settings) -> list[str]:
        """The command with these values; a word that is nothing but an empty value is left out."""

        def value(match: re.Match[str]) -> str:
            return f"{{{match[1]}}}" if match[1] is not None else str(settings[_normal(match[2])])

        found = []
        for word in self.words:
            text = _PLACE.sub(value, word)
            if text or not _PLACE.fullmatch(word):
                found.append(text)
        return found

    def line(self, settings: Settings) -> str:
        """The same as one would type it."""
        return shlex.join(self.filled(settings))

    def notes(self) -> list[str]:
        """What was assumed about the places, in words."""
        return [
            f"{{{place.name}}} has no start value; starting from {place.start}"
            + (", DataLoader's default" if place.start == DATALOADER_DEFAULTS.get(place.name) else "")
            + f". If the script usually runs with another, write {{{place.name}=4}}"
            for place in self.places.values()
            if place.assumed
        ]


def _normal(name: str) -> str:
    return name.replace("-", "_")


def read_template(words: Sequence[str]) -> Template:
    """The command with its places; raises UsageError if it has none, or one whose values are not known."""
    if not words:
        raise UsageError(
            "no-command", "no command given after `--`", hint="stoker tune -- python train.py -j {num_workers}"
        )
    given: dict[str, list[str]] = {}
    for word in words:
        for match in _PLACE.finditer(word):
            if match[1] is None:
                texts = given.setdefault(_normal(match[2]), [])
                if match[3] is not None:
                    texts.append(match[3])
        if _CUT_OFF.search(word):
            raise UsageError(
                "placeholder-not-closed", f"{word} has no closing brace",
                why="without quotes the shell takes | for a pipe",
                hint="quote it: stoker tune -- python train.py --decoder '{decoder=pil|cv2}'",
            )  # fmt: skip
    if not given:
        raise UsageError(
            "no-placeholder", f"nothing to tune in: {shlex.join(words)}",
            why="write each value that may be changed in braces, with the value to start from",
            hint=f"stoker tune -- {_example(words)}",
        )  # fmt: skip
    return Template(tuple(words), {name: _placeholder(name, texts, given) for name, texts in given.items()})


def _example(words: Sequence[str]) -> str:
    """The user's own command with its number of workers as a place, or with one added."""
    shown = [shlex.quote(word) for word in words]
    for at, word in enumerate(words):
        flag, equals, value = word.partition("=")
        if not _WORKER_FLAG.fullmatch(flag):
            continue
        if equals and value.isdigit():
            return " ".join([*shown[:at], f"{flag}={{num_workers={value}}}", *shown[at + 1 :]])
        if at + 1 < len(words) and words[at + 1].isdigit():
            return " ".join([*shown[: at + 1], f"{{num_workers={words[at + 1]}}}", *shown[at + 2 :]])
    return " ".join([*shown, "-j {num_workers=4}"])


def _placeholder(name: str, texts: list[str], given: dict[str, list[str]]) -> Placeholder:
    different = list(dict.fromkeys(texts))
    if len(different) > 1:
        raise UsageError(
            "placeholder-twice", f"{{{name}}} is given as {' and as '.join(different)}",
            hint=f"write its values once, and {{{name}}} in the other places",
        )  # fmt: skip
    text = different[0] if different else None
    if name not in LEAST:
        return _of_other_name(name, text)
    if text is not None:
        values = tuple(_number(name, part) for part in text.split("|"))
        return Placeholder(name, values[0], _distinct(name, values) if len(values) > 1 else None)
    if name not in DATALOADER_DEFAULTS:
        raise UsageError(
            "placeholder-without-start", f"{{{name}}} has no value to start from",
            why="the search compares with how the script is run now", hint=f"{{{name}=64}}",
        )  # fmt: skip
    # DataLoader refuses prefetch_factor without workers.
    start = max(DATALOADER_DEFAULTS[name], 1 if name == "num_workers" and "prefetch_factor" in given else 0)
    return Placeholder(name, start, assumed=True)


def _of_other_name(name: str, text: str | None) -> Placeholder:
    values = () if text is None else tuple(text.split("|"))
    if len(values) < 2:
        near = nearest(name, LEAST)
        raise UsageError(
            "placeholder-without-values", f"{{{name}}} has no values to choose from",
            why=f"{MOST_WORDS}; known are {', '.join(LEAST)}",
            hint=f"{{{near}}}" if near else f"'{{{name}={text or 'pil'}|cv2}}'    # with quotes",
        )  # fmt: skip
    return Placeholder(name, values[0], _distinct(name, values))


def _distinct(name: str, values: tuple[Value, ...]) -> tuple[Value, ...]:
    if len(set(values)) < len(values):
        raise UsageError("placeholder-value-twice", f"{{{name}={'|'.join(map(str, values))}}} names a value twice")
    return values


def _number(name: str, text: str) -> int:
    if not text.isdecimal() or int(text) < LEAST[name]:
        raise UsageError(
            "placeholder-not-a-number", f"{{{name}={text}}}: expected whole numbers from {LEAST[name]} on",
            hint=f"{{{name}={max(LEAST[name], 4)}}}",
        )  # fmt: skip
    return int(text)


TRIAL_VARIABLE = "STOKER_TUNE_TRIAL"
"""Set in the environment of the script and all its descendants: it identifies them, whatever their process group."""
OUTPUT = "output"
"""File in the trial's folder that gets what the script prints."""
MOST_TAIL_BYTES = 4000
SHOWN_LINES = 12
PARTS = 5
"""Windows of a trial."""
FEWEST_STEPS = 8
"""With fewer steps a rate says little."""
ENOUGH_STEPS = 1.5 * FEWEST_STEPS
"""The first steps of an epoch do not count."""
_NO_MEMORY = re.compile(
    r"out of memory|OutOfMemoryError|MemoryError|(can't|cannot) allocate memory|CUDNN_STATUS_ALLOC_FAILED",
    re.IGNORECASE,
)
_KILLED = re.compile(r"killed by signal|exited unexpectedly")

Report = Callable[[float], None]


class ScriptTrier:
    def __init__(
        self,
        template: Template,
        *,
        memory_limit_bytes: int | None = None,
        patience_s: float | None = None,
        report: Report = lambda _seconds: None,
    ) -> None:
        refuse_what_cannot_work(template.filled(template.start))
        self._report = report
        self._template = template
        self._limit_bytes = memory_limit_bytes
        self._patience_s = patience_s
        self._first_took_s: float | None = None
        self._least_s = 0.0

    def run(self, settings: Settings, seconds: float) -> Measured:
        """Never raises because of the settings. Where steps are long, a trial takes longer than asked for."""
        seconds = max(seconds, self._least_s)
        measured = self._in_folder(settings, seconds)
        if self._least_s > seconds:
            measured = self._in_folder(settings, self._least_s)  # it had too few steps to measure a speed
        if self._first_took_s is None and measured.result == "measured":
            self._first_took_s = measured.took_s
        return measured

    def _in_folder(self, settings: Settings, seconds: float) -> Measured:
        folder = Path(tempfile.mkdtemp(prefix="stoker-tune-"))
        try:
            return self._run(settings, seconds, folder)
        finally:
            kill_all(f"{TRIAL_VARIABLE}={folder}")  # also processes that left the process group
            shutil.rmtree(folder, ignore_errors=True)

    def _run(self, settings: Settings, seconds: float, folder: Path) -> Measured:
        job = {"command": self._template.filled(settings), "seconds": seconds, "folder": str(folder)}
        timeout_s = self._patience_s or patience_after(self._first_took_s, seconds)
        with closing(ForkServer(__name__)) as server:
            ended = server.call(
                f"{__name__}:run_script", job, timeout_s=timeout_s, memory_bytes=self._limit_bytes,
                on_message=self._report,
            )  # fmt: skip
        result: Result = "crashed" if ended.how == "refused" else ended.how  # an error about the script, not a setting
        detail, observed = ended.detail, None
        windows: tuple[float, ...] = ()
        if result == "measured":
            measured = from_record(Measured, {"result": "measured", "observed": ended.result["observed"]})
            observed = None if measured is None else measured.observed
            windows = () if observed is None else windows_of(observed)
            result, detail = _ending(ended.result, windows, tail_of(folder))
            if observed is not None and observed.steps and not windows and ended.result["stopped"]:
                self._least_s = ENOUGH_STEPS * observed.times.elapsed_s / observed.steps
        if observed is None or result != "measured":
            detail = "\n".join([detail, *tail_of(folder).splitlines()[-SHOWN_LINES:]])
            return Measured(result, took_s=ended.took_s, peak_bytes=ended.peak_bytes, detail=detail)
        starts = observed.times.epoch_starts_s
        return Measured(
            "measured", windows=windows, wait_share=observed.times.wait_share, took_s=ended.took_s,
            peak_bytes=ended.peak_bytes, first_batch_s=sum(starts) / len(starts) if starts else None,
            observed=observed, epoch_samples=None if observed.loader is None else observed.loader.samples,
        )  # fmt: skip


def run_script(job: dict[str, Any], tell: Report) -> dict[str, Any]:
    """How the command ended, and what was observed; runs in the trial's process, so that the script ends even if stoker
    is killed.

    `job`: `command`, `seconds` of training, `folder` for temporary files."""
    tell(0.0)
    folder = Path(job["folder"])
    # Files of run_attached go where our parent can clean up, if this process is killed. The script's own
    # temporary files stay where they are.
    tempfile.tempdir = str(folder)
    os.environ[TRIAL_VARIABLE] = str(folder)
    descriptor = os.open(folder / OUTPUT, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    ended = run_attached(job["command"], seconds=job["seconds"])
    return {
        "exit_code": ended.exit_code,
        "stopped": ended.stopped,
        "notes": list(ended.notes),
        "observed": None if ended.observed is None else asdict(ended.observed),
    }


def tail_of(folder: Path) -> str:
    try:
        with (folder / OUTPUT).open("rb") as stream:
            stream.seek(max(0, os.fstat(stream.fileno()).st_size - MOST_TAIL_BYTES))
            return stream.read().decode(errors="replace").strip()
    except OSError:
        return ""


def windows_of(observed: Observed) -> tuple[float, ...]:
    """Samples per second in consecutive parts of the time that the steps took, without the first of them."""
    times = [wait + work for wait, work in zip(observed.times.waits_s, observed.times.steps_s, strict=False)]
    if len(times) < FEWEST_STEPS or not observed.steps or not observed.samples:
        return ()
    shape = observed.loader
    # While the loop waited for the first batch, every worker made some: those arrive faster than workers can make them.
    ahead = shape.workers * (shape.prefetch or 2) if shape is not None else 0
    steady = times[min(len(times) // 3, max(2, ahead)) :]
    ends_s = np.cumsum([0.0, *steady])
    if ends_s[-1] <= 0:
        return ()
    # Windows of equal length, or a stall would count no more than a quick step: their mean is one over time.
    edges = np.linspace(0.0, ends_s[-1], min(PARTS, len(steady) // 2) + 1)
    steps = np.diff(np.interp(edges, ends_s, np.arange(len(ends_s))))
    rates = observed.samples / observed.steps * steps / np.diff(edges)
    return tuple(float(rate) for rate in rates)


def _ending(answer: dict[str, Any], windows: tuple[float, ...], output: str) -> tuple[Result, str]:
    """How a script that ended counts, and why."""
    code = answer["exit_code"]
    if code and not answer["stopped"]:
        if _NO_MEMORY.search(output):
            return "out-of-memory", "the script ran out of memory"
        if code > 128 or _KILLED.search(output):
            return "killed", f"the script ended with exit code {code}"
        return "crashed", f"the script ended with exit code {code}"
    if not windows:
        return "crashed", next(iter(answer["notes"]), "too few batches were taken to measure a speed")
    return "measured", ""


def refuse_broken(command: str, measured: Measured) -> None:
    """Raises UserError with the output of a command that does not run as it was given."""
    what, _, output = measured.detail.partition("\n")
    raise UserError(
        "script-not-measured",
        f"{command}: {what}",
        why=f"its last lines:\n{output}" if output else "a search needs a script that trains with torch's DataLoader",
        hint=f"stoker doctor -- {command}",
    )
