"""A run's use of its host: throttling by a quota, shared memory, cores."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from stoker.core.cgroups import (
    cgroup_folders,
    cpu_quota,
    memory_limit,
    oom_kills,
    read_throttling,
    throttled_share,
)
from stoker.profile import host
from stoker.profile.host import HostWatch


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
    assert facts.shm_used_bytes is not None
    # Others use it too, so the difference may be a little less than our share.
    assert facts.shm_used_bytes >= 8 << 20
    assert facts.cpu_busy_share is not None
    # How much of the time that is depends on the number of cores, and on who else wants them.
    assert 0 < facts.cpu_busy_share <= 1
    assert facts.page_cache_bytes is not None
    assert facts.ram_bytes is not None
    assert 0 < facts.page_cache_bytes <= facts.ram_bytes
