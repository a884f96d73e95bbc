"""What several commands are tested with."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from stoker.plan import vram
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


@pytest.fixture(scope="module")
def traces() -> dict[Any, Any]:
    return {}


@pytest.fixture
def traced_once(traces: dict[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests of a module that all plan the same network: its step is traced once for each batch size, a second
    each."""
    trace_step = vram.trace_step

    def traced(step: Any, batch: int | None = None) -> Any:
        values = {field.name: getattr(step, field.name) for field in fields(step)}
        values |= {"batch_size": batch or step.batch_size, "checkpointed": step.checkpointed is None}
        key = tuple(value for value in values.values() if not callable(value))
        if key not in traces:
            traces[key] = trace_step(step, batch)
        return traces[key]

    monkeypatch.setattr(vram, "trace_step", traced)
