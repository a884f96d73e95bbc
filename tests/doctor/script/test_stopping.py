"""A script is stopped after the requested steps or seconds, or by a signal, which it may handle; however it ends, it
keeps its output and exit code, and what was recorded so far is there."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from tests.doctor.script.conftest import SCRIPTS, attached
from tests.support.waiting import DEADLINE_S, wait_until


def test_after_the_requested_steps_the_script_and_its_workers_are_ended() -> None:
    result = attached("plain.py", "--workers", "1", "--samples", "4000", "--epochs", "100", steps=12)
    assert result.stopped
    assert result.exit_code == 0
    assert result.observed.steps == 11  # the first of the epoch is not included
    assert any("stopped" in note for note in result.notes)


def test_after_the_requested_seconds_too() -> None:
    result = attached("plain.py", "--workers", "0", "--samples", "4000", "--epochs", "100", seconds=0.5)
    assert result.stopped
    assert 0 < result.observed.steps < 100 * 1000


def test_a_signal_to_the_doctor_reaches_the_script_which_ends_in_its_own_way(tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    program = (
        "# warm\nimport sys; from stoker.doctor.script.run_script import run_attached; r = run_attached(sys.argv[1:]);"
        "print('doctor saw', r.exit_code, r.observed.steps >= 3)"
    )
    command = [sys.executable, str(SCRIPTS / "endings.py"), "--catch", "--ready-file", str(ready)]
    doctor = subprocess.Popen(
        [sys.executable, "-c", program, *command], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    wait_until(ready.exists)
    os.kill(doctor.pid, signal.SIGTERM)
    out, _ = doctor.communicate(timeout=DEADLINE_S)
    assert out.splitlines() == ["ended by SIGTERM after a checkpoint", "doctor saw 5 True"]
    assert doctor.returncode == 0


IN_A_TERMINAL = """# warm
import os, sys
os.close(os.open(os.ttyname(0), os.O_RDWR))  # as the first of its session, it gets the terminal's signals
from stoker.cli import main
sys.exit(main(sys.argv[1:]))
"""


def test_ctrl_c_in_a_terminal_reaches_the_script_once_and_the_report_follows(tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    script = [sys.executable, str(SCRIPTS / "endings.py"), "--catch-interrupt", "--ready-file", str(ready)]
    ours, theirs = pty.openpty()
    doctor = subprocess.Popen(
        [sys.executable, "-c", IN_A_TERMINAL, "doctor", "--", *script],
        stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True,
    )  # fmt: skip
    os.close(theirs)
    wait_until(ready.exists)
    os.write(ours, b"\x03")
    text = ""
    with suppress(OSError), os.fdopen(ours, "rb", 0) as screen:  # Linux reports a closed terminal as an error
        while data := screen.read(65_536):
            text += data.decode()
    doctor.wait(DEADLINE_S)
    assert text.count("interrupted") == 1
    # It got the time that it needs, and was not interrupted a second time.
    assert "saved after the interrupt" in text
    assert text.index("saved after the interrupt") < text.index("verdict: ")
    assert doctor.returncode == 6


def test_a_crash_keeps_its_traceback_its_code_and_the_records_so_far(capfd: pytest.CaptureFixture[str]) -> None:
    result = attached("plain.py", "--workers", "1", "--fail-at", "5")
    err = capfd.readouterr().err
    assert result.exit_code == 1
    assert err.endswith("ValueError: the script's own mistake\n")
    # No stack frame of ours; the checkout itself may be in a folder of that name.
    assert "stoker/doctor/script" not in err
    assert "stoker/attach" not in err
    assert "stoker." not in err
    assert result.observed.steps == 4


def test_a_script_killed_by_a_signal_exits_with_128_plus_its_number() -> None:
    result = attached("endings.py", "--kill-self-at", "6")
    assert result.exit_code == 128 + signal.SIGKILL
    assert result.observed.steps == 5


def test_a_worker_that_the_kernel_kills_is_named() -> None:
    result = attached("endings.py", "--killed-worker")
    assert result.exit_code == 1
    assert "worker 0 of a loader was killed by SIGKILL: the kernel does this when memory runs out" in result.notes
    assert result.observed is not None
