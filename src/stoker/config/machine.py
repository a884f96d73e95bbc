"""What a config asks for and this machine cannot do: the nearest that works, and a sentence about it."""

from __future__ import annotations

from stoker.config.schema import Config
from stoker.facts import Machine


def fit_to_machine(config: Config, machine: Machine) -> tuple[Config, list[str]]:
    """The config as it will run on this machine, and what was changed for it.

    A config that names 16-bit precision is right, only not here; it is no config error.
    """
    changes: dict[str, object] = {}
    notes: list[str] = []
    if machine.accelerators == 0:
        if config.precision == "16-mixed":
            changes["precision"] = "32"
            notes.append("precision: 16-mixed needs a GPU; this run computes in 32")
        changes["pin_memory"] = False  # not worth a note: without a GPU there is nobody to copy for
        if config.sync_batchnorm:
            changes["sync_batchnorm"] = False
            notes.append("sync_batchnorm: true needs GPUs; this run keeps statistics for each process")
        if config.devices == "auto":
            changes["devices"] = 1
    elif machine.accelerators is not None and config.devices == "auto":
        changes["devices"] = machine.accelerators
    if config.num_workers == "auto":
        devices = changes.get("devices", config.devices)
        ranks = devices if isinstance(devices, int) else 1
        changes["num_workers"] = max(1, machine.cpus // ranks)
    return config.model_copy(update=changes), notes
