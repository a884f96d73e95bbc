"""Throw-away processes: real ones, with real crashes and signals."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest

from stoker.core.child import Child, ChildDied, ChildFailed, ChildTooSlow, Parent, call, share_out
from stoker.core.errors import ConfigError, UserError, config_problem
from tests.conftest import PROJECT
from tests.support.waiting import DEADLINE_S, is_running, wait_until


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets a fresh interpreter import the functions below."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(PROJECT), os.environ.get("PYTHONPATH")])))


def echo(argument: Any, parent: Parent) -> Any:
    for number in range(3):
        parent.send({"done": number, "of": b"three"})
    print("this must not be seen")
    return argument


def test_a_result_and_messages_come_back_and_stdout_does_not(capfd: pytest.CaptureFixture[str]) -> None:
    told: list[Any] = []
    argument = {"text": "ä\udcff", "data": [b"\x00\xff", {"more": b""}], "none": None, "number": 1.5}
    assert call(echo, argument, on_message=told.append) == argument
    assert told == [{"done": number, "of": b"three"} for number in range(3)]
    assert capfd.readouterr() == ("", "")


def test_a_hundred_megabytes_in_both_directions_do_not_block() -> None:
    blobs = [bytes([number]) * 25_000_000 for number in range(4)]
    assert call(echo, blobs, timeout_s=DEADLINE_S) == blobs


def complain(argument: Any, parent: Parent) -> None:
    for number in range(20_000):
        sys.stderr.write(f"line {number}\n")
    if argument:
        os.kill(os.getpid(), argument)
    raise SystemExit(3)


def test_a_crash_names_its_signal_and_the_last_lines_of_stderr() -> None:
    with pytest.raises(ChildDied, match=r"was killed by signal 11 \(SIGSEGV\)") as died:
        call(complain, int(signal.SIGSEGV))
    assert died.value.exit_code == -signal.SIGSEGV
    assert died.value.last_lines[-1] == "line 19999"
    with pytest.raises(ChildDied, match="exited with code 3"):
        call(complain)


def refuse(argument: Any, parent: Parent) -> None:
    if argument == "user":
        raise UserError("no-such-thing", "there is none", why="it was never there", hint="make one")
    if argument == "config":
        raise ConfigError(
            "two problems", [config_problem(("lr",), "too small", "a.yaml:3", "lr=1")], name="odd", hint="look"
        )
    if argument == "unsendable":
        parent.send(object())
    raise ConnectionError("of the function, not of the channel")


def test_an_error_for_the_user_arrives_as_the_same_error() -> None:
    with pytest.raises(UserError) as caught:
        call(refuse, "user")
    error = caught.value
    assert (error.name, error.seen, error.why, error.hint) == (
        "no-such-thing", "there is none", "it was never there", "make one",
    )  # fmt: skip
    with pytest.raises(ConfigError) as wrong:
        call(refuse, "config")
    assert wrong.value.problems == (config_problem(("lr",), "too small", "a.yaml:3", "lr=1"),)
    assert (wrong.value.name, wrong.value.exit_code, wrong.value.hint) == ("odd", 2, "look")


def test_any_other_error_arrives_with_its_traceback() -> None:
    with pytest.raises(ChildFailed, match="ConnectionError: of the function") as failed:
        call(refuse, "bug")
    assert "in refuse" in str(failed.value)
    with pytest.raises(ChildFailed, match="a object is not plain data"):
        call(refuse, "unsendable")


def sleep_with_others(folder: str | None, parent: Parent) -> None:
    """Starts processes that outlive it, reports that, and sleeps in a temporary folder."""
    other = subprocess.Popen(["sleep", "600"], start_new_session=folder is None)
    if folder is None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with tempfile.TemporaryDirectory(dir=folder):
        parent.send([os.getpid(), other.pid])
        time.sleep(600)


def test_a_child_that_takes_too_long_ends_with_all_its_descendants(monkeypatch: pytest.MonkeyPatch) -> None:
    pids: list[int] = []
    clock = time.monotonic

    def hear(found: list[int]) -> None:
        # Once it is at work its time is nearly up: a busy machine may take long to get there.
        pids.extend(found)
        monkeypatch.setattr(time, "monotonic", lambda: clock() + DEADLINE_S - 0.5)

    with pytest.raises(ChildTooSlow, match=f"no result after {DEADLINE_S:g} s"):
        call(sleep_with_others, on_message=hear, timeout_s=DEADLINE_S)
    assert len(pids) == 2
    wait_until(lambda: not any(map(is_running, pids)))


PROGRAM = """# warm
from tests.core.test_child import *
call(sleep_with_others, sys.argv[1], on_message=lambda pids: print(*pids, flush=True))
"""


@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_however_the_parent_ends_nothing_is_left(ending: signal.Signals, tmp_path: Path) -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(tmp_path)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    pids = [int(word) for word in parent.stdout.readline().split()]
    assert all(map(is_running, pids))
    assert list(tmp_path.iterdir())
    parent.send_signal(ending)
    parent.communicate(timeout=DEADLINE_S)
    wait_until(lambda: not any(map(is_running, pids)))
    assert not list(tmp_path.iterdir()), "it had the time to clean up"


def add_up(start: int, parent: Parent) -> int:
    for number in parent.messages():
        if number < 0:
            raise UserError("negative", f"{number} is negative")
        start += number
    return start


def test_a_child_receives_messages_until_it_is_told_to_finish() -> None:
    with Child(add_up, 5) as child:
        for number in range(10_000):
            child.send(number)
        child.finish()
        assert child.wait() == 5 + sum(range(10_000))


def test_sending_to_a_child_that_is_gone_says_so() -> None:
    with Child(add_up, 5) as child:
        child.send(-1)
        with pytest.raises(ChildDied, match="exited with code 0"):
            while True:
                child.send(1)
        with pytest.raises(UserError, match="-1 is negative"):
            child.wait()


def double_or_die(factor: int, parent: Parent) -> None:
    for task in parent.messages():
        if task == 13:
            os.kill(os.getpid(), signal.SIGKILL)
        if task == 99:
            raise ValueError("no such number")
        parent.send(os.getpid() if task == 50 else task)
        if task == 50:
            time.sleep(600)
        parent.answer(factor * task)


def share(tasks: list[int]) -> tuple[list[int], list[int]]:
    told: list[int] = []
    answers: list[int] = []
    share_out(double_or_die, 2, tasks, workers=2, on_message=told.append, on_answer=answers.append)
    return told, answers


def test_tasks_are_distributed_among_workers_and_one_that_fails_or_dies_says_why() -> None:
    told, answers = share([1, 2, 3, 4, 5])
    assert sorted(told) == [1, 2, 3, 4, 5]
    assert sorted(answers) == [2, 4, 6, 8, 10]
    assert share([]) == ([], [])
    with pytest.raises(ChildDied) as died:
        share([1, 2, 13, 3])
    assert (died.value.task, died.value.exit_code) == (13, -signal.SIGKILL)
    with pytest.raises(ChildFailed, match="no such number"):
        share([1, 99])
    with pytest.raises(UserError, match="there is none"):  # before its first task
        share_out(refuse, "user", [b"x" * 1_000_000] * 3, workers=2, on_message=print, on_answer=print)


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_no_worker_is_left_when_the_caller_stops(error: type[BaseException]) -> None:
    pids: list[int] = []

    def stop_at_the_second(pid: int) -> None:
        pids.append(pid)
        if len(pids) == 2:
            raise error

    with pytest.raises(error):
        share_out(double_or_die, 2, [50, 50, 50], workers=2, on_message=stop_at_the_second, on_answer=pids.append)
    assert not any(map(is_running, pids))


def test_workers_in_the_middle_of_a_task_end_with_a_parent_that_was_killed() -> None:
    program = "# warm\nfrom tests.core.test_child import *\nsay = lambda pid: print(pid, flush=True)\n"
    program += "share_out(double_or_die, 2, [50, 50], workers=2, on_message=say, on_answer=say)"
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    pids = [int(parent.stdout.readline()) for _ in range(2)]
    assert all(map(is_running, pids))
    parent.kill()
    parent.communicate()
    wait_until(lambda: not any(map(is_running, pids)))
