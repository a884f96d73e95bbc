"""What several commands are tested with."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.volumes import train_on_scrolls


@pytest.fixture(scope="session")
def scroll_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run on scrolls; tests only read it."""
    return train_on_scrolls(tmp_path_factory.mktemp("scrolls"))
