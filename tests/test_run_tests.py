"""The suite's own runner: what is repeated, what counts as failed, and what it says."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

PROJECT = Path(__file__).parents[1]
SUITE = """
import pathlib, pytest

def fails_once(name):
    seen = pathlib.Path(name)
    if not seen.exists():
        seen.touch()
        raise AssertionError("for the first time")

def test_good(): pass
def test_unstable(): fails_once("unstable")

@pytest.mark.real_time
def test_slow_machine(): fails_once("slow")

@pytest.mark.release
def test_long(): raise AssertionError("not run")
"""


def run(folder: Path, *options: str) -> tuple[int, str]:
    command = [sys.executable, PROJECT / "tools" / "run_tests.py", "--jobs", "1", *options]
    # Only the plugin that it needs: the others take seconds to import.
    plugins = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_PLUGINS": "xdist.plugin"}
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, env=os.environ | plugins)
    return done.returncode, done.stdout


def test_failed_tests_are_repeated_alone_and_unstable_ones_are_named(tmp_path: Path) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n    real_time\n    release\n")
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_some.py").write_text(SUITE)
    code, said = run(tmp_path, "--repeat-failed")
    assert code == 0, said
    assert "2 unstable" in said
    assert "  tests/test_some.py::test_unstable\n  tests/test_some.py::test_slow_machine\n" in said
    # Without the option, only tests that need real time get a second chance.
    (tmp_path / "unstable").unlink()
    (tmp_path / "slow").unlink()
    code, said = run(tmp_path)
    assert code == 1
    assert "1 unstable" in said
    assert "  failed: tests/test_some.py::test_unstable\n" in said
