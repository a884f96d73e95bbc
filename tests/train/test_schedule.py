"""Learning rate and image size are pure functions of step and epoch."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.train.schedule import (
    Horizon,
    default_resize_epochs,
    image_size,
    learning_rate,
    lr_warning,
    scaled_lr,
)

BY_EPOCH = Horizon(steps_per_epoch=7, epochs=600, warmup_epochs=5, update="epoch")
BY_STEP = replace(BY_EPOCH, update="step")
LAST = BY_STEP.total_steps - 1


def of_epoch(epoch: int, horizon: Horizon = BY_EPOCH, peak: float = 0.5) -> float:
    """The rate of an epoch; asserts that all of its steps have it."""
    rates = {
        learning_rate(epoch * horizon.steps_per_epoch + step, horizon, peak) for step in range(horizon.steps_per_epoch)
    }
    assert len(rates) == 1
    return rates.pop()


def test_the_warmup_by_epoch_is_exact() -> None:
    assert [of_epoch(epoch) for epoch in range(6)] == [0.005, 0.12875, 0.2525, 0.37625, 0.5, 0.5]


def test_after_the_warmup_by_epoch_comes_the_cosine() -> None:
    for epoch in range(5, 600):
        assert of_epoch(epoch) == pytest.approx(0.5 * (1 + math.cos(math.pi * (epoch - 5) / 594)) / 2, abs=1e-15)
    assert of_epoch(100) == pytest.approx(0.469, abs=5e-4)
    assert of_epoch(300) == pytest.approx(0.253, abs=5e-4)
    assert of_epoch(599) == 0.0


def test_by_step_the_warmup_takes_all_of_its_epochs() -> None:
    for epochs in (1, 2, 5):
        horizon = replace(BY_STEP, warmup_epochs=epochs)
        rates = [learning_rate(step, horizon, 0.5) for step in range(epochs * 7 + 1)]
        assert rates == pytest.approx([0.5 * (0.01 + 0.99 * step / (epochs * 7)) for step in range(epochs * 7 + 1)])
        assert (rates[0], rates[-1]) == (0.005, 0.5)
        assert rates[-2] < 0.5


def test_by_step_the_rate_never_jumps() -> None:
    rates = [learning_rate(step, BY_STEP, 0.5) for step in range(BY_STEP.total_steps)]
    assert all(a < b for a, b in pairwise(rates[: 5 * 7 + 1]))
    assert all(a > b for a, b in pairwise(rates[5 * 7 :]))
    assert max(abs(a - b) for a, b in pairwise(rates)) < 0.5 / 5 / 7


def test_the_cosine_ends_at_min_lr_and_does_not_rise_to_it() -> None:
    horizon = Horizon(steps_per_epoch=10, epochs=3, min_lr=0.01)
    assert learning_rate(29, horizon, 0.5) == pytest.approx(0.01)
    assert learning_rate(10_000, horizon, 0.5) == pytest.approx(0.01)
    assert {learning_rate(step, horizon, 0.001) for step in range(30)} == {0.001}


def test_a_run_of_one_step_is_trained_with_the_peak() -> None:
    for update in ("step", "epoch"):
        assert learning_rate(0, Horizon(steps_per_epoch=1, epochs=1, update=update), 0.1) == 0.1  # type: ignore[arg-type]


def test_steps_reduce_the_rate_at_fixed_numbers_of_epochs() -> None:
    horizon = Horizon(steps_per_epoch=4, epochs=90, warmup_epochs=5, scheduler="step", step_epochs=30)
    rates = [learning_rate(epoch * 4, horizon, 0.4) for epoch in (5, 29, 30, 59, 60, 89)]
    assert rates == pytest.approx([0.4, 0.4, 0.04, 0.04, 0.004, 0.004])
    assert learning_rate(30 * 4 - 1, horizon, 0.4) == 0.4


def test_constant_stays_after_the_warmup() -> None:
    horizon = Horizon(steps_per_epoch=4, epochs=9, warmup_epochs=2, scheduler="constant")
    assert {learning_rate(step, horizon, 0.4) for step in range(8, 36)} == {0.4}
    assert learning_rate(0, horizon, 0.4) == pytest.approx(0.004)


def test_the_rate_scales_with_the_total_batch() -> None:
    assert scaled_lr(0.5, 1024, 256, scale=True) == 2.0
    assert scaled_lr(0.5, 1024, 256, scale=False) == 0.5
    assert scaled_lr(0.75, 384, 384, scale=True) == 0.75


def test_four_times_the_published_rate_is_warned_about_with_numbers() -> None:
    warning = lr_warning("sgd", scaled_lr(0.5, 4 * 256, 256, scale=True), 4 * 256)
    assert warning is not None
    assert all(part in warning for part in ("learning rate 2 ", "1024", "4.0 times", "so 0.5 here"))


@pytest.mark.parametrize(
    ("optimizer", "lr", "batch"), [("sgd", 0.5, 1024), ("sgd", 1.0, 1024), ("sgd", 0.1, 256), ("lamb", 8.0, 2048)]
)
def test_published_rates_and_other_optimizers_give_no_warning(optimizer: str, lr: float, batch: int) -> None:
    assert lr_warning(optimizer, lr, batch) is None


def test_sizes_grow_in_multiples_and_end_at_the_final_one() -> None:
    assert [image_size(epoch, 128, 224, 12) for epoch in range(14)] == [
        128, 128, 160, 160, 160, 160, 192, 192, 192, 192, 224, 224, 224, 224,
    ]  # fmt: skip
    assert image_size(0, None, 224, 10) == 224
    assert [default_resize_epochs(epochs) for epochs in (1, 10, 88)] == [1, 8, 70]


@given(start=st.integers(8, 512), more=st.integers(0, 512), until=st.integers(1, 300))
def test_sizes_never_shrink_and_stay_in_bounds(start: int, more: int, until: int) -> None:
    final = start + more
    sizes = [image_size(epoch, start, final, until) for epoch in range(until + 3)]
    assert sizes == sorted(sizes)
    assert (sizes[0], sizes[until], sizes[-1]) == (start, final, final)
    assert all(size % 32 == 0 or size in (start, final) for size in sizes)
