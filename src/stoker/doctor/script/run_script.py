"""Runs a training script with timers attached, and reads what it recorded; or attaches them by one line of the script
itself, `stoker.watch()`.

The script keeps its terminal, its output, its exit code and its signals: it is a child in our own process group, so
Ctrl-C reaches it as usual.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import re
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from stoker.attach import ring
from stoker.attach.session import (
    FOLDER_VARIABLE,
    LEADING_RANK_VARIABLE,
    SECONDS_VARIABLE,
    STEPS_VARIABLE,
    TRACE_VARIABLE,
    Session,
    rank_of_environment,
    start,
)
from stoker.core.errors import UsageError, UserError
from stoker.doctor.script.process_watch import ProcessWatch, step_marks
from stoker.doctor.script.recording import (
    ABOUT_FILES,
    TracedStep,
    has_records,
    read_attached,
    read_recording,
    read_traced_step,
)
from stoker.profile.host import HostWatch
from stoker.profile.observed import Observed

PYTHON = re.compile(r"(python|pypy)[0-9.]*(\.exe)?$")
# -I: isolated, -E: ignore the environment, -S: no site module. Each keeps Python from looking at our PYTHONPATH.
REASONS = {
    "I": "isolated mode ignores PYTHONPATH, through which the timers are attached",
    "E": "-E ignores PYTHONPATH, through which the timers are attached",
    "S": "-S skips the site module, which attaches the timers",
}
TAKE_A_VALUE = "WXQ"
"""Options of Python that take a value; -c and -m end its options."""


def refuse_what_cannot_work(command: list[str]) -> None:
    """Raises, before the script runs for hours, if there is no command or its Python would ignore PYTHONPATH."""
    if not command:
        raise UsageError(
            "no-command", "no command given after `--`", hint="stoker doctor -- python train.py --your arguments"
        )
    option = isolating_option(command)
    if option is not None:
        raise UserError(
            "cannot-attach",
            f"timers cannot be attached to `{command[0]} -{option}`",
            why=REASONS[option],
            hint=f"remove -{option}, or add one line to the script:  import stoker; stoker.watch()",
        )


def isolating_option(command: list[str]) -> str | None:
    """I, E or S if the command is a Python with that option, alone or combined (-sE)."""
    if not PYTHON.fullmatch(Path(command[0]).name):
        return None
    words = iter(command[1:])
    for word in words:
        if not word.startswith("-") or word.startswith("--") or word == "-":
            return None
        for place, letter in enumerate(word[1:], 1):
            if letter in REASONS:
                return letter
            if letter in "cm":
                return None
            if letter in TAKE_A_VALUE:
                if place == len(word) - 1:
                    next(words, None)
                break
    return None


PROCESSES = Path("/proc")


def processes_with(mark: str) -> list[int]:
    """Running processes with this `NAME=value` in their environment; none where there is no /proc."""
    found = []
    with suppress(OSError):
        for entry in PROCESSES.iterdir():
            if entry.name.isdigit() and int(entry.name) != os.getpid():
                with suppress(OSError):  # a zombie has no environment any more
                    if mark.encode() in (entry / "environ").read_bytes().split(b"\0"):
                        found.append(int(entry.name))
    return found


def kill_all(mark: str) -> None:
    for pid in processes_with(mark):
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)


ON_PATH = Path(ring.__file__).parent / "on_path"
POLL_S = 0.05
HOST_LOOK_S = 1.0
# A script that handles SIGTERM may save first; a second is common, minutes are not what `--steps 50` asked for.
GRACE_S = 10.0
# With --seconds: how long the script may take until its first batch before we conclude that none will come.
LONGEST_START_S = 300.0
FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)


@dataclass(frozen=True)
class AttachResult:
    """How the script ended, and what was observed."""

    exit_code: int
    """The script's own; 128+n if signal n ended it; 0 if we stopped it after the requested steps or seconds."""
    observed: Observed | None
    notes: tuple[str, ...] = ()
    stopped: bool = False
    """Whether we stopped it after the requested steps or seconds."""
    traced: TracedStep | str | None = None
    """One of its steps, or why there is none; None if it was not asked for."""


def run_attached(
    command: list[str], *, steps: int | None = None, seconds: float | None = None, trace: bool = False
) -> AttachResult:
    """Runs the command to its end, or for this many training batches or seconds of training. `trace`: one step is
    recorded operator by operator."""
    refuse_what_cannot_work(command)
    folder = Path(tempfile.mkdtemp(prefix="stoker-attach-"))
    try:
        child = _start(command, folder, steps, seconds, trace=trace)
        with _signals_passed_on(child):
            processes = ProcessWatch(folder)
            host, stopped = _watch(child, folder, seconds, processes)
        if stopped:
            _end(child, folder)
        recording = read_recording(folder, host.facts() if host else None, rank_of_environment() or 0, processes.seen())
        notes = list(recording.notes)
        if stopped:
            notes.append("the script was stopped after the requested steps or seconds")
        if not has_records(folder):
            notes = [
                "timers could not be attached: no Python process of this command read PYTHONPATH (isolated mode, a "
                "container, another host?); add one line to the script instead:  import stoker; stoker.watch()"
            ]
        code = 0 if stopped else child.returncode if child.returncode >= 0 else 128 - child.returncode
        traced = read_traced_step(folder) if trace else None
        return AttachResult(code, recording.observed, tuple(notes), stopped, traced)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _start(
    command: list[str], folder: Path, steps: int | None, seconds: float | None, *, trace: bool
) -> subprocess.Popen[bytes]:
    path = os.pathsep.join(filter(None, [str(ON_PATH), os.environ.get("PYTHONPATH")]))
    environment = os.environ | {
        "PYTHONPATH": path,
        FOLDER_VARIABLE: str(folder),
        LEADING_RANK_VARIABLE: str(rank_of_environment() or 0),
    }
    for variable, limit in ((STEPS_VARIABLE, steps), (SECONDS_VARIABLE, seconds), (TRACE_VARIABLE, trace or None)):
        environment.pop(variable, None)
        if limit is not None:
            environment[variable] = str(limit)
    try:
        return subprocess.Popen(command, env=environment)
    except FileNotFoundError:
        hint = f"python {' '.join(command)}" if command[0].endswith(".py") else None
        raise UserError(
            "command-not-found", f"{command[0]}: command not found",
            hint=f"stoker doctor -- {hint}" if hint else "type the command as in a shell",
        ) from None  # fmt: skip
    except OSError as error:
        hint = f"stoker doctor -- python {' '.join(command)}" if command[0].endswith(".py") else None
        raise UserError("command-cannot-run", f"{command[0]} cannot be started: {error.strerror}", hint=hint) from None


@contextmanager
def _signals_passed_on(child: subprocess.Popen[bytes]) -> Iterator[None]:
    """Forwards our signals to the script, which ends as it wants to; we stay to report."""

    def pass_on(number: int, _frame: Any) -> None:
        # Ctrl-C in a terminal reaches the whole process group, the script included: once is enough.
        if number in (signal.SIGINT, signal.SIGQUIT) and _in_foreground():
            return
        with suppress(ProcessLookupError):
            os.kill(child.pid, number)

    before = {}
    with suppress(ValueError):  # not in the main thread: we cannot handle signals
        before = {number: signal.signal(number, pass_on) for number in FORWARDED}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _in_foreground() -> bool:
    try:
        descriptor = os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        return os.tcgetpgrp(descriptor) == os.getpgrp()
    except OSError:
        return False
    finally:
        os.close(descriptor)


def _watch(
    child: subprocess.Popen[bytes], folder: Path, seconds: float | None, processes: ProcessWatch
) -> tuple[HostWatch | None, bool]:
    """Waits until the script ends, or has recorded enough (True)."""
    host: HostWatch | None = None
    started_s = looked_s = time.monotonic()
    while child.poll() is None:
        time.sleep(POLL_S)
        marks = step_marks(folder).values()
        if any(each.done for each in marks):
            return host, True
        began = any(each.began for each in marks)
        now_s = time.monotonic()
        if host is None and began:
            host = HostWatch()
        if began:
            processes.look()
        if host is not None and now_s - looked_s > HOST_LOOK_S:
            looked_s = now_s
            host.look()
        if seconds is not None and not began and now_s - started_s > LONGEST_START_S + seconds:
            return host, True
    return host, False


def _end(child: subprocess.Popen[bytes], folder: Path) -> None:
    """Ends the script and all its processes: with SIGTERM, and SIGKILL after a grace period."""
    child.terminate()
    deadline = time.monotonic() + GRACE_S
    marker = f"{FOLDER_VARIABLE}={folder}"
    while time.monotonic() < deadline and (child.poll() is None or processes_with(marker)):
        time.sleep(POLL_S)
    kill_all(marker)
    if child.poll() is None:
        child.kill()
    child.wait()


# Attached by the script itself.

DEFAULT_FOLDER = "stoker_watch"
OUR_FILES = (ABOUT_FILES, "steps-*.ring", "fetch-*.ring")
# Ranks of one run start within seconds of each other and share the folder; older files are from a previous run.
SAME_RUN_S = 60.0


class Watch:
    """A recording that continues until the process ends; `stoker doctor FOLDER` reads it, also while it grows."""

    def __init__(self, folder: Path, opened: Session) -> None:
        self.folder = folder
        self._session = opened
        self._host = HostWatch()
        self._processes = ProcessWatch(folder)
        self._stopping = threading.Event()
        self._pid = os.getpid()
        # A spawned worker imports the script again and gets here too: one watch over the host is enough.
        if multiprocessing.parent_process() is None:
            # Once a second, a millisecond or less: /dev/shm and memory have only momentary values.
            threading.Thread(target=self._look, name="stoker-watch", daemon=True).start()
            atexit.register(self._keep_host)

    def observed(self) -> Observed:
        return read_attached(self.folder)

    def _look(self) -> None:
        while not self._stopping.wait(HOST_LOOK_S):
            self._host.look()
            self._processes.look()

    def _keep_host(self) -> None:
        if os.getpid() == self._pid and not self._stopping.is_set():
            self._stopping.set()
            with suppress(OSError, ValueError):
                self._session.say(host=asdict(self._host.facts()), processes=self._processes.as_records())


_watches: list[Watch] = []


def watch(report: str | Path = DEFAULT_FOLDER) -> Watch:
    """Records where this script's time goes, from here on, in the folder `report`; read it with `stoker doctor FOLDER`.

    Call it before the first DataLoader is iterated. It prints nothing. Calling it again, as a spawned worker does when
    it imports the script, has no effect."""
    if _watches:
        return _watches[0]
    inherited = os.environ.get(FOLDER_VARIABLE)
    folder = Path(inherited if inherited and Path(inherited).is_dir() else report).absolute()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            "report-folder-unusable",
            f"{folder} cannot be created: {error.strerror}",
            hint="stoker.watch(report='FOLDER')",
        ) from None
    if not inherited:
        for path in (path for pattern in OUR_FILES for path in folder.glob(pattern)):
            with suppress(OSError):
                if path.stat().st_mtime < time.time() - SAME_RUN_S:
                    path.unlink()
        # Spawned workers are attached to as under `stoker doctor --`: through PYTHONPATH.
        os.environ[FOLDER_VARIABLE] = str(folder)
        before = os.environ.get("PYTHONPATH")
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ON_PATH), before]))
    made = Watch(folder, start(str(folder)))
    _watches.append(made)
    return made
