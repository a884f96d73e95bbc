"""What this process may use: affinity and container limits count, not the size of the host."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from stoker.config import load_config
from stoker.machine.host import Machine, count_accelerators, fit_to_machine, read_machine, usable_cpus, usable_ram_bytes


def test_affinity_counts() -> None:
    program = "from stoker.machine.host import usable_cpus; print(usable_cpus())"
    first = str(min(os.sched_getaffinity(0)))
    done = subprocess.run(["taskset", "-c", first, sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == "1\n"


@pytest.mark.parametrize(("quota", "cpus"), [("50000 100000", 1), ("max 100000", None), ("150000 100000", 2)])
def test_a_cgroup_quota_counts(tmp_path: Path, quota: str, cpus: int | None) -> None:
    (tmp_path / "cpu.max").write_text(quota + "\n")
    own = len(os.sched_getaffinity(0))
    assert usable_cpus(tmp_path) == (own if cpus is None else min(own, cpus))


def test_a_cgroup_memory_limit_counts(tmp_path: Path) -> None:
    (tmp_path / "memory.max").write_text("123456789\n")
    assert usable_ram_bytes(tmp_path) == 123456789
    (tmp_path / "memory.max").write_text("max\n")
    assert usable_ram_bytes(tmp_path) > 123456789


def test_hidden_accelerators_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert count_accelerators() == 0


def test_this_machine_is_read() -> None:
    machine = read_machine()
    assert machine.cpus >= 1
    assert machine.ram_bytes is not None
    assert machine.ram_bytes > 10**8


def test_a_config_is_fitted_to_the_machine_and_says_so() -> None:
    config = load_config(None, ["precision=16-mixed", "sync_batchnorm=true"]).config
    fitted, notes = fit_to_machine(config, Machine(cpus=6, accelerators=0))
    assert (fitted.precision, fitted.sync_batchnorm, fitted.num_workers, fitted.devices) == (
        "32",
        False,
        6,
        1,
    )
    assert len(notes) == 2
    fitted, notes = fit_to_machine(config, Machine(cpus=16, accelerators=4))
    assert (fitted.precision, fitted.num_workers, fitted.devices, notes) == ("16-mixed", 4, 4, [])


def test_unknown_values_change_only_the_number_of_devices() -> None:
    config = load_config(None, ["precision=16-mixed", "num_workers=3"]).config
    fitted, notes = fit_to_machine(config, Machine(cpus=2, accelerators=None))
    assert (dict(fitted), notes) == (dict(config) | {"devices": 1}, [])


def test_without_an_affinity_all_cores_count(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delattr(os, "sched_getaffinity")  # as on macOS
    assert usable_cpus(tmp_path) == os.cpu_count()
