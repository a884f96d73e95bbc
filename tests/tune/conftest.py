"""What the tests of trials share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from stoker.trial.fork_server import ForkServer
from stoker.trial.trial_server import trial_server


@pytest.fixture(scope="session")
def server() -> Iterator[ForkServer]:
    """One process that trials are forked from: importing takes longer than they do."""
    found = trial_server()
    yield found
    found.close()
