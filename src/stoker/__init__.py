"""Trains vision models without starving the accelerator."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from stoker.doctor.attach.watching import watch

__all__ = ["__version__", "watch"]


def __getattr__(name: str) -> Any:
    # Imported on first use, so that `stoker --help` stays fast.
    if name == "watch":
        from stoker.doctor.attach.watching import watch

        return watch
    raise AttributeError(f"module 'stoker' has no attribute {name!r}")
