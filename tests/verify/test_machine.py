"""What `stoker verify` says about the host: each check passes, and fails where the limit is real and too small."""

from __future__ import annotations

import os
import resource
import subprocess
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from stoker.core import cgroups
from stoker.core.finding import Finding
from stoker.tasks.checks import Subject
from stoker.verify.machine import judge_cores, judge_quota
from stoker.verify.run_checks import run_checks
from tests.support.subjects import HERE, check_named, subject_of
from tests.support.tiny_training import write_config

BUDGETS = ("ram", "shared-memory", "disk", "open-files")


@pytest.fixture
def tiny(tmp_path: Path, images: Path) -> Callable[..., Subject]:
    keys = {"runs_dir": str(tmp_path / "runs"), "model": "resnet10t"}  # traced fastest
    return lambda *overrides, **fields: subject_of(write_config(tmp_path, images, **keys), *overrides, **fields)


def found(name: str, subject: Subject) -> Finding | None:
    report = run_checks([check_named(name)], subject)
    return report.results[0].finding if report.results else None


def passing(name: str, subject: Subject) -> Finding:
    outcome = found(name, subject)
    assert outcome is not None
    assert outcome.status == "passed", outcome
    return outcome


def failure(name: str, subject: Subject) -> Finding:
    outcome = found(name, subject)
    assert outcome is not None
    assert outcome.status == "failed", outcome
    assert outcome.fix
    return outcome


def test_a_small_run_fits(tiny: Callable[..., Subject]) -> None:
    subject = tiny()
    for name in BUDGETS:
        outcome = passing(name, subject)
        assert outcome.facts["needed"] < outcome.facts["limit"]
    assert found("vram", subject) is None, "without a GPU there is no VRAM"


def test_too_little_ram_fails(tiny: Callable[..., Subject]) -> None:
    outcome = failure("ram", tiny(machine=replace(HERE, ram_bytes=200_000_000)))
    assert "of RAM, the host has 200 MB" in outcome.seen


def test_too_little_shared_memory_fails(tiny: Callable[..., Subject]) -> None:
    small = replace(HERE, shm_bytes=65_536)
    outcome = failure("shared-memory", tiny("loader=process", "num_workers=2", machine=small))
    assert "/dev/shm has 65.5 kB" in outcome.seen
    assert "loader=thread" in str(outcome.fix)
    passing("shared-memory", tiny("loader=thread", "num_workers=2", machine=small))


def test_vram_is_checked_against_the_datasheet(tiny: Callable[..., Subject], tmp_path: Path) -> None:
    sheet = tmp_path / "small.yaml"
    sheet.write_text(
        "small:\n  title: a small card\n  vram_gib: 0.1\n  memory_gb_per_s: 300\n  pcie_gb_per_s: 12\n"
        "  peak_tflops: {fp32: 8, fp16: 16}\n  source: made up\n"
    )
    assert "of VRAM, the accelerator has" in failure("vram", tiny(f"accelerator={sheet}")).seen
    passing("vram", tiny("accelerator=a100-80"))


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "small"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("cannot mount a tmpfs here")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_disk_that_cannot_hold_all_checkpoints_fails(tiny: Callable[..., Subject], small_disk: Path) -> None:
    outcome = failure("disk", tiny(f"runs_dir={small_disk}/runs"))
    assert "checkpoints" in outcome.seen
    assert "1 MB are free" in outcome.seen
    assert "save_top_k=" in str(outcome.fix)


def test_a_folder_that_cannot_be_written_fails(tiny: Callable[..., Subject], small_disk: Path) -> None:
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    outcome = failure("disk", tiny(f"runs_dir={small_disk}/runs"))
    assert outcome.seen == f"{small_disk} is not writable, and runs are kept in {small_disk}/runs"


def test_too_few_open_files_fail(tiny: Callable[..., Subject]) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    subject = tiny()
    assert subject.data, "opened while there are files"
    used = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    if used > 70:
        pytest.skip(f"{used} files are open already")
    resource.setrlimit(resource.RLIMIT_NOFILE, (75, hard))
    try:
        outcome = failure("open-files", subject)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert "75 are allowed" in outcome.seen
    assert str(outcome.fix).startswith("ulimit -n ")


def test_a_process_bound_to_one_core_of_many_fails(
    tiny: Callable[..., Subject], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = os.sched_getaffinity(0)
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    os.sched_setaffinity(0, {min(before)})
    try:
        outcome = failure("cores", tiny())
    finally:
        os.sched_setaffinity(0, before)
    assert outcome.seen == "this process may run on 1 of 64 cores, for 1 rank"


@pytest.mark.parametrize(("allowed", "present", "ranks"), [(8, 64, 4), (1, 4, 1), (64, 64, 8)])
def test_a_fair_share_or_a_small_host_passes(allowed: int, present: int, ranks: int) -> None:
    assert judge_cores(allowed, present, ranks).status == "passed"


def test_a_container_with_fewer_cores_than_workers_fails(
    tiny: Callable[..., Subject], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, proc = tmp_path / "cgroup", tmp_path / "proc"
    (root / "job").mkdir(parents=True)
    (proc / "self").mkdir(parents=True)
    (proc / "self" / "cgroup").write_text("0::/job\n")
    (root / "job" / "cpu.max").write_text("150000 100000\n")
    monkeypatch.setattr(cgroups, "cpu_quota", partial(cgroups.cpu_quota, root, proc))
    outcome = failure("cpu-quota", tiny("num_workers=12"))
    assert outcome.seen.startswith("the container may use 1.5 cores, and 12 workers want to run")
    assert str(outcome.fix).startswith("num_workers=1,")
    passing("cpu-quota", tiny("num_workers=1"))
    (root / "job" / "cpu.max").write_text("max 100000\n")
    assert found("cpu-quota", tiny("num_workers=12")) is None, "no quota, nothing to check"
    assert judge_quota(0.5, workers=1, ranks=1).status == "passed", "one worker is the least"


@pytest.mark.parametrize(
    ("variables", "words", "fix"),
    [
        ({"OMP_WAIT_POLICY": "active"}, "threads spin while they wait", "unset OMP_WAIT_POLICY KMP_BLOCKTIME"),
        ({"KMP_BLOCKTIME": "infinite"}, "threads spin while they wait", "unset OMP_WAIT_POLICY KMP_BLOCKTIME"),
        ({"OMP_PROC_BIND": "true"}, "each of the 2 ranks", "unset OMP_PROC_BIND GOMP_CPU_AFFINITY"),
        ({"OMP_NUM_THREADS": "48"}, "more threads than the 1 cores", "OMP_NUM_THREADS=1"),
    ],
)
def test_variables_that_slow_threads_down_fail(
    tiny: Callable[..., Subject], monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], words: str, fix: str
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    outcome = failure("threads", tiny("devices=2"))
    assert words in outcome.seen
    assert outcome.fix == fix
    for name in variables:
        monkeypatch.delenv(name)
    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    passing("threads", tiny())


# Weights & Biases.


@pytest.fixture
def wandb_server(monkeypatch: pytest.MonkeyPatch) -> Iterator[ThreadingHTTPServer]:
    class Answers(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(404)
            self.end_headers()

        def log_message(self, *_arguments: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Answers)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    yield server
    server.shutdown()
    server.server_close()


def test_wandb_is_asked_only_if_the_config_uses_it(
    tiny: Callable[..., Subject], wandb_server: ThreadingHTTPServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert found("wandb", tiny()) is None
    assert passing("wandb", tiny("wandb=true")).seen == "reachable, with a key"
    wandb_server.shutdown()
    wandb_server.server_close()
    outcome = failure("wandb", tiny("wandb_project=mine"))
    assert "does not answer" in outcome.seen
    monkeypatch.delenv("WANDB_API_KEY")
    assert str(failure("wandb", tiny("wandb=true")).fix).startswith("wandb login")
    monkeypatch.setenv("WANDB_MODE", "offline")
    assert passing("wandb", tiny("wandb=true")).facts == {"online": False}
