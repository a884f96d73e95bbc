"""What all tests of checks share."""

from __future__ import annotations

from pathlib import Path

import pytest

from stoker.profile import accelerators
from tests.support.tiny_training import write_images


@pytest.fixture(scope="session")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_images(tmp_path_factory.mktemp("images"), train=12, val=3)


@pytest.fixture(autouse=True)
def measured_quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan measures the speed of the CPU, which takes a second each time and matters to none of these checks."""
    monkeypatch.setattr(accelerators, "SECONDS_EACH", 0.01)
