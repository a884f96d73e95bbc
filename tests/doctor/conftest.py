"""What all tests of the doctor share."""

from __future__ import annotations

import pytest

from stoker.doctor import what_if


@pytest.fixture(autouse=True)
def fewer_simulations(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interval of a prediction is of fewer simulations: they are most of what a diagnosis takes."""
    monkeypatch.setattr(what_if, "BOOTSTRAPS", 4)
