"""Tests see the same environment however they are started: by nohup, by a scheduler, with a user's settings."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.conftest import PROJECT

SIGNALS = (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGTERM)
SETTINGS = {
    "RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "nowhere.invalid", "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "3", "OMP_NUM_THREADS": "7", "WANDB_MODE": "online", "AWS_PROFILE": "work",
    "STOKER_LIBTURBOJPEG": "/nowhere", "HTTP_PROXY": "http://127.0.0.1:9", "https_proxy": "http://127.0.0.1:9",
    "XDG_CACHE_HOME": "/nowhere", "XDG_STATE_HOME": "/nowhere", "PYTHONPATH": "/nowhere", "PYTHONWARNINGS": "error",
    "LC_ALL": "de_DE.ISO-8859-1", "COLUMNS": "20", "NO_COLOR": "1", "FORCE_COLOR": "1",
}  # fmt: skip
"""What a user, a scheduler or a CI runner may have set."""


def test_signals_do_what_they_do_in_a_terminal() -> None:
    program = (
        "import signal, sys\nfor number in sys.argv[1:]: print(signal.getsignal(int(number)) != signal.SIG_IGN)\n"
        "print(signal.pthread_sigmask(signal.SIG_BLOCK, []))"
    )
    done = subprocess.run([sys.executable, "-c", program, *map(str, map(int, SIGNALS))], capture_output=True, text=True)
    assert done.stdout.splitlines() == ["True"] * len(SIGNALS) + ["set()"]
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)


def test_settings_of_the_user_are_removed() -> None:
    assert SETTINGS.keys() & os.environ.keys() == set()
    assert time.tzname == ("UTC", "UTC")


def test_the_home_is_temporary_and_files_are_utf_8_and_world_readable() -> None:
    file = Path.home() / "file"
    file.write_text("ü")
    assert file.read_bytes() == b"\xc3\xbc"
    assert file.stat().st_mode & 0o777 == 0o644


def test_the_end_of_the_terminal_does_not_end_tests_that_nohup_started() -> None:
    program = (
        "import os, signal\nsignal.signal(signal.SIGHUP, signal.SIG_IGN)\n"
        "from tests.support.isolation import isolate\nisolate()\nos.kill(os.getpid(), signal.SIGHUP)\nprint('goes on')"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=PROJECT, capture_output=True, text=True)
    assert done.stdout == "goes on\n", done.stderr


def as_a_background_job() -> None:
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
    os.umask(0o077)


@pytest.mark.parametrize(
    "workers", [pytest.param("0", marks=pytest.mark.release), "1"], ids=["in one process", "in a worker"]
)
def test_all_this_holds_however_they_are_started(workers: str) -> None:
    tests = [Path(__file__), PROJECT / "tests/test_cli.py"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-n", workers, "-p", "no:cacheprovider", *map(str, tests),
         "-k", "(test_isolation and not however) or ctrl_c"],
        cwd="/", env=os.environ | SETTINGS | {"HOME": "/nowhere", "TZ": "Asia/Kathmandu"},
        preexec_fn=as_a_background_job, capture_output=True, text=True,
    )  # fmt: skip
    assert "5 passed" in done.stdout, done.stdout + done.stderr
