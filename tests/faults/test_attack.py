"""A short version of `make attack`: the same code, a few of each kind."""

from __future__ import annotations

import time

import pytest
from tools import attack


@pytest.mark.release
@pytest.mark.parametrize("counts", [{"kills": 1}, pytest.param({"kills": 3, "files": 6}, marks=pytest.mark.release)])
def test_a_short_attack_loses_nothing(counts: dict[str, int]) -> None:
    seed = time.time_ns() % 1_000_000
    found = attack.run(counts, seed)
    lost = [what for outcome in found.values() for what in outcome.lost]
    assert lost == [], f"seed {seed}: {lost}"
    kills = counts["kills"]
    assert found["kills"].tried == kills
    assert attack.row("kills", found["kills"]).split() == ["kills", str(kills), str(kills), "0"]
