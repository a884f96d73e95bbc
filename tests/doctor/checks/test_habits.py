"""Habits of a loop are named with their lines if they were seen, and only then."""

from __future__ import annotations

from typing import Any

import pytest

from stoker.doctor.checks.verdict import judge
from stoker.profile.observed import DeviceRead, LoopHabits, Preparation
from tests.doctor.checks.observations import healthy

MODE = "model-in-eval-mode"
READ = DeviceRead(".item()", "train.py:41", 1.0, on_device=False)


def message(finding_id: str, habits: LoopHabits, **changes: Any) -> str | None:
    """What a finding says of a loop with these habits, if there is one."""
    found = judge(healthy(habits=habits, **changes)).findings
    return next((each.seen for each in found if each.name == finding_id), None)


def test_values_read_in_every_step_are_named_with_what_they_cost_on_a_device() -> None:
    often = LoopHabits(reads=(READ, DeviceRead("float()", "metrics.py:7", 2.0, on_device=False)))
    said = message("values-read-every-step", often)
    assert "3 times (train.py:41 .item(), metrics.py:7 float())" in said
    assert "harmless on the CPU" in said
    on_device = LoopHabits(reads=(DeviceRead(".item()", "train.py:41", 1.0, on_device=True),))
    assert (message("values-read-every-step", on_device) or "").endswith("waits for the device")
    seldom = LoopHabits(reads=(DeviceRead(".item()", "train.py:41", 0.1, on_device=True),))
    assert message("values-read-every-step", seldom) is None


def test_a_model_in_eval_mode_is_named_with_the_line_that_switched_it() -> None:
    said = message(MODE, LoopHabits(in_eval_mode="ResNet", eval_at="val.py:9", eval_layers=53))
    assert said == (
        "ResNet is trained in eval mode since val.py:9: 53 layers of dropout or batch norm behave as in evaluation"
    )
    assert message(MODE, LoopHabits()) is None


def test_a_loader_that_is_made_anew_is_named_if_its_first_batches_take_time() -> None:
    anew = LoopHabits(loader_builds=5, loader_at="train.py:30")
    said = message("loader-made-anew", anew, epoch_starts_s=(2.0, 0.5, 0.5, 0.5, 0.5))
    assert "(for the loop in train.py:30), 5 times so far; the first batch then takes 500 ms, 17% of the time" in said
    assert message("loader-made-anew", anew, epoch_starts_s=(2.0, 0.01, 0.01)) is None
    assert message("loader-made-anew", LoopHabits(), epoch_starts_s=(2.0, 0.5, 0.5)) is None
    # The verdict's fix is the one that helps: a loader that is thrown away keeps no workers.
    stalls = judge(healthy(habits=anew, epoch_starts_s=(2.0, 0.5, 0.5, 0.5, 0.5)))
    assert all("DataLoader(...," not in (finding.fix or "") for finding in stalls.findings)


@pytest.mark.parametrize(
    ("validation_s", "rounds", "is_long"), [(9.0, 2, True), (4.0, 2, False), (9.0, 0, False), (None, 0, False)]
)
def test_validation_is_long_from_half_of_training_on_if_one_was_seen_to_its_end(
    validation_s: float | None, rounds: int, is_long: bool
) -> None:
    habits = LoopHabits(validations=rounds, validation_wait_s=8.0)
    said = message("long-validation", habits, validation_s=validation_s)
    assert (said is not None) is is_long
    if said is not None:
        assert said == "validation took 9 s, 47% of the time (2 times), of which 89% waits for data"


def test_cudnn_benchmark_is_named_only_where_shapes_change() -> None:
    changing = Preparation(samples=800, sample_dimensions=3, batches_seen=100, shape_changes=80)
    on, check = LoopHabits(cudnn_benchmark=True), "cudnn-benchmark-with-changing-shapes"
    assert "80 of 100 batches" in (message(check, on, preparation=changing) or "")
    same = Preparation(samples=800, sample_dimensions=3, batches_seen=100)
    assert message(check, on, preparation=same) is None
    assert message(check, LoopHabits(), preparation=changing) is None


def test_nothing_is_said_about_a_loop_that_was_not_watched() -> None:
    assert [finding.name for finding in judge(healthy()).findings] == ["compute-bound"]
