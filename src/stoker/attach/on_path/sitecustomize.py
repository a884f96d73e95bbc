"""Attaches the timers when Python starts; Python finds this file because run_attached puts its folder on PYTHONPATH.

The user's own sitecustomize, if there is one, runs as well. Nothing here may stop the script from starting.
"""

import contextlib
import sys
from pathlib import Path

_HERE = Path(__file__).resolve().parent


def _is_here(entry: str) -> bool:
    try:
        return bool(entry) and Path(entry).resolve() == _HERE
    except (OSError, ValueError):
        return False


class _StokerFinder:
    """Finds `stoker` where the doctor runs from; asked last, so that one in the script's environment is preferred."""

    @staticmethod
    def find_spec(name, path=None, target=None):  # type: ignore[no-untyped-def]  # noqa: ARG004
        if name != "stoker":
            return None
        from importlib.util import spec_from_file_location

        package = _HERE.parents[1]
        return spec_from_file_location(name, package / "__init__.py", submodule_search_locations=[str(package)])


def _run_the_users_own() -> None:
    """Runs the sitecustomize that Python would have found without ours."""
    from importlib.machinery import PathFinder
    from importlib.util import module_from_spec

    spec = PathFinder.find_spec("sitecustomize", [entry for entry in sys.path if not _is_here(entry)])
    if spec is None or spec.loader is None:
        return
    module = module_from_spec(spec)
    sys.modules["sitecustomize"] = module
    spec.loader.exec_module(module)


with contextlib.suppress(Exception):
    sys.meta_path.append(_StokerFinder)
    from stoker.attach.session import start_from_environment

    start_from_environment()
# The folder is no longer needed: the script sees the sys.path that it would have had without us.
sys.path[:] = [entry for entry in sys.path if not _is_here(entry)]
_run_the_users_own()
