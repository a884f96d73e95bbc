"""Numbers in words."""

from __future__ import annotations

from stoker.core.units import count, duration_text, metric_text, rate_text, size_text

SIZES = {
    12: "12 bytes", 5_520: "5.5 kB", 99_960_000: "100 MB", 320e6: "320 MB", 20e9: "20 GB", 23.84e9: "23.8 GB",
    1234.5e12: "1,234 TB",
}  # fmt: skip
RATES = {1214.4: "1,214 images/s", 99.97: "100 images/s", 12.34: "12.3 images/s", 0.7251: "0.725 images/s"}
DURATIONS = {
    0.00052: "0.52 ms", 0.0671: "67.1 ms", 0.9998: "1 s", 1.43: "1.4 s", 18.2: "18 s", 119.0: "119 s",
    4980.0: "83 min", 27_000.0: "7.5 h", 78_500.0: "22 h", 276_480.0: "3.2 days",
}  # fmt: skip
METRICS = {
    ("train/loss", 6.2341): "6.234", ("val/acc1", 80.42): "80.4%", ("wait_share", 0.034): "3%",
    ("train/lr", 0.000512): "0.000512", ("images_per_second", 2911.4): "2,911", ("seconds", 61.23): "61.2 s",
    ("train/loss", float("nan")): "nan",
}  # fmt: skip
COUNTS = {(1, "file"): "1 file", (2_000, "file"): "2,000 files", (2, "class", "classes"): "2 classes"}


def test_numbers_have_the_digits_and_the_unit_that_a_reader_needs() -> None:
    assert {size: size_text(size) for size in SIZES} == SIZES
    assert {rate: rate_text(rate) for rate in RATES} == RATES
    assert {seconds: duration_text(seconds) for seconds in DURATIONS} == DURATIONS
    assert {metric: metric_text(*metric) for metric in METRICS} == METRICS
    assert {number: count(*number) for number in COUNTS} == COUNTS
