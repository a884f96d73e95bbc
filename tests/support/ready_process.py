"""Real `stoker` processes without the startup time: one process imports everything, and each run is a fork of it.

A fork has its own signals, exit code, working folder, environment and output, as if a user had started it; the ten
seconds of imports are paid only once.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.support.waiting import wait_until

PROJECT = Path(__file__).parents[2]
SERVER = """
import atexit, ctypes, json, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # no orphan of a test that was killed
import stoker.cli, stoker.commands.train, stoker.plan.planning, stoker.tasks.training, stoker.verify.running
import matplotlib.pyplot  # looks for the fonts of this machine, in every new home
from importlib import import_module

def run(wish):
    os.setsid()
    for name, descriptor in (("out", 1), ("err", 2)):
        os.dup2(os.open(wish[name], os.O_WRONLY | os.O_CREAT | os.O_TRUNC), descriptor)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    if wish["pinned"]:
        # One thread: two that wait for each other on cores that are busy are a hundred times slower.
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[os.getpid() % len(cores)]})
    os.chdir(wish["cwd"])
    os.environ.clear()
    os.environ.update(wish["environment"])
    sys.argv = ["stoker", *wish["arguments"]]
    if wish["before"]:
        module, function = wish["before"].split(":")
        getattr(import_module(module), function)()
    from stoker.cli import main
    return main(wish["arguments"])

print("ready", flush=True)
for line in sys.stdin:
    wish = json.loads(line)
    if "wait" in wish:
        found, status = os.waitpid(wish["wait"], os.WNOHANG)
        print(json.dumps(os.waitstatus_to_exitcode(status) if found else None), flush=True)
        continue
    child = os.fork()
    if child == 0:
        code = 3
        try:
            code = run(wish)
            atexit._run_exitfuncs()
        except BaseException:
            import traceback
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    print(child, flush=True)
"""


@dataclass
class Started:
    """A process that may still be running."""

    pid: int
    out_file: Path
    err_file: Path
    _ask: Callable[[dict[str, Any]], Any] = field(repr=False)
    code: int | None = None

    @property
    def out(self) -> str:
        return self.out_file.read_text()

    @property
    def err(self) -> str:
        return self.err_file.read_text() if self.err_file.exists() else ""  # the fork may not have got that far

    def poll(self) -> int | None:
        if self.code is None:
            self.code = self._ask({"wait": self.pid})
        return self.code

    def send(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def wait(self) -> int:
        """Its exit code; negative where a signal ended it."""
        wait_until(lambda: self.poll() is not None, lambda: f"still running\n{self.err}")
        assert self.code is not None
        return self.code

    def wait_for(self, condition: Callable[[], bool]) -> None:
        """Returns when the condition holds; fails where the process ends before."""
        wait_until(lambda: condition() or self.poll() is not None, lambda: self.err)
        assert self.code is None or condition(), f"ended with {self.code}\n{self.err}"


class ReadyProcess:
    """Starts forks of a process that has imported everything."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._count = 0
        self._started: list[Started] = []
        path = os.pathsep.join(filter(None, [str(PROJECT), os.environ.get("PYTHONPATH")]))
        self._server = subprocess.Popen(
            [sys.executable, "-c", SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env=os.environ | {"PYTHONPATH": path},
        )  # fmt: skip
        assert self._server.stdout is not None
        assert self._server.stdout.readline() == "ready\n"

    def start(
        self, *arguments: str | Path, cwd: Path, before: str = "", pinned: bool = True, **variables: str
    ) -> Started:
        """Starts `stoker` with these arguments, on one core or on all; `before` names a function (module:name) to be
        called in it first."""
        self._count += 1
        out, err = (self._folder / f"{self._count}.{kind}" for kind in ("out", "err"))
        home = self._folder / "home"
        home.mkdir(exist_ok=True)
        environment = os.environ | {"HOME": str(home), "COLUMNS": "100", "PYTHONUNBUFFERED": "1"} | variables
        wish = {
            "arguments": [str(word) for word in arguments], "cwd": str(cwd), "out": str(out), "err": str(err),
            "environment": environment, "before": before, "pinned": pinned,
        }  # fmt: skip
        started = Started(self._ask(wish), out, err, self._ask)
        self._started.append(started)
        return started

    def run(self, *arguments: str | Path, cwd: Path, before: str = "", **variables: str) -> Started:
        """Like `start`, but waits until the process has ended."""
        started = self.start(*arguments, cwd=cwd, before=before, **variables)
        started.wait()
        return started

    def close(self) -> None:
        for started in self._started:
            if started.poll() is None:
                started.send(signal.SIGKILL)
        assert self._server.stdin is not None
        self._server.stdin.close()
        self._server.wait()
        assert self._server.stdout is not None
        self._server.stdout.close()

    def _ask(self, wish: dict[str, Any]) -> Any:
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._server.stdin.write(json.dumps(wish) + "\n")
        self._server.stdin.flush()
        return json.loads(self._server.stdout.readline())


@contextmanager
def ready_process(folder: Path) -> Iterator[ReadyProcess]:
    ready = ReadyProcess(folder)
    try:
        yield ready
    finally:
        ready.close()
