"""What all tests of checks share."""

from __future__ import annotations

import pytest

from stoker.profile import accelerators


@pytest.fixture(autouse=True)
def measured_quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan measures the speed of the CPU, which takes a second each time and matters to none of these checks."""
    monkeypatch.setattr(accelerators, "SECONDS_EACH", 0.01)
