"""From records of `__next__` to steps, with made-up records."""

from __future__ import annotations

import pytest

from stoker.attach.ring import FIRST, LAST, StepRecord
from stoker.doctor.script.timeline import steady_steps, training_loaders

MS = 1_000_000


class Loop:
    """A simulated training loop whose clock is advanced explicitly."""

    def __init__(self) -> None:
        self.now_ms = 0.0
        self.records: list[StepRecord] = []
        self._steps = 0
        self._step_end_ms = 0.0
        self._seen: set[int] = set()

    def take(self, loader: int, wait_ms: float, idle_ms: float = -1, start_ms: float = 0) -> None:
        self.now_ms += start_ms
        flags = 0 if loader in self._seen else FIRST
        self._seen.add(loader)
        self._record(loader, flags, wait_ms, idle_ms, start_ms)

    def epoch_ends(self, loader: int) -> None:
        self._record(loader, LAST, 0)
        self._seen.discard(loader)

    def work(self, ms: float) -> None:
        self.now_ms += ms

    def optimizer_step(self) -> None:
        self._steps += 1
        self._step_end_ms = self.now_ms

    def _record(self, loader: int, flags: int, wait_ms: float, idle_ms: float = -1, start_ms: float = 0) -> None:
        enter = self.now_ms
        self.now_ms += wait_ms
        idle = int(idle_ms * MS) if idle_ms >= 0 else -1
        self.records.append(
            StepRecord(
                loader, flags, 0, 8, self._steps, int(start_ms * 1000), int(enter * MS), int(self.now_ms * MS),
                int(self._step_end_ms * MS), idle, 0,
            )
        )  # fmt: skip
        self._steps = 0


def train(
    loop: Loop, batches: int, wait_ms: float = 5, work_ms: float = 10, after_ms: float = 0, idle_ms: float = -1
) -> None:
    for _ in range(batches):
        loop.take(1, wait_ms, idle_ms)
        loop.work(work_ms)
        loop.optimizer_step()
        loop.work(after_ms)
    loop.epoch_ends(1)


def test_a_step_consists_of_wait_and_work_of_which_only_that_before_the_optimizer_step_is_computing() -> None:
    loop = Loop()
    train(loop, 5, after_ms=4)
    steps = steady_steps(loop.records, [1])
    assert steps.waits_s == pytest.approx([0.005] * 4)
    assert steps.works_s == pytest.approx([0.014] * 4)
    assert steps.compute_s == pytest.approx(4 * 0.010)
    assert steps.samples == 4 * 8


def test_the_first_batch_of_an_epoch_is_counted_separately_with_the_worker_start() -> None:
    loop = Loop()
    loop.take(1, wait_ms=300, start_ms=200)
    loop.work(10)
    train(loop, 3)
    steps = steady_steps(loop.records, [1])
    assert steps.epoch_starts_s == pytest.approx([0.5])
    assert sum(steps.waits_s) == pytest.approx(0.015)


@pytest.mark.parametrize(("training", "validating"), [(4, 3), (2, 50)])
def test_validation_belongs_to_no_step_and_is_not_mistaken_for_training(training: int, validating: int) -> None:
    loop = Loop()
    for _ in range(2):
        train(loop, training)
        for _ in range(validating):
            loop.take(2, wait_ms=7)
            loop.work(20)
        loop.epoch_ends(2)
    assert training_loaders(loop.records) == [1]
    steps = steady_steps(loop.records, [1])
    assert steps.elapsed_s == pytest.approx(2 * (training - 1) * 0.015)
    assert steps.validation_s == pytest.approx(2 * validating * 0.027)


def test_with_two_interleaved_loaders_the_slower_one_counts_and_both_waits() -> None:
    loop = Loop()
    for _ in range(5):
        loop.take(1, wait_ms=1)
        loop.take(2, wait_ms=6)
        loop.work(10)
        loop.optimizer_step()
    loop.epoch_ends(1)
    loop.epoch_ends(2)
    feeding = training_loaders(loop.records)
    assert feeding == [2, 1]
    steps = steady_steps(loop.records, feeding)
    assert steps.waits_s == pytest.approx([0.007] * 4, abs=0.002)
    assert steps.works_s == pytest.approx([0.010] * 4, abs=0.002)


def test_accumulated_batches_are_separate_steps() -> None:
    loop = Loop()
    for number in range(8):
        loop.take(1, wait_ms=5)
        loop.work(10)
        if number % 4 == 3:
            loop.optimizer_step()
    loop.epoch_ends(1)
    assert training_loaders(loop.records) == [1]
    assert len(steady_steps(loop.records, [1]).waits_s) == 7


def test_a_wait_hidden_by_the_device_is_not_a_wait() -> None:
    loop = Loop()
    train(loop, 4, wait_ms=8, work_ms=2, idle_ms=1)
    steps = steady_steps(loop.records, [1])
    assert steps.waits_s == pytest.approx([0.001] * 3)
    assert steps.works_s == pytest.approx([0.009] * 3)


def test_without_an_optimizer_the_loader_with_most_batches_counts() -> None:
    loop = Loop()
    loop.take(2, 1)
    for _ in range(3):
        loop.take(1, 1)
    assert training_loaders(loop.records) == [1]
    assert training_loaders([]) == []
