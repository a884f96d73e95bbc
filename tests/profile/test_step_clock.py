"""Every moment of a step belongs to one part; epoch starts, validation and checkpoints are counted separately."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from stoker.profile.batch_costs import BatchCost, StageCost
from stoker.profile.step_clock import KEPT_STEPS, DeviceStep, DeviceTimes, StepClock


@dataclass
class Eight:
    """The part of a batch that the clock needs."""

    cost: BatchCost = field(
        default_factory=lambda: BatchCost({"decode": StageCost(0.01, 0.01, 0.0, 1)}, 0.01, samples=8)
    )

    def __len__(self) -> int:
        return 8


@pytest.fixture(autouse=True)
def spin(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Makes time up: it passes in sleeps only, and exactly; what is returned also takes CPU time. On a busy machine a
    sleep takes any time, and other threads of this process compute too."""
    now_s, cpu_s = 1000.0, 50.0

    def sleep(seconds: float) -> None:
        nonlocal now_s
        now_s += seconds

    def spin(seconds: float) -> None:
        nonlocal cpu_s
        sleep(seconds)
        cpu_s += seconds

    monkeypatch.setattr(time, "perf_counter", lambda: now_s)
    monkeypatch.setattr(time, "process_time", lambda: cpu_s)
    monkeypatch.setattr(time, "sleep", sleep)
    return spin


def step(clock: StepClock, wait_s: float = 0.0, compute_s: float = 0.0, other_s: float = 0.0) -> None:
    with clock.waiting():
        time.sleep(wait_s)
    with clock.transferring():
        pass
    with clock.computing():
        time.sleep(compute_s)
    time.sleep(other_s)
    clock.step_ends([Eight()])


def test_the_wait_for_an_epochs_first_batch_is_not_part_of_steady_steps() -> None:
    clock = StepClock()
    clock.epoch_begins()
    step(clock, wait_s=0.2, compute_s=0.01)
    step(clock, wait_s=0.02, compute_s=0.01)
    clock.epoch_begins()
    step(clock, wait_s=0.1, compute_s=0.01)
    interval = clock.take_interval()
    assert interval.epoch_starts_s == pytest.approx([0.2, 0.1])
    assert interval.wait_s == pytest.approx(0.02)
    assert interval.elapsed_s == pytest.approx(0.05)
    assert interval.steps == 3
    assert len(interval.newest_steps) == 1


def test_parts_add_up_to_the_time_of_the_steps() -> None:
    clock = StepClock()
    clock.epoch_begins()
    step(clock)
    clock.take_interval()
    for _ in range(5):
        step(clock, wait_s=0.01, compute_s=0.02, other_s=0.005)
    interval = clock.take_interval()
    assert interval.elapsed_s == pytest.approx(0.175)
    parts = (interval.wait_s, interval.compute_s, interval.other_s)
    assert parts == pytest.approx((0.05, 0.1, 0.025))
    assert interval.transfer_s is None
    single = [wait + rest for wait, rest in interval.newest_steps]
    assert single == pytest.approx([0.035] * 5)


def test_checkpoints_and_validation_belong_to_no_step() -> None:
    clock = StepClock()
    clock.epoch_begins()
    step(clock)
    with clock.saving():
        time.sleep(0.1)
    step(clock, compute_s=0.01)
    with clock.validating():
        time.sleep(0.05)
    interval = clock.take_interval()
    assert interval.saving_s == pytest.approx(0.1)
    assert interval.validation_s == pytest.approx(0.05)
    assert interval.elapsed_s == pytest.approx(0.01)
    assert clock.total_s == pytest.approx(0.01)
    with pytest.raises(KeyError), clock.validating():
        raise KeyError
    assert clock.take_interval().validation_s is not None, "also if it is left early"


def test_an_interval_keeps_the_details_of_few_steps_and_the_sums_of_all() -> None:
    clock = StepClock()
    clock.epoch_begins()
    for _ in range(50):
        step(clock)
    interval = clock.take_interval()
    assert interval.steps == 50
    assert interval.samples == 400
    assert interval.cost.stages["decode"].calls == 50
    assert len(interval.newest_steps) == len(interval.newest_batches) == KEPT_STEPS
    assert clock.take_interval().steps == 0
    assert clock.steps == 50


def test_the_consumers_cpu_time_is_distinguished_from_that_of_making_batches(spin: Callable[[float], None]) -> None:
    clock = StepClock()
    clock.epoch_begins()
    made_here = BatchCost({"decode": StageCost(0.01, 0.01, 0.0, 1)}, 0.01, samples=8, process=os.getpid())
    for _ in range(5):
        spin(0.02)
        step(clock, wait_s=0.01)
        spin(0.03)
        with clock.waiting():
            pass
        clock.step_ends([Eight(made_here)])
    # Of the 10 batches, 5 were made by other processes and 5 in this one, for 10 ms each.
    assert clock.take_interval().consumer_cpu_s == pytest.approx(5 * (0.02 + 0.03 - 0.01))


class Queue:
    """A device that has progressed to a given millisecond; its events know when they were recorded."""

    def __init__(self) -> None:
        self.now = 0.0
        self.reached = 0.0
        self.made = 0

    def event(self) -> Event:
        self.made += 1
        return Event(self)


class Event:
    def __init__(self, queue: Queue) -> None:
        self.queue, self.at = queue, -1.0

    def record(self) -> None:
        self.at = self.queue.now

    def query(self) -> bool:
        return self.queue.reached >= self.at

    def elapsed_time(self, other: Event) -> float:
        assert self.query()
        assert other.query(), "asking for it would wait for the device"
        return other.at - self.at


def on_device(
    times: DeviceTimes, queue: Queue, *, idle: float, copy: float, compute: float, waited_s: float = 0.0
) -> None:
    """A step whose copy ends just before the step begins, `idle` milliseconds after the last one."""
    queue.now += idle - copy
    times.copy_edge()
    queue.now += copy
    times.copy_edge()
    times.compute_begins()
    queue.now += compute
    times.compute_ends()
    times.step_ends(waited_s, first=False)


def test_events_are_read_once_the_device_has_passed_them_and_then_reused() -> None:
    queue = Queue()
    times = DeviceTimes(queue.event)
    for _ in range(3):
        on_device(times, queue, idle=4.0, copy=2.0, compute=30.0, waited_s=0.001)
    assert list(times.passed()) == []
    queue.reached = 68.0
    first, second = times.passed()
    assert first.idle_s is None, "nothing came before it"
    assert (second.idle_s, second.transfer_s, second.compute_s) == pytest.approx((0.004, 0.002, 0.03))
    queue.reached = queue.now
    assert [step.idle_s for step in times.passed()] == [pytest.approx(0.004)]
    made = queue.made
    for _ in range(2):
        on_device(times, queue, idle=4.0, copy=2.0, compute=30.0)
    assert queue.made == made


@pytest.mark.parametrize(
    ("waited", "idle", "copy", "parts"),
    [
        # The host waited, but the device still had work: nobody was starved.
        (50.0, 0.0, 2.0, (0.0, 0.0)),
        # The loader is too slow: the device runs dry for most of the host's wait, then for the copy.
        (50.0, 42.0, 2.0, (42.0, 0.0)),
        (40.0, 42.0, 2.0, (40.0, 2.0)),
        # The host was late for other reasons, such as Python or logging: that is neither waiting nor transfer.
        (0.0, 10.0, 2.0, (0.0, 2.0)),
        (0.0, 1.0, 2.0, (0.0, 1.0)),
    ],
)
def test_a_device_is_starved_only_while_it_has_nothing_to_do(
    waited: float, idle: float, copy: float, parts: tuple[float, float]
) -> None:
    step = DeviceStep(waited / 1e3, idle / 1e3, copy / 1e3, 0.03)
    assert (step.starved_s, step.exposed_transfer_s) == pytest.approx((parts[0] / 1e3, parts[1] / 1e3))


def test_a_loop_that_runs_ahead_of_its_device_reports_what_the_device_waited_for() -> None:
    queue, clock = Queue(), StepClock()
    clock._times = DeviceTimes(queue.event)
    clock.epoch_begins()
    for number in range(20):
        # The loader takes 30 ms a batch and the device 20: the host waits in the loader, and so does the device, but
        # only for the 10 ms that are missing.
        with clock.waiting():
            time.sleep(0.030)
        queue.now += 10.0 if number else 0.0
        with clock.computing():
            with clock.transferring():
                pass
            clock.data_is_there()
            clock.data_is_there()  # a second micro-batch changes nothing
            queue.now += 20.0
        queue.reached = queue.now - 40.0
        clock.step_ends([Eight()])
    interval = clock.take_interval()
    steps = 20 - 1 - 2  # the first has no step before it, and two are still on their way
    assert interval.wait_s == pytest.approx(steps * 0.010)
    assert interval.compute_s == pytest.approx((steps + 1) * 0.020)
    assert interval.transfer_s == pytest.approx(0.0)
    assert interval.epoch_starts_s == pytest.approx([0.030])
    assert list(interval.newest_steps)[-1] == pytest.approx((0.010, 0.020))
