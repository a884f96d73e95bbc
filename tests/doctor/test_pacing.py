"""`--pace` for scripts: a consumer is simulated with the measured times of the workers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from stoker.core.errors import UsageError
from stoker.doctor.diagnosing import diagnosis_of
from stoker.doctor.pacing import paced, read_script_pace, step_time_s
from stoker.doctor.screen import doctor_text
from stoker.doctor.script.recording import TracedStep
from stoker.plan.records import TracedOp
from stoker.plan.roofline import PRODUCT_EFFICIENCY
from stoker.profile.datasheets import load_datasheet
from tests.doctor.checks.observations import BATCH, STEPS, batches, changed, healthy

HIDDEN = healthy(
    elapsed_s=20.0 * STEPS, wait_s=0.1 * STEPS, compute_s=19.9 * STEPS, steps_s=(19.9,) * STEPS,
    batches=batches(cpu=1.4 * BATCH), consumer_cpu_s=19.0 * STEPS,
)  # fmt: skip
"""Steps of 20 s on the CPU hide that 8 samples take two workers 5.6 s."""


def test_a_fast_consumer_waits_for_workers_that_a_slow_model_hides() -> None:
    seen = paced(HIDDEN, 0.4)
    assert seen.times.wait_share == pytest.approx(1 - 0.4 / 5.6, abs=0.02)
    assert diagnosis_of(HIDDEN).verdict == "compute-bound"
    found = diagnosis_of(seen)
    assert found.verdict == "too-few-workers"
    assert "the model: replaced by a simulated consumer" in doctor_text(found)


def test_programs_that_took_the_cores_meanwhile_do_not_count() -> None:
    crowded = changed(HIDDEN, host=replace(HIDDEN.host, cpu_busy_share=1.0), consumer_cpu_s=1.0 * STEPS)
    alone, beside = paced(HIDDEN, 0.4), paced(crowded, 0.4)
    assert beside.times.wait_share == pytest.approx(alone.times.wait_share, abs=0.01)
    assert diagnosis_of(beside).verdict == diagnosis_of(alone).verdict


def test_a_card_takes_the_roofline_of_the_traced_step_for_each_batch() -> None:
    product = TracedOp("addmm", "forward", 312 * 10**12, "bfloat16", 10**9, 10**9)
    step = TracedStep((product,), batches=2, channels_last=False, tf32=True, wanted_dtype=None)
    pace = read_script_pace("a100-80")
    found = pace.seconds(HIDDEN, step)
    # A second's worth of products at the card's peak, of which 90 % can be reached; two batches.
    assert found == pytest.approx(1 / PRODUCT_EFFICIENCY / 2, rel=0.01)
    assert isinstance(found, float)
    assert "on NVIDIA A100" in pace.words(found, step)
    assert "in bfloat16" in pace.words(found, step)
    assert pace.seconds(HIDDEN, "it uses torch.compile") == "it uses torch.compile"


def test_what_autocast_would_do_on_a_gpu_counts_in_16_bits() -> None:
    card = load_datasheet("a100-80")
    ops = (
        TracedOp("convolution", "forward", 10**13, "float32", 10**9, 10**9),
        TracedOp("convolution_backward", "backward", 10**13, "float32", 10**9, 10**9),
    )
    full = TracedStep(ops, 1, channels_last=True, tf32=True, wanted_dtype=None)
    half = replace(full, wanted_dtype="float16")
    assert (full.precision, half.precision) == ("TF32", "float16")
    assert full.seconds_on(card) == pytest.approx(2 * half.seconds_on(card), rel=0.05)
    update = TracedOp("_foreach_add_", "update", 0, "float32", 10**10, 10**10)
    only_update = TracedStep((update,), 1, channels_last=True, tf32=True, wanted_dtype="float16")
    assert only_update.seconds_on(card) == replace(only_update, wanted_dtype=None).seconds_on(card)


def test_a_slow_consumer_does_not_wait_and_too_few_batches_are_not_simulated() -> None:
    seen = paced(HIDDEN, 8.0)
    assert seen.times.wait_share == pytest.approx(0.0, abs=0.01)
    assert seen.times.elapsed_s == pytest.approx(8.0 * STEPS, rel=0.01)
    assert paced(healthy(batches=batches(cpu=1.0, count=3)), 0.4) is None


def test_a_pace_is_a_time_or_a_rate() -> None:
    assert step_time_s("400ms") == pytest.approx(0.4)
    assert step_time_s("1.5 s") == pytest.approx(1.5)
    assert step_time_s("a100-80") is None
    assert read_script_pace("400ms").seconds(HIDDEN, None) == pytest.approx(0.4)
    assert read_script_pace("16").seconds(HIDDEN, None) == pytest.approx(0.5)
    with pytest.raises(UsageError, match="above zero"):
        read_script_pace("0")
    with pytest.raises(UsageError, match="a100"):
        read_script_pace("a100-8")
    with pytest.raises(UsageError, match="must take some time"):
        step_time_s("1.2.3ms")
