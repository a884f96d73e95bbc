"""Attaches the timers to this process: where it records and for how long, and the patches of what it imports.

Modules that are already imported are patched at once, the others when they are imported.
"""

from __future__ import annotations

import json
import os
import sys
import time
from contextlib import suppress
from typing import Any

from stoker.attach.stages import STAGE_TARGETS, patch_stages

FOLDER_VARIABLE = "STOKER_ATTACH"
STEPS_VARIABLE = "STOKER_ATTACH_STEPS"
SECONDS_VARIABLE = "STOKER_ATTACH_SECONDS"
LEADING_RANK_VARIABLE = "STOKER_ATTACH_RANK"
TRACE_VARIABLE = "STOKER_ATTACH_TRACE"
"""Set if a step is to be recorded operator by operator."""
# A run of months must not fill a disk with notes.
MOST_LINES = 4000


class Session:
    """One process's part of a recording."""

    def __init__(self, folder: str, steps: int | None, seconds: float | None) -> None:
        self.folder = folder
        self.traces = bool(os.environ.get(TRACE_VARIABLE))
        self.steps = steps
        self.seconds = seconds
        self.recording = True
        self._said: set[str] = set()

    def say(self, **facts: Any) -> None:
        """Appends one line of JSON to this process's facts, at once, so that it survives a crash."""
        line = json.dumps(facts, sort_keys=True)
        if line in self._said or len(self._said) >= MOST_LINES:
            return
        self._said.add(line)
        try:
            path = os.path.join(self.folder, f"about-{os.getpid()}.jsonl")  # noqa: PTH118 - pathlib is slow to import
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
            try:
                os.write(descriptor, line.encode() + b"\n")
            finally:
                os.close(descriptor)
        except OSError:
            self.recording = False

    def note(self, text: str) -> None:
        """Adds a sentence for the reader of the diagnosis."""
        self.say(note=text)

    def failed(self, what: str, error: BaseException) -> None:
        """Notes that something of ours failed, and stops recording in this process."""
        self.recording = False
        self.note(f"{what}: {type(error).__name__}: {error}; recording stopped in process {os.getpid()}")

    def after_fork(self) -> None:
        """Starts a new list in a child: its lines go into its own file."""
        self._said = set()


_current: list[Session] = []


def current() -> Session | None:
    """The session of this process; None if it is not being recorded."""
    return _current[0] if _current else None


def _number_in(*variables: str) -> int | None:
    return next((int(value) for name in variables if (value := os.environ.get(name, "")).isdigit()), None)


def rank_of_environment() -> int | None:
    """The rank that a launcher gave to this process."""
    return _number_in("RANK", "SLURM_PROCID")


def ranks_here() -> int:
    """How many ranks a launcher started on this host, this one included."""
    return max(1, _number_in("LOCAL_WORLD_SIZE", "SLURM_NTASKS_PER_NODE") or 1)


def leading_rank() -> int:
    """The rank whose steps count: 0, or our own if the doctor itself was started once for each rank."""
    return _number_in(LEADING_RANK_VARIABLE) or 0


FETCHERS = "torch.utils.data._utils.fetch"
LOADERS = "torch.utils.data.dataloader"
OPTIMIZERS = "torch.optim.optimizer"
MODULES = "torch.nn.modules.module"
SCALERS = ("torch.amp.grad_scaler", "torch.cuda.amp.grad_scaler")
AUTOCAST = "torch.amp.autocast_mode"
WATCHED = frozenset({FETCHERS, LOADERS, OPTIMIZERS, MODULES, AUTOCAST, *SCALERS, *STAGE_TARGETS})


class _PatchingFinder:
    """Lets the other finders find a module, and patches it once it is loaded."""

    @classmethod
    def find_spec(cls, name: str, path: Any = None, target: Any = None) -> Any:
        if name not in WATCHED:
            return None
        for finder in sys.meta_path:
            find = getattr(finder, "find_spec", None)
            if finder is cls or find is None:
                continue
            spec = find(name, path, target)
            if spec is not None:
                _patch_after_loading(name, spec)
                return spec
        return None


def _patch_after_loading(name: str, spec: Any) -> None:
    load = getattr(spec.loader, "exec_module", None)
    if load is None:
        return

    def exec_module(module: Any) -> None:
        load(module)
        patch(name, module)

    # On the loader object, which belongs to this one module: its type, which others look at, is unchanged.
    try:
        spec.loader.exec_module = exec_module
    except AttributeError:
        _note(f"{name} was loaded in a way that cannot be timed")


def patch_on_import() -> None:
    """Patches what is already imported, and the rest when it is imported."""
    if _PatchingFinder in sys.meta_path:
        return
    for name in WATCHED:
        module = sys.modules.get(name)
        if module is not None:
            patch(name, module)
    sys.meta_path.insert(0, _PatchingFinder)


def patch(name: str, module: Any) -> None:
    """Attaches timers to one module; a failure is noted and leaves the module unchanged."""
    try:
        if name in STAGE_TARGETS:
            patch_stages(module, STAGE_TARGETS[name])
        elif name == FETCHERS:
            from stoker.attach.fetching import patch_fetchers

            patch_fetchers(module)
        elif name in (LOADERS, OPTIMIZERS):
            from stoker.attach.iterating import patch_loaders, patch_optimizers

            (patch_loaders if name == LOADERS else patch_optimizers)(module)
        elif name == MODULES:
            from stoker.attach.watched_loop import modes

            modes.patch(module)
        else:
            from stoker.attach.precision import patch_scalers, wanted

            if name in SCALERS:
                patch_scalers(module)
            elif (opened := current()) is not None and opened.traces:
                wanted.watch(module.autocast)
    except Exception as error:  # the script comes first
        _note(f"{name} could not be timed: {type(error).__name__}: {error}")


def _note(text: str) -> None:
    opened = current()
    if opened is not None:
        opened.note(text)


def start_from_environment() -> None:
    """Starts in a process of run_attached or of a watching parent; does nothing in any other."""
    folder = os.environ.get(FOLDER_VARIABLE)
    # A process that outlives the doctor finds the folder gone, and is not recorded.
    if folder and os.path.isdir(folder):  # noqa: PTH112 - in every Python process of the script: few imports
        start(folder, _number(STEPS_VARIABLE), _number(SECONDS_VARIABLE))


def start(folder: str, steps: float | None = None, seconds: float | None = None) -> Session:
    """Records this process into the folder, until it ends or the limit is reached; again has no effect."""
    if not _current:
        _current.append(Session(folder, None if steps is None else int(steps), seconds))
        _current[0].say(started_ns=time.perf_counter_ns(), clock_s=time.time(), rank=rank_of_environment())
    opened = _current[0]
    try:
        patch_on_import()
    except Exception as error:  # the script comes first
        opened.failed("timers could not be attached", error)
    return opened


def _number(variable: str) -> float | None:
    with suppress(KeyError, ValueError):
        return float(os.environ[variable])
    return None
