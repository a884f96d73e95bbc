"""Measured memory of processes and of a loader's parts, and what is left before the kernel kills a process."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from stoker.loader import loader_memory
from stoker.loader.loader_memory import STATED, MemoryTrial, measure_loader_memory, parts_of
from stoker.profile.memory import TreeMemory, read_memory, tree_memory, tree_pids, used_by_others_bytes
from tests.conftest import PROJECT
from tests.support import decoder_trials as trials

MEGABYTE = 1_000_000
GIGABYTE = 1_000_000_000


def test_a_child_process_counts_with_its_parent() -> None:
    program = "import sys; held = bytearray(b'x') * 50_000_000; print('ready', flush=True); sys.stdin.read()"
    before = tree_memory()
    child = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert child.stdin is not None
    assert child.stdout is not None
    with child:
        child.stdout.readline()
        assert child.pid in tree_pids(os.getpid())
        with_child = tree_memory()
        child.stdin.close()
    assert with_child.anonymous_bytes - before.anonymous_bytes > 45 * MEGABYTE
    assert child.pid not in tree_pids(os.getpid())


def test_a_loader_is_measured_once_and_then_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    found = measure_loader_memory(decoder="simplejpeg")
    assert found.measured
    # Wide bounds, but each would fail if a part were left out or counted twice.
    assert 100 * MEGABYTE < found.process < 2_000 * MEGABYTE
    assert 50 * MEGABYTE < found.fork_server < found.process
    assert 2 * MEGABYTE < found.worker < 200 * MEGABYTE
    assert found.thread < 100 * MEGABYTE
    assert 20_000 < found.image_bytes < 500_000
    assert (tmp_path / "stoker" / "loader_memory.json").is_file()
    assert measure_loader_memory(decoder="simplejpeg", measure=False) == found


@pytest.mark.parametrize("trial", [trials.fails, trials.raises])
def test_documented_figures_are_used_where_nothing_can_be_measured(
    trial: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(PROJECT))
    monkeypatch.setattr(loader_memory, "run_loaders", trial)
    assert measure_loader_memory() == STATED
    assert measure_loader_memory(measure=False) == STATED
    assert not STATED.measured
    assert not list(tmp_path.iterdir())


def test_parts_are_distinguished() -> None:
    batch_bytes, held = 16 * 224 * 224 * 3, 16 * 100_000

    def trial(*anonymous: int) -> MemoryTrial:
        peaks = tuple(TreeMemory(0, size, 0, 250 * MEGABYTE) for size in anonymous)
        return MemoryTrial(TreeMemory(0, 300 * MEGABYTE, 0, 250 * MEGABYTE), peaks, (30,) * len(peaks), 100_000.0)

    def processes(count: int) -> int:
        return 300 * MEGABYTE + 200 * MEGABYTE + count * (20 * MEGABYTE + held)

    threads = trial(300 * MEGABYTE + 3 * (5 * MEGABYTE + held) + 7 * batch_bytes)
    found = parts_of(threads, trial(processes(1), processes(3)))
    assert found.process == 550 * MEGABYTE
    assert found.thread == 5 * MEGABYTE
    assert found.fork_server == 200 * MEGABYTE
    assert found.worker == 20 * MEGABYTE


def fake_system(tmp_path: Path, own: str) -> tuple[Path, Path]:
    proc, root = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "self").mkdir(parents=True)
    (proc / "self" / "cgroup").write_text(own)
    (proc / "meminfo").write_text("MemTotal:       62000000 kB\nMemFree: 1 kB\nMemAvailable:   50000000 kB\n")
    root.mkdir()
    return root, proc


def test_without_a_cgroup_limit_the_host_counts(tmp_path: Path) -> None:
    root, proc = fake_system(tmp_path, "0::/job\n")
    (root / "job").mkdir()
    (root / "job" / "memory.max").write_text("max\n")
    (root / "job" / "memory.current").write_text("5\n")
    state = read_memory(root, proc)
    assert state is not None
    assert (state.available_bytes, state.limit_bytes) == (50_000_000 * 1024, 62_000_000 * 1024)
    assert state.stalled is None


def test_a_cgroup_limit_on_any_level_counts_and_file_cache_does_not_use_it_up(tmp_path: Path) -> None:
    root, proc = fake_system(tmp_path, "0::/pod/container\n")
    (root / "pod" / "container").mkdir(parents=True)
    (root / "pod" / "memory.max").write_text(f"{8 * GIGABYTE}\n")
    (root / "pod" / "memory.current").write_text(f"{7 * GIGABYTE}\n")
    stat = f"anon 1\nshmem {GIGABYTE}\ninactive_file {GIGABYTE}\nactive_file {GIGABYTE}\nslab_reclaimable 5\n"
    (root / "pod" / "memory.stat").write_text(stat)
    (root / "pod" / "container" / "memory.pressure").write_text(
        "some avg10=40.00 avg60=1.00 avg300=0.00 total=1\nfull avg10=25.00 avg60=1.00 avg300=0.00 total=1\n"
    )
    state = read_memory(root, proc)
    assert state is not None
    assert (state.available_bytes, state.limit_bytes) == (3 * GIGABYTE + 5, 8 * GIGABYTE)
    assert state.stalled == 0.25


@pytest.mark.parametrize("path", ["/docker/abc", "/"])
def test_cgroup_v1_limits_count_even_if_a_container_sees_its_own_group_as_the_root(tmp_path: Path, path: str) -> None:
    root, proc = fake_system(tmp_path, f"5:devices:/\n4:cpu,memory:{path}\n0::/\n")
    (root / "memory").mkdir()
    (root / "memory" / "memory.limit_in_bytes").write_text(f"{4 * GIGABYTE}\n")
    (root / "memory" / "memory.usage_in_bytes").write_text(f"{3 * GIGABYTE}\n")
    (root / "memory" / "memory.stat").write_text(f"cache 9\ntotal_active_file {GIGABYTE}\ntotal_inactive_file 7\n")
    state = read_memory(root, proc)
    assert state is not None
    assert (state.available_bytes, state.limit_bytes) == (2 * GIGABYTE + 7, 4 * GIGABYTE)


def test_a_system_without_figures_gives_none(tmp_path: Path) -> None:
    assert read_memory(tmp_path, tmp_path) is None


def test_this_machine_has_memory_left_and_others_use_some() -> None:
    state, others = read_memory(), used_by_others_bytes()
    assert state is not None
    assert 0 < state.available_bytes <= state.limit_bytes
    assert others is not None
    assert 0 <= others < state.limit_bytes
