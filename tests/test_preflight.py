"""`make` says in one line why an environment cannot be created."""

from __future__ import annotations

import ast
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests.conftest import PROJECT

SCRIPT = PROJECT / "tools" / "preflight.py"


@pytest.fixture
def preflight() -> ModuleType:
    spec = importlib.util.spec_from_file_location("preflight", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_this_machine_passes(preflight: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight.shutil, "disk_usage", lambda _: type("Usage", (), {"free": 50e9}))
    assert list(preflight.problems(str(tmp_path / "venv"))) == []


def test_an_old_python_is_named(preflight: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "version_info", (3, 9, 2, "final", 0))
    (problem,) = preflight.problems("/tmp/venv")
    assert "Python 3.9.2 is too old" in problem


def test_a_small_disk_is_named(preflight: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(preflight.shutil, "disk_usage", lambda _: type("Usage", (), {"free": 1.2e9}))
    (problem,) = preflight.problems(str(tmp_path / "venv"))
    assert "1.2 GB free" in problem
    (tmp_path / "venv").mkdir()
    (tmp_path / "venv" / ".installed").write_text("")
    assert list(preflight.problems(str(tmp_path / "venv"))) == []


def test_an_ancient_python_can_parse_it() -> None:
    ast.parse(SCRIPT.read_text(), feature_version=(3, 4))
    assert 'f"' not in SCRIPT.read_text()
