"""Nothing that users see has changed, except where a change was recorded: the quick part of tools/oracle.py."""

from __future__ import annotations

import pytest

from tests.oracle.comparing import Comparison, allowed
from tests.oracle.parts import PARTS, Bench
from tests.support.ready_process import ReadyProcess


@pytest.fixture(scope="module")
def bench(ready: ReadyProcess, tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench(tmp_path_factory.mktemp("oracle"), ready, quick=True)


@pytest.mark.parametrize("part", [part for part in PARTS if part not in ("demos", "measured")])
def test_it_is_as_recorded(part: str, bench: Bench) -> None:
    comparison = Comparison()
    comparison.check(part, bench)
    assert comparison.compared
    assert not comparison.differences, (
        f"{comparison.text()}\n\nif this was meant: python tools/oracle.py record --only {part}"
    )


def test_a_changed_batch_or_loss_is_shown_but_not_the_rounding_of_another_machine() -> None:
    here = "machine: A\nbatch step=000 keys=12\nstep step=1 train/loss={}\n"
    there = here.replace("A", "B")
    assert allowed("runs", here.format(0.5), here.format(0.5000001)) != here.format(0.5)
    assert allowed("runs", here.format(0.5), there.format(0.5000001)) == here.format(0.5)
    assert allowed("runs", here.format(0.5), there.format(0.6)) != here.format(0.5)
    assert allowed("runs", here.format(0.5), there.format(0.5).replace("12", "13")) != here.format(0.5)


def test_what_was_not_measured_is_no_difference_but_a_renamed_key_is() -> None:
    recorded = "findings[].name: str\nfindings[].why: null | str\nspeed: number\n"
    for same in ("findings: empty list\nspeed: number\n", "findings[].name: str\nfindings[].why: str\nspeed: null\n"):
        assert allowed("json", recorded, same) == recorded
        assert allowed("json", same, recorded) == same
    several = "findings[].speedup: null\nfindings[].speedup.high: number\n"
    assert allowed("json", several, "findings[].speedup: null\n") == several
    assert allowed("json", "findings[].speedup: null\n", several) == "findings[].speedup: null\n"
    for other in (recorded.replace("name", "title"), recorded.replace("number", "str"), "speed: number\n"):
        assert allowed("json", recorded, other) != recorded
