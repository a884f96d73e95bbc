"""A short version of `make attack`: the same code, a few of each kind."""

from __future__ import annotations

import time

from tools import attack


def test_a_short_attack_loses_nothing() -> None:
    seed = time.time_ns() % 1_000_000
    found = attack.run({"kills": 3, "files": 6}, seed)
    lost = [what for outcome in found.values() for what in outcome.lost]
    assert lost == [], f"seed {seed}: {lost}"
    assert found["kills"].tried == 3
    assert attack.row("kills", found["kills"]).split() == ["kills", "3", "3", "0"]
