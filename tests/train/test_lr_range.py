"""What a learning-rate range test concludes from a loss curve."""

from __future__ import annotations

import math

import pytest

from stoker.tasks.lr_find import LrFound, lr_text
from stoker.train.lr_range import LrCurve, LrSuggestion, RunningMean, growing_rates, smooth, suggest


def falling_at(lr: float, *, noise: float = 0.0, steps: int = 100) -> LrCurve:
    """A loss that falls from 2.3 to 0.5 around `lr` and rises again at thirty times that."""
    rates = growing_rates(1e-6, 10, steps)
    losses: list[float | None] = [
        2.3 - 1.8 / (1 + math.exp(-4 * math.log10(rate / lr))) + (rate / lr / 30) ** 2 + noise * math.sin(7.1 * number)
        for number, rate in enumerate(rates)
    ]
    return LrCurve(rates, losses, None)


def test_rates_grow_by_equal_ratios() -> None:
    rates = growing_rates(1e-4, 1.0, 5)
    assert rates == pytest.approx([1e-4, 1e-3, 1e-2, 1e-1, 1.0])


@pytest.mark.parametrize("lr", [1e-3, 0.03, 0.3])
@pytest.mark.parametrize("noise", [0.0, 0.05])
def test_the_steepest_descent_is_found(lr: float, noise: float) -> None:
    found = suggest(falling_at(lr, noise=noise))
    assert found is not None
    assert lr / 1.8 < found.steepest < lr * 1.8
    assert found.tenth_of_lowest == pytest.approx(found.lowest / 10)


def test_a_flat_or_rising_loss_suggests_nothing() -> None:
    rates = growing_rates(1e-6, 10, 50)
    flat: list[float | None] = [2.3 + 0.02 * math.sin(3 * number) for number in range(50)]
    rising: list[float | None] = [2.3 + number / 10 for number in range(50)]
    assert suggest(LrCurve(rates, flat, None)) is None
    assert suggest(LrCurve(rates, rising, None)) is None
    assert suggest(LrCurve(rates[:3], [None, 2.0, None], rates[2])) is None


def test_smoothing_moves_nothing() -> None:
    step = [1.0] * 50 + [0.0] * 50
    smoothed = smooth(step)
    assert smoothed[49] + smoothed[50] == pytest.approx(1.0)
    assert smooth([3.0] * 20) == pytest.approx([3.0] * 20)


def test_the_running_mean_begins_at_its_first_value() -> None:
    mean = RunningMean()
    assert mean.add(5.0) == pytest.approx(5.0)
    assert 5.0 < mean.add(6.0) < 6.0


@pytest.mark.parametrize(("reference", "expected"), [(256, "lr=0.4\n"), (None, "lr=0.1\n"), (64, "lr=0.1\n")])
def test_the_line_to_type_is_in_the_configs_terms(reference: int | None, expected: str) -> None:
    curve = falling_at(0.1)
    found = LrFound(curve, LrSuggestion(0.1, 0.05, 0.5), 64, reference, config_lr=0.2, ranks=4)
    text = lr_text(found)
    assert text.startswith(expected)
    assert ("measured on one device; on 4" in text) == (reference is None)
    assert found.as_dict()["lr_key"] == pytest.approx(float(expected[3:]))


def test_a_test_that_found_nothing_still_has_text() -> None:
    nothing = LrCurve([1e-6, 1e-5], [None, None], 1e-6)
    assert lr_text(LrFound(nothing, None, 64, 256, 0.1, 1)).startswith("no suggestion")
