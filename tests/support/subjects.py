"""Subjects of `stoker verify`, and ranks on which something differs."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path
from typing import Any

from stoker.config import load_config
from stoker.profile.host import Machine, fit_to_machine
from stoker.tasks.checks import Check, Subject
from stoker.verify.run_checks import all_checks

# One thread: two that wait for each other on busy cores are many times slower.
HERE = Machine(cpus=1, ram_bytes=16 * 10**9, shm_bytes=8 * 10**9, accelerators=0)


def subject_of(path: Path, *overrides: str, machine: Machine = HERE, **fields: Any) -> Subject:
    """A config with overrides, on a machine."""
    config, _ = fit_to_machine(load_config(path, overrides).config, machine)
    return Subject(config, path, overrides, machine, **fields)


def check_named(name: str) -> Check:
    return next(check for check in all_checks() if check.name == name)


def be_a_faulty_rank() -> None:
    """To be called in a rank: its timm has another version, and its sums have one wrong number."""
    import torch.distributed as dist

    version, all_reduce = metadata.version, dist.all_reduce

    def wrong_once(tensor: Any, *arguments: Any, **keys: Any) -> Any:
        work = all_reduce(tensor, *arguments, **keys)
        tensor[12345 % len(tensor)] += 1
        return work

    metadata.version = lambda name: "0.9.0" if name == "timm" else version(name)
    dist.all_reduce = wrong_once
