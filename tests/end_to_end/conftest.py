"""Processes that start without paying for imports; one server per pytest worker."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.ready_process import ReadyProcess, ready_process
from tests.support.tiny_training import write_images


@pytest.fixture(scope="session")
def ready(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ReadyProcess]:
    with ready_process(tmp_path_factory.mktemp("ready")) as process:
        yield process


@pytest.fixture(scope="session")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """48 training images and 15 for validation, in three classes."""
    return write_images(tmp_path_factory.mktemp("images"))
