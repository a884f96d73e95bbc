"""Limits that a machine or a shell sets, and names that are taken: a clear error, never a bug or an abort."""

from __future__ import annotations

import ctypes
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from stoker.cli import main
from stoker.core.errors import LEAST_ADDRESS_BYTES, as_out_of_memory
from tests.support.ready_process import ReadyProcess
from tests.support.tiny_training import last_state, write_config, write_images


@pytest.mark.parametrize("gigabytes", [1, 3])
def test_a_small_address_space_is_an_error_before_pytorch_aborts(tmp_path: Path, gigabytes: int) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "stoker", "plan", "absent.yaml"], cwd=tmp_path, capture_output=True, text=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (gigabytes * 10**9, gigabytes * 10**9)),
    )  # fmt: skip
    assert done.returncode == 1
    assert "error: address-space-limited" in done.stderr
    assert f"allows this process {gigabytes} GB of addresses" in done.stderr
    assert "hint: ulimit -v unlimited" in done.stderr


def test_memory_that_runs_out_is_told_as_such_in_the_words_of_every_library() -> None:
    for error in (
        MemoryError(), OSError(12, "Cannot allocate memory"), RuntimeError("can't start new thread"),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 80 bytes"),
        ImportError("libtorch_cpu.so: failed to map segment from shared object"),
    ):  # fmt: skip
        told = as_out_of_memory(error)
        assert told is not None, error
        assert (told.name, told.exit_code) == ("out-of-memory", 1)
    assert as_out_of_memory(RuntimeError("shapes do not match")) is None
    assert as_out_of_memory(ValueError("can't allocate memory")) is None
    assert LEAST_ADDRESS_BYTES > 3e9


def have_little_shared_memory() -> None:
    """Gives this process a /dev/shm of its own."""
    new_mounts = 0x20000  # CLONE_NEWNS
    if ctypes.CDLL(None, use_errno=True).unshare(new_mounts) != 0:
        sys.exit("unshare failed")
    subprocess.run(["mount", "--make-rprivate", "/"], check=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "none", "/dev/shm"], check=True)


def test_a_full_shared_memory_and_a_pipe_for_a_checkpoint_are_clear_errors(ready: ReadyProcess, tmp_path: Path) -> None:
    images = write_images(tmp_path / "data", train=8, val=2)
    config = write_config(tmp_path, images, epochs=1)
    checkpoints = tmp_path / "runs" / "tiny" / "checkpoints"
    assert ready.run("train", config, cwd=tmp_path).code == 0
    # The pipe is passed over; the best checkpoint takes its place.
    (checkpoints / "last.ckpt").unlink()
    os.mkfifo(checkpoints / "last.ckpt")
    resumed = ready.run("train", config, "epochs=2", "--replan", cwd=tmp_path)
    assert resumed.code == 0, resumed.err
    assert "last.ckpt cannot be read: it is not a regular file" in resumed.err
    assert last_state(tmp_path / "runs" / "tiny")["progress"]["epoch"] == 2
    os.mkfifo(tmp_path / "a.ckpt")
    ended = ready.run("eval", tmp_path / "a.ckpt", cwd=tmp_path)
    assert ended.code == 1, ended.err
    assert "it is not a regular file" in ended.err
    words = ("train", config, "loader=process", "num_workers=2", "run_name=shm", "--force")
    done = ready.run(*words, cwd=tmp_path, before=f"{__name__}:have_little_shared_memory")
    if "mount" in done.err or "unshare" in done.err:
        pytest.skip("mounting a small file system is not permitted here")
    assert done.code == 1, done.err
    assert "error: shm-full" in done.err
    assert "loader=thread" in done.err
    assert not (tmp_path / "runs" / "shm").exists()


def test_a_file_in_place_of_the_logs_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = write_config(tmp_path, write_images(tmp_path / "data", train=2, val=1), runs_dir=str(tmp_path / "runs"))
    (tmp_path / "runs" / "tiny").mkdir(parents=True)
    (tmp_path / "runs" / "tiny" / "logs").touch()
    assert main(["train", str(config)]) == 1
    assert "error: run-folder-odd" in capsys.readouterr().err
