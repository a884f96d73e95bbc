"""What a learning-rate range test concludes from a loss curve."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest

from stoker.tune.lr_find import LrFound, lr_text
from stoker.tune.lr_range import LrCurve, LrSuggestion, growing_rates, read_curve


def falling_at(lr: float, *, noise: float = 0.0, steps: int = 100, sweeps: int = 3, depth: float = 1.8) -> LrCurve:
    """Losses that fall by `depth` from 2.3 around `lr` and rise again at thirty times that."""
    rates = growing_rates(1e-6, 10, steps)
    chance = random.Random(1)
    curves: list[list[float | None]] = [
        [
            2.3
            - depth / (1 + math.exp(-4 * math.log10(rate / lr)))
            + min(8.0, (rate / lr / 30) ** 2)
            + chance.gauss(0, noise)
            for rate in rates
        ]
        for _ in range(sweeps)
    ]
    return LrCurve(rates, curves, None)


@pytest.mark.parametrize(("lr", "noise", "sweeps"), [(1e-3, 0.0, 1), (0.03, 0.05, 1), (0.03, 0.2, 3), (0.3, 0.2, 3)])
def test_the_steepest_descent_is_found_within_its_interval(lr: float, noise: float, sweeps: int) -> None:
    reading = read_curve(falling_at(lr, noise=noise, sweeps=sweeps))
    found = reading.suggestion
    assert found is not None, reading.reason
    assert lr / 3 < found.steepest < lr * 3
    assert found.low <= found.steepest <= found.high
    assert found.low / 1.5 <= lr <= found.high * 1.5, "the truth is near the interval"
    assert found.tenth_of_lowest == pytest.approx(found.lowest / 10)
    assert reading.noise == pytest.approx(noise, rel=0.3, abs=0.02)
    if lr < 0.1:  # with a higher one, the rates end before the loss rises
        assert reading.rises_at is not None
        assert reading.rises_at > 10 * lr


def test_noise_widens_the_interval_and_more_sweeps_narrow_it() -> None:
    def width(noise: float, sweeps: int) -> float:
        found = read_curve(falling_at(0.03, noise=noise, sweeps=sweeps)).suggestion
        assert found is not None
        return found.high / found.low

    assert width(0.3, 2) > width(0.05, 2)
    assert width(0.3, 2) > width(0.3, 12)


def test_a_curve_that_never_falls_by_more_than_its_noise_has_a_reason_and_no_suggestion() -> None:
    for seed in range(20):
        chance = random.Random(seed)
        rates = growing_rates(1e-6, 10, 60)
        flat: list[list[float | None]] = [[2.3 + chance.gauss(0, 0.2) for _ in rates] for _ in range(3)]
        reading = read_curve(LrCurve(rates, flat, None))
        assert reading.suggestion is None, seed
        assert "never fell by more than its noise" in (reading.reason or "")
    rising: list[float | None] = [2.3 + number / 10 for number in range(60)]
    reading = read_curve(LrCurve(rates, [rising], None))
    assert reading.suggestion is None
    assert reading.rises_at is not None
    assert reading.rises_at < 1e-5


def test_a_fall_that_one_noisy_sweep_hides_is_seen_by_many() -> None:
    assert read_curve(falling_at(0.03, noise=0.3, sweeps=1, depth=0.3)).suggestion is None
    assert read_curve(falling_at(0.03, noise=0.3, sweeps=30, depth=0.3)).suggestion is not None


def test_a_sweep_that_diverges_at_once_has_a_reason() -> None:
    rates = growing_rates(1e-6, 10, 50)
    reading = read_curve(LrCurve(rates[:3], [[None, 2.0, None], [2.0]], rates[0]))
    assert reading.suggestion is None
    assert "too few to judge" in (reading.reason or "")


@pytest.mark.parametrize(("reference", "expected"), [(256, "lr=0.4\n"), (None, "lr=0.1\n"), (64, "lr=0.1\n")])
def test_the_line_to_type_is_in_the_configs_terms(reference: int | None, expected: str) -> None:
    curve = falling_at(0.1)
    reading = replace(read_curve(curve), suggestion=LrSuggestion(0.1, 0.05, 0.2, 0.05, 0.5))
    found = LrFound(curve, reading, 64, reference, config_lr=0.2, ranks=4)
    text = lr_text(found)
    assert text.startswith(expected)
    scale = found.as_key(1.0)
    assert f"with the noise of 3 sweeps: lr={0.05 * scale:.2g} to {0.2 * scale:.2g} (80 % interval)" in text
    assert ("measured on one device; on 4" in text) == (reference is None)
    assert found.as_dict()["lr_key"] == pytest.approx(float(expected[3:]))
    assert found.as_dict()["interval"] == [0.05, 0.2]


def test_a_test_that_found_nothing_still_has_text() -> None:
    nothing = LrCurve([1e-6, 1e-5], [[None, None]], 1e-6)
    text = lr_text(LrFound(nothing, read_curve(nothing), 64, 256, 0.1, 1))
    assert text.startswith("no suggestion: a sweep diverged after 0 steps")
