"""Trains vision models without starving the accelerator."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from stoker.api import load
    from stoker.doctor.script.run_script import watch

__all__ = ["__version__", "load", "watch"]


def __getattr__(name: str) -> Any:
    # Imported on first use, so that `stoker --help` stays fast.
    if name == "load":
        from stoker.api import load

        return load
    if name == "watch":
        from stoker.doctor.script.run_script import watch

        return watch
    raise AttributeError(f"module 'stoker' has no attribute {name!r}")
