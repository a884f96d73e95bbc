"""What several commands are tested with."""

from __future__ import annotations

from pathlib import Path

import pytest

from stoker.profile import accelerators
from tests.support.volumes import train_on_scrolls


@pytest.fixture(autouse=True)
def measured_quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan measures the speed of the CPU for a second, which matters to none of these tests."""
    monkeypatch.setattr(accelerators, "SECONDS_EACH", 0.01)


@pytest.fixture(scope="session")
def scroll_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run on scrolls; tests only read it."""
    return train_on_scrolls(tmp_path_factory.mktemp("scrolls"))
