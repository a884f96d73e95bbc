"""Numbers in words."""

from __future__ import annotations

import pytest

from stoker.core.units import count, duration_text, rate_text, size_text


@pytest.mark.parametrize(
    ("size", "said"),
    [
        (12, "12 bytes"), (5_520, "5.5 kB"), (99_960_000, "100 MB"), (320e6, "320 MB"), (20e9, "20 GB"),
        (23.84e9, "23.8 GB"), (1234.5e12, "1,234 TB"),
    ],
)  # fmt: skip
def test_sizes_have_three_digits_at_most_and_no_needless_zero(size: float, said: str) -> None:
    assert size_text(size) == said


@pytest.mark.parametrize(
    ("per_second", "said"),
    [(1214.4, "1,214 images/s"), (99.97, "100 images/s"), (12.34, "12.3 images/s"), (0.7251, "0.725 images/s")],
)
def test_slow_rates_have_three_digits(per_second: float, said: str) -> None:
    assert rate_text(per_second) == said


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        (0.00052, "0.52 ms"), (0.0671, "67.1 ms"), (0.9998, "1 s"), (1.43, "1.4 s"), (18.2, "18 s"), (119.0, "119 s"),
        (4980.0, "83 min"), (27_000.0, "7.5 h"), (78_500.0, "22 h"), (276_480.0, "3.2 days"),
    ],
)  # fmt: skip
def test_durations_are_in_the_unit_that_suits_them_and_never_in_exponents(seconds: float, said: str) -> None:
    assert duration_text(seconds) == said


def test_counts_agree_with_their_noun() -> None:
    assert (count(1, "file"), count(2_000, "file"), count(2, "class", "classes")) == (
        "1 file",
        "2,000 files",
        "2 classes",
    )
