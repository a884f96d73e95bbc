"""The launcher: one process per device; it ends when they do."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from stoker.core.errors import UserError
from stoker.train.launch import launch
from tests.support.waiting import DEADLINE_S, processes_with, wait_until

# A rank that reports its rank, then does what its argument says: exit with a code or wait for a signal.
RANK = """
import json, os, signal, sys, time
from pathlib import Path
def leave(number, frame):
    sys.exit({signal.SIGTERM: 143, signal.SIGINT: 130, signal.SIGUSR1: 143}[number])
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
    signal.signal(number, leave)
signal.pthread_sigmask(signal.SIG_UNBLOCK, signal.valid_signals())  # held back until somebody listens
folder = Path(sys.argv[1])
names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
told = {name: os.environ[name] for name in names}
file = folder / f"rank{told['RANK']}.json"
file.with_suffix(".tmp").write_text(json.dumps(told | {"pid": os.getpid()}))
file.with_suffix(".tmp").rename(file)
code = sys.argv[2 + int(told["LOCAL_RANK"])]
if code == "wait":
    time.sleep(600)
sys.exit(int(code))
"""
LAUNCHER = (
    "import sys\nfrom stoker.train.launch import launch\n"
    "sys.exit(launch(['-c', sys.argv[1], *sys.argv[2:]], len(sys.argv) - 3, 1))\n"
)


def told_by(folder: Path) -> list[dict[str, str]]:
    return [json.loads(file.read_text()) for file in sorted(folder.glob("rank*.json"))]


@contextmanager
def launcher(folder: Path, *codes: str) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", LAUNCHER, RANK, str(folder), *codes])
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def test_every_rank_knows_its_rank_and_world_size(tmp_path: Path) -> None:
    environment = dict(os.environ) | {
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "12399", "NODE_RANK": "1", "WORLD_SIZE": "2",
    }  # fmt: skip
    assert launch(["-c", RANK, str(tmp_path), "0", "0"], 2, 2, environment) == 0
    assert [{name: value for name, value in told.items() if name != "pid"} for told in told_by(tmp_path)] == [
        {"RANK": rank, "LOCAL_RANK": local, "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1",
         "MASTER_PORT": "12399"}
        for rank, local in (("2", "0"), ("3", "1"))
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("variables", "name", "word"),
    [
        ({"NODE_RANK": "0"}, "no-master-address", "MASTER_ADDR is not set"),
        ({"MASTER_ADDR": "a"}, "no-node-rank", "NODE_RANK is not set, with num_nodes: 2"),
        ({"MASTER_ADDR": "a", "NODE_RANK": "2"}, "no-node-rank", "NODE_RANK is 2, with num_nodes: 2"),
    ],
)
def test_missing_node_settings_are_named(variables: dict[str, str], name: str, word: str) -> None:
    with pytest.raises(UserError, match=word) as caught:
        launch(["-c", "raise SystemExit(9)"], 1, 2, variables)
    assert caught.value.name == name


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGUSR1, 143)])
def test_signals_are_passed_on_once(tmp_path: Path, number: signal.Signals, code: int) -> None:
    with launcher(tmp_path, "wait", "wait") as process:
        wait_until(lambda: len(told_by(tmp_path)) == 2)
        process.send_signal(number)
        assert process.wait(DEADLINE_S) == code
    assert processes_with(str(tmp_path)) == []


@pytest.mark.parametrize(("codes", "code"), [(("2", "wait"), 2), (("0", "5"), 5)])
def test_the_launcher_exits_with_the_code_of_the_first_failure(
    tmp_path: Path, codes: tuple[str, ...], code: int
) -> None:
    with launcher(tmp_path, *codes) as process:
        assert process.wait(DEADLINE_S) == code
    assert processes_with(str(tmp_path)) == []


def test_a_rank_that_was_killed_takes_the_others_with_it(tmp_path: Path) -> None:
    with launcher(tmp_path, "wait", "wait") as process:
        wait_until(lambda: len(told_by(tmp_path)) == 2)
        os.kill(int(told_by(tmp_path)[1]["pid"]), signal.SIGKILL)
        assert process.wait(DEADLINE_S) == 128 + signal.SIGKILL
    assert processes_with(str(tmp_path)) == []


def test_a_launcher_that_was_killed_leaves_no_orphans(tmp_path: Path) -> None:
    with launcher(tmp_path, "wait", "wait") as process:
        wait_until(lambda: len(told_by(tmp_path)) == 2)
        process.kill()
        process.wait()
        wait_until(lambda: processes_with(str(tmp_path)) == [])
