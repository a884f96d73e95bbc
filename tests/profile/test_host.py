"""What this process may use: affinity and container limits count, not the size of the host."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from stoker.config import load_config
from stoker.profile.host import (
    Machine,
    fit_to_machine,
    physical_cores,
    ranks_sharing_cores,
    usable_cpus,
    usable_ram_bytes,
)


def test_affinity_counts_where_there_is_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    program = "from stoker.profile.host import usable_cpus; print(usable_cpus())"
    first = str(min(os.sched_getaffinity(0)))
    done = subprocess.run(["taskset", "-c", first, sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == "1\n"
    monkeypatch.delattr(os, "sched_getaffinity")  # as on macOS
    assert usable_cpus(tmp_path) == os.cpu_count()


@pytest.mark.parametrize(("quota", "cpus"), [("50000 100000", 1), ("max 100000", None), ("150000 100000", 2)])
def test_a_cgroup_quota_counts(tmp_path: Path, quota: str, cpus: int | None) -> None:
    (tmp_path / "cpu.max").write_text(quota + "\n")
    own = len(os.sched_getaffinity(0))
    assert usable_cpus(tmp_path) == (own if cpus is None else min(own, cpus))
    (tmp_path / "memory.max").write_text("123456789\n")
    assert usable_ram_bytes(tmp_path) == 123456789


def test_threads_of_one_core_are_one_physical_core(tmp_path: Path) -> None:
    for number, siblings in enumerate(("0,4", "1,5", "2,6", "3,7", "0,4", "1,5", "2,6", "3,7")):
        folder = tmp_path / f"cpu{number}" / "topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(siblings + "\n")
    for allowed, cpus, cores in ((range(8), 8, 4), ((0, 4, 1), 3, 2), (range(8), 3, 3), (range(4), 4, 4)):
        assert physical_cores(cpus, allowed, tmp_path) == cores
    assert physical_cores(8, range(8), tmp_path / "absent") is None


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
    assert (fitted.precision, fitted.num_workers, fitted.devices, notes) == ("16-mixed", 3, 4, [])


@pytest.mark.parametrize(
    ("machine", "workers"),
    [
        (Machine(cpus=64, accelerators=8), 7),
        (Machine(cpus=4, accelerators=8), 1),  # never none
        (Machine(cpus=6, accelerators=0), 6),  # without a GPU the training thread computes on all of them
        (Machine(cpus=6, accelerators=None), 5),
        (Machine(cpus=8, accelerators=1, ranks=1), 7),  # srun: one GPU and eight cores for each process
        (Machine(cpus=32, accelerators=1, ranks=4), 7),  # srun: one GPU for each process, the cores shared
        (Machine(cpus=32, accelerators=8, ranks=2), 15),  # torchrun started fewer processes than there are GPUs
    ],
)
def test_auto_workers_leave_a_core_of_each_rank_to_the_launching_thread(machine: Machine, workers: int) -> None:
    assert fit_to_machine(load_config(None, []).config, machine)[0].num_workers == workers


SRUN = {"SLURM_STEP_ID": "0", "SLURM_PROCID": "5"}


@pytest.mark.parametrize(
    ("environment", "ranks"),
    [
        ({}, None),
        ({"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "8"}, 8),
        ({"LOCAL_WORLD_SIZE": "8"}, None),  # exported by hand: no launcher sets it alone
        (SRUN | {"SLURM_TASKS_PER_NODE": "4(x2),3"}, 4),
        (SRUN | {"SLURM_TASKS_PER_NODE": "1", "SLURM_STEP_TASKS_PER_NODE": "8"}, 8),
        (SRUN | {"SLURM_TASKS_PER_NODE": "4", "SLURM_CPUS_PER_TASK": "12"}, 1),
        (SRUN | {"SLURM_TASKS_PER_NODE": "4", "SLURM_CPUS_PER_TASK": "3"}, 4),  # not bound to them
        ({"SLURM_TASKS_PER_NODE": "4", "SLURM_PROCID": "0"}, None),  # inside sbatch, not started by srun
    ],
)
def test_a_launcher_says_how_many_ranks_share_the_cores(environment: dict[str, str], ranks: int | None) -> None:
    assert ranks_sharing_cores(12, environment) == ranks


def test_unknown_values_change_only_the_number_of_devices() -> None:
    # A fixed number of workers is never adjusted.
    config = load_config(None, ["precision=16-mixed", "num_workers=3"]).config
    fitted, notes = fit_to_machine(config, Machine(cpus=2, accelerators=None))
    assert (dict(fitted), notes) == (dict(config) | {"devices": 1, "adjust_loader": False}, [])
