"""Measured memory of processes, and what is left before the kernel kills one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from stoker.profile.memory import read_memory, tree_memory, tree_pids, used_by_others_bytes

MEGABYTE = 1_000_000
GIGABYTE = 1_000_000_000


def test_a_child_process_counts_with_its_parent() -> None:
    program = "held = bytearray(b'x') * 50_000_000; print('ready', flush=True); input()"
    # A process of its own as the parent: what this one shares with others of the suite comes and goes with them.
    parent = ["sh", "-c", '"$0" -c "$1"; exit 3', sys.executable, program]
    with subprocess.Popen(parent, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as shell:
        shell.stdout.readline()
        alone, child = tree_pids(shell.pid)
        assert alone == shell.pid
        assert tree_memory(shell.pid).anonymous_bytes > 50 * MEGABYTE
        assert tree_memory(shell.pid).anonymous_bytes >= tree_memory(child).anonymous_bytes
        assert {shell.pid, child} <= set(tree_pids(os.getpid()))
        shell.stdin.close()
    assert not {shell.pid, child} & set(tree_pids(os.getpid()))


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
    assert (state.available_bytes, state.limit_bytes) == (50_000_000 * 1024, 62_000_000 * 1024)
    assert state.stalled is None
    assert read_memory(tmp_path, tmp_path) is None, "without figures"
    here, others = read_memory(), used_by_others_bytes()
    assert 0 < here.available_bytes <= here.limit_bytes
    assert 0 <= others < here.limit_bytes


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
    assert (state.available_bytes, state.limit_bytes) == (2 * GIGABYTE + 7, 4 * GIGABYTE)
