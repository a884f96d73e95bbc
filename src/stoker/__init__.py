"""Trains vision models without starving the accelerator."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from stoker.version import __version__

if TYPE_CHECKING:
    from stoker.doctor.attach.watching import watch

__all__ = ["__version__", "watch"]


def __getattr__(name: str) -> Any:
    # Imported when it is asked for: `stoker --help` must not pay for it.
    if name == "watch":
        from stoker.doctor.attach.watching import watch

        return watch
    raise AttributeError(f"module 'stoker' has no attribute {name!r}")
