"""However the script ends, it keeps its output and exit code, and what was recorded so far is there."""

from __future__ import annotations

import signal

import pytest

from tests.doctor.script.conftest import Attached


def test_a_crash_keeps_its_traceback_its_code_and_the_records_so_far(
    attached: Attached, capfd: pytest.CaptureFixture[str]
) -> None:
    result = attached("plain.py", "--workers", "1", "--fail-at", "5")
    err = capfd.readouterr().err
    assert result.exit_code == 1
    assert err.endswith("ValueError: the script's own mistake\n")
    # No stack frame of ours; the checkout itself may be in a folder of that name.
    assert "stoker/doctor/script" not in err
    assert "stoker/attach" not in err
    assert "stoker." not in err
    assert result.observed is not None
    assert result.observed.steps == 4


def test_a_script_killed_by_a_signal_exits_with_128_plus_its_number(attached: Attached) -> None:
    result = attached("endings.py", "--kill-self-at", "6")
    assert result.exit_code == 128 + signal.SIGKILL
    assert result.observed is not None
    assert result.observed.steps == 5


def test_a_worker_that_the_kernel_kills_is_named(attached: Attached) -> None:
    result = attached("endings.py", "--killed-worker")
    assert result.exit_code == 1
    assert "worker 0 of a loader was killed by SIGKILL: the kernel does this when memory runs out" in result.notes
    assert result.observed is not None
