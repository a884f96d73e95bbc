"""Fixtures for all tests, which run the real program as a user would."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support.ready_process import ReadyProcess, ready_process
from tests.support.waiting import DEADLINE_S
from tests.support.warm_start import cold, start_warm

PROJECT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Ended:
    """The result of a finished program."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


Run = Callable[..., Ended]
start_warm()


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Keeps the garbage collector out of collecting the tests (5 s of its 9 s of CPU, in every test process), and the
    collected tests out of later garbage collections (half a second each)."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_unconfigure() -> None:
    gc.unfreeze()  # otherwise nanobind reports triton's objects as leaked


@pytest.fixture(scope="session")
def ready(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ReadyProcess]:
    """Starts real `stoker` processes."""
    with ready_process(tmp_path_factory.mktemp("ready")) as process:
        yield process


@pytest.fixture
def stoker(tmp_path: Path, ready: ReadyProcess) -> Run:
    """Runs `stoker` in a separate process, in an empty folder, without the user's environment. Its imports are done
    already; where they matter, use `new_stoker`."""

    def run(*arguments: str | Path, cwd: Path | None = None, **variables: str) -> Ended:
        started = ready.run(*arguments, cwd=cwd or tmp_path, pinned=False, **_home_in(tmp_path) | variables)
        assert started.code is not None
        return Ended(started.code, started.out, started.err)

    return run


@pytest.fixture
def new_stoker(tmp_path: Path) -> Run:
    """Like `stoker`, but in a new interpreter."""

    def run(*arguments: str | Path, cwd: Path | None = None, **variables: str) -> Ended:
        with cold():
            done = subprocess.run(
                [sys.executable, "-m", "stoker", *map(str, arguments)],
                cwd=cwd or tmp_path, env=os.environ | _home_in(tmp_path) | variables, capture_output=True, text=True,
                timeout=DEADLINE_S,
            )  # fmt: skip
        return Ended(done.returncode, done.stdout, done.stderr)

    return run


def _home_in(folder: Path) -> dict[str, str]:
    home = folder / "home"
    home.mkdir(exist_ok=True)
    return {"HOME": str(home), "XDG_STATE_HOME": str(home / "state"), "COLUMNS": "100"}


@pytest.fixture
def yaml_file(tmp_path: Path) -> Callable[[str], Path]:
    """Writes a config file."""

    def write(text: str, name: str = "config.yaml") -> Path:
        path = tmp_path / name
        path.write_text(text)
        return path

    return write


@pytest.fixture
def disk_of(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """Mounts a file system of the size that is asked for."""
    disk = tmp_path / "disk"
    disk.mkdir()

    def mount(size: str) -> Path:
        if subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "none", disk], capture_output=True).returncode:
            pytest.skip("mounting a small file system is not permitted here")
        return disk

    yield mount
    if disk.is_mount():
        subprocess.run(["umount", disk], check=True)


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that every user may enter; pytest's temporary folders are closed to others."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        yield folder


@pytest.fixture
def as_nobody() -> Callable[..., tuple[int, str]]:
    """Runs `stoker` as an unprivileged user: the tests may run as root, to whom permissions do not apply."""

    def run(*arguments: str, cwd: Path | None = None) -> tuple[int, str]:
        # Import what the command needs first: the new user may not be able to read our environment.
        program = (
            "# warm\nimport os, sys\n"
            "import stoker.commands.config, stoker.config.reference, stoker.run.folder, stoker.profile.host\n"
            "import stoker.core.console\n"
            "from stoker.cli import main\n"
            "if os.getuid() == 0:\n"
            "    os.setgroups([]); os.setgid(65534); os.setuid(65534)\n"
            "sys.exit(main(sys.argv[1:]))\n"
        )
        done = subprocess.run(
            [sys.executable, "-c", program, *arguments], cwd=cwd or "/", capture_output=True, text=True,
            timeout=DEADLINE_S, env=os.environ | {"HOME": "/nonexistent"},
        )  # fmt: skip
        return done.returncode, done.stderr

    return run
