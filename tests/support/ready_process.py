"""Real `stoker` processes, warm (tests/support/warm_start.py): with their own signals, exit code, folder and output, as
if a user had started them, but without the seconds of imports."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

from tests.support.waiting import wait_until

PROJECT = Path(__file__).parents[2]


@dataclass
class Started:
    """A process that may still be running."""

    process: subprocess.Popen[bytes]
    out_file: Path
    err_file: Path

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def code(self) -> int | None:
        """Its exit code if it has ended; negative where a signal ended it."""
        return self.process.returncode

    @property
    def out(self) -> str:
        return self.out_file.read_text()

    @property
    def err(self) -> str:
        return self.err_file.read_text()

    def poll(self) -> int | None:
        return self.process.poll()

    def send(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def wait(self) -> int:
        """Its exit code."""
        wait_until(lambda: self.poll() is not None, lambda: f"still running\n{self.err}")
        assert self.code is not None
        return self.code

    def wait_for(self, condition: Callable[[], bool]) -> None:
        """Returns when the condition holds; fails where the process ends before."""
        wait_until(lambda: condition() or self.poll() is not None, lambda: self.err)
        assert self.code is None or condition(), f"ended with {self.code}\n{self.err}"


class ReadyProcess:
    """Starts `stoker` and keeps what it prints."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._started: list[Started] = []

    def start(
        self, *arguments: str | Path, cwd: Path, before: str = "", pinned: bool = True, **variables: str
    ) -> Started:
        """Starts `stoker` with these arguments, on one core or on all; `before` names a function (module:name) to be
        called in it first."""
        number = len(self._started) + 1
        out, err = (self._folder / f"{number}.{kind}" for kind in ("out", "err"))
        home = self._folder / "home"
        home.mkdir(exist_ok=True)
        environment = os.environ | {"HOME": str(home), "COLUMNS": "100", "PYTHONUNBUFFERED": "1"} | variables
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [environment.get("PYTHONPATH"), str(PROJECT)]))
        settings = f"{'pinned' if pinned else 'free'},{before}"
        with out.open("wb") as out_stream, err.open("wb") as err_stream:
            process = subprocess.Popen(
                [sys.executable, "-m", "tests.support.ready_process", settings, *map(str, arguments)], cwd=cwd,
                env=environment, stdin=subprocess.DEVNULL, stdout=out_stream, stderr=err_stream, start_new_session=True,
            )  # fmt: skip
        self._started.append(Started(process, out, err))
        return self._started[-1]

    def run(self, *arguments: str | Path, cwd: Path, before: str = "", **options: str | bool) -> Started:
        """Like `start`, but waits until the process has ended."""
        started = self.start(*arguments, cwd=cwd, before=before, **options)  # type: ignore[arg-type]
        started.wait()
        return started

    def close(self) -> None:
        for started in self._started:
            if started.poll() is None:
                started.send(signal.SIGKILL)
                started.wait()


@contextmanager
def ready_process(folder: Path) -> Iterator[ReadyProcess]:
    ready = ReadyProcess(folder)
    try:
        yield ready
    finally:
        ready.close()


def main() -> int:
    """`stoker` with the arguments that follow the first one."""
    pinned, _, before = sys.argv[1].partition(",")
    if pinned == "pinned":
        # One thread: two that wait for each other on cores that are busy are a hundred times slower.
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[os.getpid() % len(cores)]})
    sys.argv = ["stoker", *sys.argv[2:]]
    if before:
        module, _, function = before.partition(":")
        getattr(import_module(module), function)()
    from stoker.cli import main as stoker

    return stoker(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
