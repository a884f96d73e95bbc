"""Trains vision models without starving the accelerator."""

from stoker.version import __version__

__all__ = ["__version__"]
