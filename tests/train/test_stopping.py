"""A signal requests a stop; the loop acts on it after the step."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from stoker.core.errors import Interrupted, Preempted
from stoker.io import outage
from stoker.train.launch import LeaveWait, StopRequest
from tests.support.waiting import DEADLINE_S


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR2, signal.SIGHUP])
def test_a_preemption_notice_ends_the_run_as_preempted(number: signal.Signals) -> None:
    stop = StopRequest()
    before = signal.getsignal(number)
    with stop.listening():
        assert not stop.wanted
        os.kill(os.getpid(), number)
        assert stop.wanted
    assert signal.getsignal(number) == before
    ending = stop.ending(7, interrupted=stop.interrupted, saved=True)
    assert isinstance(ending, Preempted)
    assert (ending.exit_code, ending.seen) == (143, f"{number.name}: saved at step 7")


def test_ctrl_c_saves_and_a_second_one_exits_at_once() -> None:
    stop = StopRequest()
    with stop.listening():
        os.kill(os.getpid(), signal.SIGINT)
        ending = stop.ending(7, interrupted=stop.interrupted, saved=True)
        assert isinstance(ending, Interrupted)
        assert ending.exit_code == 130
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


def test_a_wait_for_data_that_does_not_end_is_left_after_a_notice() -> None:
    def batches() -> Iterator[int]:
        yield 1
        threading.Event().wait(DEADLINE_S)

    stop = StopRequest()
    try:
        with stop.listening():
            waited = stop.unless_leaving(batches())
            assert next(waited) == 1
            threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
            with pytest.raises(LeaveWait):
                next(waited)
            assert stop.interrupted
    finally:
        outage._leaving.clear()


def test_a_failed_save_is_not_reported_as_saved() -> None:
    ending = StopRequest().ending(7, interrupted=False, saved=False)
    assert ending.seen == "another rank's signal: stopped at step 7, which could not be saved"


def test_nohup_ignores_the_end_of_the_terminal() -> None:
    program = (
        "import os, signal\nfrom stoker.train.launch import StopRequest\nstop = StopRequest()\n"
        "with stop.listening():\n    os.kill(os.getpid(), signal.SIGHUP)\n    print(stop.wanted)\n"
    )
    done = subprocess.run(["nohup", sys.executable, "-c", program], capture_output=True, text=True, timeout=DEADLINE_S)
    assert done.stdout == "False\n", done.stderr
