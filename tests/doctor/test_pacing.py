"""`--pace` for scripts: a consumer is simulated with the measured times of the workers."""

from __future__ import annotations

import pytest

from stoker.doctor.diagnosing import diagnosis_of
from stoker.doctor.pacing import paced, script_step_s, step_time_s
from stoker.doctor.text import doctor_text
from stoker.doctor.words import rate_text, time_text
from stoker.errors import UsageError
from tests.doctor.checks.observations import BATCH, STEPS, batches, healthy

HIDDEN = healthy(
    elapsed_s=20.0 * STEPS, wait_s=0.1 * STEPS, compute_s=19.9 * STEPS, steps_s=(19.9,) * STEPS,
    batches=batches(cpu=1.4 * BATCH), consumer_cpu_s=19.0 * STEPS,
)  # fmt: skip
"""Steps of 20 s on the CPU hide that 8 samples take two workers 5.6 s."""


def test_a_fast_consumer_waits_for_workers_that_a_slow_model_hides() -> None:
    seen = paced(HIDDEN, 0.4)
    assert seen is not None
    assert seen.wait_share == pytest.approx(1 - 0.4 / 5.6, abs=0.02)
    assert diagnosis_of(HIDDEN).verdict == "compute-bound"
    found = diagnosis_of(seen)
    assert found.verdict == "too-few-workers"
    assert "the model: replaced by a simulated consumer of 400 ms a step" in doctor_text(found)


def test_a_slow_consumer_does_not_wait() -> None:
    seen = paced(HIDDEN, 8.0)
    assert seen is not None
    assert seen.wait_share == pytest.approx(0.0, abs=0.01)
    assert seen.elapsed_s == pytest.approx(8.0 * STEPS, rel=0.01)


def test_too_few_batches_are_not_simulated() -> None:
    assert paced(healthy(batches=batches(cpu=1.0, count=3)), 0.4) is None


def test_a_pace_is_a_time_or_a_rate() -> None:
    assert step_time_s("400ms") == pytest.approx(0.4)
    assert step_time_s("1.5 s") == pytest.approx(1.5)
    assert step_time_s("a100-80") is None
    assert script_step_s("16", HIDDEN) == pytest.approx(0.5)
    with pytest.raises(UsageError, match="above zero"):
        script_step_s("0", HIDDEN)
    with pytest.raises(UsageError, match="must take some time"):
        step_time_s("1.2.3ms")


@pytest.mark.parametrize(
    ("per_second", "said"),
    [(1214.4, "1,214 images/s"), (12.3, "12 images/s"), (4.66, "4.7 samples/s"), (0.72, "1.4 s per sample"),
     (0.055, "18 s per sample")],
)  # fmt: skip
def test_slow_rates_are_worded_with_two_digits(per_second: float, said: str) -> None:
    assert rate_text(per_second) == said


@pytest.mark.parametrize(
    ("seconds", "said"), [(1.43, "1.4 s"), (18.2, "18 s"), (0.0671, "67.1 ms"), (0.00052, "0.52 ms"), (0.9998, "1.0 s")]
)
def test_times_are_never_in_exponents(seconds: float, said: str) -> None:
    assert time_text(seconds) == said
