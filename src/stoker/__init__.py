"""Trains vision models without starving the accelerator."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from os import PathLike

    from stoker.doctor.script.run_script import watch

__all__ = ["__version__", "load", "watch"]


def load(path: str | PathLike[str]) -> dict[str, Any]:
    """The contents of a checkpoint, checked against its hashes: `model` (name -> tensor on the CPU), `ema`,
    `optimizer`, `config`, `classes`, `progress` and the rest. A run folder means its best checkpoint, or its last.

    Raises stoker.core.errors.UserError if there is none, or if it is damaged. No code in the file is ever run.
    """
    # Imported here, so that `stoker --help` stays fast.
    from pathlib import Path

    from stoker.run.folder import RunFolder, best_checkpoint
    from stoker.tasks.base import metric_of
    from stoker.train.checkpoint.format import peek, read_checkpoint

    file = Path(path)
    if file.is_dir():
        folder = RunFolder(file)
        last = folder.checkpoints / "last.ckpt"
        config = peek(last, "config")["config"] if last.exists() else None
        file = best_checkpoint(folder, metric_of(config or {})) or last
    return read_checkpoint(file)


def __getattr__(name: str) -> Any:
    if name == "watch":
        from stoker.doctor.script.run_script import watch

        return watch
    raise AttributeError(f"module 'stoker' has no attribute {name!r}")
