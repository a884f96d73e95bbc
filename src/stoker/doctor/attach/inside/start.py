"""Attaches the clock to this process: now for what is imported, and on import for what is not yet."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from typing import Any

from stoker.doctor.attach.inside import session
from stoker.doctor.attach.inside.stages import STAGE_TARGETS

# Calls a patch as soon as the module that it is for has been imported.

FETCHERS = "torch.utils.data._utils.fetch"
LOADERS = "torch.utils.data.dataloader"
OPTIMIZERS = "torch.optim.optimizer"
WATCHED = frozenset({FETCHERS, LOADERS, OPTIMIZERS, *STAGE_TARGETS})


class _PatchingFinder:
    """Lets the other finders find, and adds our patch to the end of a watched module's loading."""

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

    # On the loader object, which belongs to this one module: its type, which others look at, stays what it is.
    try:
        spec.loader.exec_module = exec_module
    except AttributeError:
        _note(f"{name} was loaded in a way that leaves no room for a clock")


def patch_on_import() -> None:
    """Patches what is imported already, and the rest when it comes."""
    if _PatchingFinder in sys.meta_path:
        return
    for name in WATCHED:
        module = sys.modules.get(name)
        if module is not None:
            patch(name, module)
    sys.meta_path.insert(0, _PatchingFinder)


def patch(name: str, module: Any) -> None:
    """Hangs the clock into one module; what fails is noted and leaves the module as it was."""
    try:
        if name == FETCHERS:
            from stoker.doctor.attach.inside.fetching import patch_fetchers

            patch_fetchers(module)
        elif name == LOADERS:
            from stoker.doctor.attach.inside.iterating import patch_loaders

            patch_loaders(module)
        elif name == OPTIMIZERS:
            from stoker.doctor.attach.inside.iterating import patch_optimizers

            patch_optimizers(module)
        else:
            from stoker.doctor.attach.inside.stages import patch_stages

            patch_stages(module, STAGE_TARGETS[name])
    except Exception as error:  # the script comes first
        _note(f"no clock in {name}: {type(error).__name__}: {error}")


def _note(text: str) -> None:
    opened = session.current()
    if opened is not None:
        opened.note(text)


# Hangs the clock into this process: now for what is imported, and on import for what is not yet.


def start_from_environment() -> None:
    """Starts in a process that run_attached or a watching parent has started; else does nothing."""
    folder = os.environ.get(session.FOLDER_VARIABLE)
    # A process that outlives the doctor finds the folder gone and is left alone.
    if folder and os.path.isdir(folder):  # noqa: PTH112 - in every Python process of the script: few imports
        start(folder, _number(session.STEPS_VARIABLE), _number(session.SECONDS_VARIABLE))


def start(folder: str, steps: float | None = None, seconds: float | None = None) -> session.Session:
    """Records this process into the folder, until it ends or the limit is reached."""
    opened = session.begin(folder, None if steps is None else int(steps), seconds)
    try:
        patch_on_import()
    except Exception as error:  # the script comes first
        opened.failed("the clock could not be hung in", error)
    return opened


def _number(variable: str) -> float | None:
    with suppress(KeyError, ValueError):
        return float(os.environ[variable])
    return None
