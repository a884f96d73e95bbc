"""What all tests of checks share."""

from __future__ import annotations

import pytest

from stoker.profile.accelerators import measure_cpu
from stoker.profile.datasheets import Datasheet


@pytest.fixture(scope="session")
def this_cpu() -> Datasheet:
    return measure_cpu(0.01)


@pytest.fixture(autouse=True)
def measured_once(this_cpu: Datasheet, monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan measures the speed of the CPU, which takes a second each time and matters to none of these checks."""
    monkeypatch.setattr("stoker.plan.planning.measure_cpu", lambda: this_cpu)
