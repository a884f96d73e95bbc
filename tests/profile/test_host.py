"""What this process may use, by affinity and container limits, and what a run uses of it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from stoker.config import load_config
from stoker.core.cgroups import (
    cgroup_folders,
    cpu_quota,
    memory_limit,
    oom_kills,
    read_throttling,
    throttled_share,
)
from stoker.profile import host
from stoker.profile.host import (
    HostWatch,
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
    assert (fitted.precision, fitted.sync_batchnorm, fitted.num_workers, fitted.devices) == ("32", False, 6, 1)
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


def proc(folder: Path, lines: str) -> Path:
    (folder / "self").mkdir()
    (folder / "self" / "cgroup").write_text(lines)
    return folder


def test_the_throttling_count_is_read_from_cgroup_v2(tmp_path: Path) -> None:
    own = tmp_path / "pod" / "container"
    own.mkdir(parents=True)
    (own / "cpu.stat").write_text("usage_usec 5\nnr_periods 0\nnr_throttled 0\nthrottled_usec 0\n")
    (tmp_path / "pod" / "cpu.stat").write_text("usage_usec 5\nnr_periods 50\nnr_throttled 9\nthrottled_usec 2500000\n")
    # The limit may be set on a parent cgroup.
    assert read_throttling(tmp_path, proc(tmp_path, "0::/pod/container\n")) == 2.5


def test_a_limit_on_a_nested_cgroup_v1_counts(tmp_path: Path) -> None:
    for name, file, value in (("cpu", "cpu.cfs_quota_us", 150_000), ("memory", "memory.limit_in_bytes", 123_456)):
        own = tmp_path / name / "docker" / "task"
        own.mkdir(parents=True)
        (own / file).write_text(f"{value}\n")
        (own / "cpu.cfs_period_us").write_text("100000\n")
        (own.parent / file).write_text("-1\n" if name == "cpu" else f"{(1 << 63) - 4096}\n")
        (own / "cpu.stat").write_text("nr_periods 10\nnr_throttled 4\nthrottled_time 1500000000\n")
    shown = proc(tmp_path, "4:memory:/docker/task\n2:cpu,cpuacct:/docker/task\n")
    assert cpu_quota(tmp_path, shown) == read_throttling(tmp_path, shown) == 1.5
    assert [memory_limit(folder) for folder in cgroup_folders("memory", tmp_path, shown)] == [123_456, None, None]


def test_processes_that_the_kernel_killed_for_memory_are_counted(tmp_path: Path) -> None:
    for name, file, text in (
        ("pod", "memory.events", "low 0\nhigh 4\nmax 9\noom 3\noom_kill 2\noom_group_kill 0\n"),
        ("memory/job", "memory.oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill 7\n"),
    ):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / file).write_text(text)
    for number, (line, kills) in enumerate((("0::/pod", 2), ("4:memory:/job", 7), ("0::/other", None))):
        (tmp_path / f"proc{number}").mkdir()
        assert oom_kills(tmp_path, proc(tmp_path / f"proc{number}", f"{line}\n")) == kills


def test_a_share_is_only_reported_with_a_quota(tmp_path: Path) -> None:
    (tmp_path / "cpu.stat").write_text("nr_periods 0\nnr_throttled 0\nthrottled_usec 0\n")
    assert read_throttling(tmp_path, proc(tmp_path, "0::/\n")) is None
    assert throttled_share(None, None, 10.0, 2) is None
    assert throttled_share(1.0, 6.0, 10.0, 1) == pytest.approx(0.5)
    assert throttled_share(1.0, 11.0, 10.0, 2) == pytest.approx(0.5), "of the time of all cores"


def test_the_busy_share_is_that_of_the_cores_that_this_process_may_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # user nice system idle iowait irq softirq steal guest
    before = "cpu  9 9 9 9 9 9 9 9 9\ncpu0 100 0 50 800 50 0 0 0 7\ncpu1 0 0 0 500 0 0 0 0 0\ncpu2 5 5 5 5 5 5 5 5 5\n"
    after = "cpu  0 0 0 0 0 0 0 0 0\ncpu0 130 5 60 840 60 1 2 2 9\ncpu1 10 0 0 540 0 0 0 0 0\ncpu2 9 9 9 9 9 9 9 9 9\n"
    monkeypatch.setattr(host, "PROC", tmp_path)
    monkeypatch.setattr(host, "allowed_cores", lambda: {0, 1})
    (tmp_path / "stat").write_text(before)
    watch = HostWatch()
    assert watch.facts().cpu_busy_share is None, "no time has passed"
    (tmp_path / "stat").write_text(after)
    # 50 of 100 ticks of the first core, and 10 of 50 of the second.
    assert watch.facts().cpu_busy_share == pytest.approx(60 / 150)
    assert watch.facts().cpu_busy_share is None, "since the last look"


def test_a_busy_core_and_used_shared_memory_are_measured() -> None:
    watch = HostWatch()
    path = Path(f"/dev/shm/stoker-test-{os.getpid()}")
    before = watch.facts().shm_used_bytes
    try:
        path.write_bytes(bytes(8 << 20))
        watch.look()
    finally:
        path.unlink()
    end = time.thread_time() + 0.3
    while time.thread_time() < end:
        pass
    facts = watch.facts()
    assert before is not None
    # Others use it too, so the difference may be a little less than our share.
    assert facts.shm_used_bytes >= 8 << 20
    # How much of the time that is depends on the number of cores, and on who else wants them.
    assert 0 < facts.cpu_busy_share <= 1
    assert 0 < facts.page_cache_bytes <= facts.ram_bytes
