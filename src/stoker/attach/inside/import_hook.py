"""Calls a patch as soon as the module that it is for has been imported."""

from __future__ import annotations

import sys
from typing import Any

from stoker.attach.inside import session
from stoker.attach.inside.targets import STAGE_TARGETS

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
            from stoker.attach.inside.fetching import patch_fetchers

            patch_fetchers(module)
        elif name == LOADERS:
            from stoker.attach.inside.iterating import patch_loaders

            patch_loaders(module)
        elif name == OPTIMIZERS:
            from stoker.attach.inside.iterating import patch_optimizers

            patch_optimizers(module)
        else:
            from stoker.attach.inside.stages import patch_stages

            patch_stages(module, STAGE_TARGETS[name])
    except Exception as error:  # the script comes first
        _note(f"no clock in {name}: {type(error).__name__}: {error}")


def _note(text: str) -> None:
    opened = session.current()
    if opened is not None:
        opened.note(text)
