"""When a trial has measured enough, and what counts as its rate; with a made-up clock."""

from __future__ import annotations

import statistics
import time
from types import SimpleNamespace

import pytest

from stoker.profile.batch_costs import BatchCost
from stoker.trial.process import Measurement, is_enough


@pytest.mark.parametrize("remote", [True, False])
def test_what_a_loader_has_read_ahead_counts_only_as_far_as_more_comes_over_the_link(
    monkeypatch: pytest.MonkeyPatch, remote: bool
) -> None:
    """The first batch comes after 4 s, in which 200 samples were fetched; 50 a second come over the link."""
    now_s, taken, begins_s = 100.0, 0, 0.0
    monkeypatch.setattr(time, "perf_counter", lambda: now_s)

    def told(seconds: float) -> None:
        nonlocal begins_s
        begins_s = begins_s or now_s - seconds

    measurement = Measurement(1.2, told, keep=0, warm_up=4, least=20, remote=remote)
    for step in range(2000):
        taken += 8
        now_s = max(now_s + 8 / 400, 104.0, 100 + taken / 50)  # the cores make 400 a second
        came = 50 * (now_s - 100)
        cost = BatchCost(bytes_read=800, ready_bytes=int(100 * (came - taken)), process=1)
        measurement.batch(SimpleNamespace(epoch=0, step=step, cost=cost))
        measurement.batch(SimpleNamespace(epoch=0, step=step, cost=cost))
        if measurement.step(1, 8):
            break
    assert begins_s < 104.5
    assert statistics.fmean(measurement.windows) == pytest.approx(50, rel=0.1)
    lasted_s = now_s - begins_s
    assert (12 <= lasted_s < 13) if remote else (lasted_s < 4), "rounds are of requests that share a link"


def test_the_rate_of_a_trial_that_stalls_is_that_over_its_whole_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bursts of 60 batches in 0.6 s, each after 2 s of waiting: 185 samples a second, and not the burst's 800."""
    now_s = 0.0
    monkeypatch.setattr(time, "perf_counter", lambda: now_s)
    measurement = Measurement(1.2, lambda _seconds: None, keep=0, least=20)
    for number in range(2000):
        now_s += 2.0 if number % 60 == 0 else 0.01
        if measurement.step(1, 8):
            break
    # It begins and ends in the middle of a burst.
    assert statistics.fmean(measurement.windows) == pytest.approx(480 / 2.59, rel=0.5)


def test_a_trial_is_short_where_its_rate_is_steady_and_long_where_it_is_not() -> None:
    def ends_after(*rates: float) -> float:
        """Seconds of a trial of 6, in windows of 1 with 20 batches each."""
        windows = [rates[number % len(rates)] for number in range(20)]
        return next(
            number for number in range(1, 20) if is_enough(windows[:number], 20 * number, 20, float(number), 6.0)
        )  # fmt: skip

    assert ends_after(100.0, 100.5) == 3
    assert ends_after(100.0, 120.0) == 6
    assert 6 < ends_after(100.0, 170.0) < 15
    assert ends_after(100.0, 900.0) == 15, "not for ever"
    assert not is_enough([100.0] * 6, 10, 64, 6.0, 1.0), "workers hand over several batches at once"
    assert is_enough([100.0] * 6, 10, 64, 16.0, 1.0)
