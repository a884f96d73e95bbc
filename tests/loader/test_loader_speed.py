"""How fast a loader is: what it had fetched before is not what it delivers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from stoker.loader.loader import LEAST_CAME, LinkBalance, measure_loader
from stoker.profile.batch_costs import BatchCost

BATCH = 8


@dataclass
class MadeUpBatch:
    cost: BatchCost = field(default_factory=BatchCost)

    def __len__(self) -> int:
        return BATCH


class MadeUpLoader:
    """Its first batch comes after 4 s; 50 samples a second come over the link, and the cores make 400."""

    def __init__(self, *, link: bool) -> None:
        self.now_s, self.taken, self.link = 0.0, 0, link

    def epoch(self, _epoch: int) -> Iterator[MadeUpBatch]:
        while True:
            self.taken += BATCH
            self.now_s = max(self.now_s + BATCH / 400, 4.0, self.taken / 50 if self.link else 0.0)
            ready = int(100 * (50 * self.now_s - self.taken)) if self.link else 0
            yield MadeUpBatch(BatchCost(bytes_read=100 * BATCH, ready_bytes=ready, process=1))

    def close(self) -> None: ...


@pytest.mark.parametrize(("link", "expected"), [(True, 50), (False, 400)])
def test_samples_that_were_fetched_before_do_not_count(
    monkeypatch: pytest.MonkeyPatch, link: bool, expected: float
) -> None:
    loader: Any = MadeUpLoader(link=link)
    monkeypatch.setattr("time.perf_counter", lambda: loader.now_s)
    measured = measure_loader(lambda: loader, 1, 1.0)
    assert measured.images_per_second == pytest.approx(expected, rel=0.05)


def test_what_comes_over_a_link_is_balanced_by_process() -> None:
    link = LinkBalance()
    assert link.share_that_came == 1
    link.take(BatchCost(bytes_read=500, ready_bytes=1000, process=1))
    link.begin()
    link.take(BatchCost(bytes_read=500, ready_bytes=800, process=1))
    assert link.share_that_came == pytest.approx(0.6)
    link.take(BatchCost(bytes_read=300, ready_bytes=5000, process=2))  # its store was there before
    assert link.share_that_came == pytest.approx(0.75)
    link.take(BatchCost(bytes_read=200, ready_bytes=9000, process=2))
    assert link.share_that_came == 1, "more than is consumed is of no use"
    link.take(BatchCost(bytes_read=10, ready_bytes=0, process=2))
    assert link.share_that_came == LEAST_CAME
