"""Restores the model that `eval`, `predict` and `export` work with, as it will run on this machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from stoker.config import fit_to_machine
from stoker.config.writing import write_scalar
from stoker.output.crash_log import remember_config
from stoker.output.text import say, say_notes
from stoker.probe.host import read_machine
from stoker.training.from_checkpoint import Restored, restore_model


def restore_for_command(
    checkpoint: Path, overrides: Sequence[str], *, raw: bool, data_root: str | None = None
) -> tuple[Restored, int]:
    """The model, and how many workers may decode for it."""
    given = [] if data_root is None else [f"data_root={write_scalar(data_root)}"]
    restored = restore_model(checkpoint, [*given, *overrides], raw=raw, say=say)
    machine = read_machine()
    config, notes = fit_to_machine(restored.config, machine)
    say_notes(notes)
    remember_config(config)
    workers = config.num_workers if isinstance(config.num_workers, int) else machine.cpus
    return replace(restored, config=config), workers
