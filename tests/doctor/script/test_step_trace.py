"""A step of a script, operator by operator: what is recorded, and that the script does not notice."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from stoker.attach import operators
from stoker.attach.precision import WantedPrecision
from stoker.attach.session import Session
from stoker.attach.stage_clock import here
from stoker.attach.watched_loop import TRACE_FROM, Loop
from stoker.cli import main
from stoker.doctor.script.recording import TracedStep, read_traced_step
from tests.doctor.script.conftest import SCRIPTS


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4)
    )


def trained(opened: Session | None, loop: Loop, *, accumulate: int = 1, updates: int = 5) -> nn.Module:
    """A training loop that reports its batches and updates, if there is a session."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for number in range(updates * accumulate + 1):
        here.preparing = True
        images = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(number)) @ torch.eye(16)
        here.preparing = False
        if opened is not None:
            loop._batches += 1
            loop.trace(opened) if opened.traces else None
        if number == updates * accumulate:
            break
        model(images).square().mean().backward()
        if (number + 1) % accumulate == 0:
            optimizer.step()
            optimizer.zero_grad()
            if opened is not None:
                loop.steps += 1
    return model


@pytest.fixture
def opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Session:
    # In this process other tests may have compiled something.
    monkeypatch.setattr(operators, "uses_compile", lambda: False)
    session = Session(str(tmp_path), None, None)
    session.traces = True
    return session


@pytest.mark.parametrize("accumulate", [1, 3])
def test_an_update_is_recorded_with_all_its_batches_and_the_weights_are_the_same(
    opened: Session, tmp_path: Path, accumulate: int
) -> None:
    model, plain = (trained(who, Loop(), accumulate=accumulate) for who in (opened, None))
    assert all(torch.equal(one, other) for one, other in zip(model.parameters(), plain.parameters(), strict=True))
    step = read_traced_step(tmp_path)
    assert isinstance(step, TracedStep)
    assert step.batches == accumulate
    counter = FlopCounterMode(display=False)
    with counter:
        network()(torch.randn(2, 3, 16, 16)).square().mean().backward()
    assert sum(op.flops for op in step.ops) == accumulate * counter.get_total_flops()
    assert {op.phase for op in step.ops} == {"forward", "backward", "update"}
    assert not {op.name for op in step.ops} & {"randn", "normal_"}, "what prepares a batch is not part of the step"
    convolved = [op for op in step.ops if op.name == "convolution"]
    assert len(convolved) == accumulate
    # Images, weight and bias are read, 14 x 14 of 8 channels written.
    assert convolved[0].read_bytes == 4 * (2 * 3 * 16 * 16 + 8 * 3 * 3 * 3 + 8)
    assert convolved[0].written_bytes == 4 * 2 * 8 * 14 * 14
    assert torch._C._len_torch_dispatch_stack() == 0
    assert opened.traces is False


def test_a_script_that_ends_before_is_not_traced(opened: Session, tmp_path: Path) -> None:
    loop = Loop()
    trained(opened, loop, updates=TRACE_FROM)
    assert torch._C._len_torch_dispatch_stack() == 1, "the last batch has begun a step that nobody ends"
    loop.stop_counting(opened)
    assert torch._C._len_torch_dispatch_stack() == 0
    assert "ended before" in str(read_traced_step(tmp_path))


def test_a_mode_that_is_left_open_is_not_ended_by_us(opened: Session, tmp_path: Path) -> None:
    loop = Loop()
    loop.steps = TRACE_FROM
    loop.trace(opened)
    counter = FlopCounterMode(display=False)
    with counter:
        torch.ones(2, 2) @ torch.ones(2, 2)
        loop.steps += 1
        loop.trace(opened)
    assert counter.get_total_flops() == 2 * 2**3
    assert "left it open" in str(read_traced_step(tmp_path))
    torch._C._get_dispatch_stack_at(0).leave()


def test_a_compiled_script_is_not_traced(opened: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    torch.compile(lambda value: value + 1, backend="eager")(torch.ones(1))
    trained(opened, Loop())
    assert "torch.compile" in str(read_traced_step(tmp_path))


def test_what_autocast_asks_for_on_cuda_is_known_without_a_gpu() -> None:
    wanted, before = WantedPrecision(), torch.autocast.__init__
    wanted.watch(torch.autocast)
    try:
        with pytest.warns(UserWarning, match="CUDA"):
            torch.autocast("cuda", enabled=True)
        assert wanted.dtype == "float16"
        torch.autocast("cuda", dtype=torch.float32, enabled=False)
        torch.autocast("cpu", dtype=torch.bfloat16)
        assert wanted.dtype == "float16"
        with pytest.warns(UserWarning, match="CUDA"):
            torch.autocast(device_type="cuda", dtype=torch.bfloat16)
        assert wanted.dtype == "bfloat16"
    finally:
        wanted.stop()
    assert torch.autocast.__init__ is before


def test_the_doctor_computes_a_step_of_an_unmodified_script_on_a_card(capfd: pytest.CaptureFixture[str]) -> None:
    words = [sys.executable, str(SCRIPTS / "plain.py"), "--sleep-ms", "5", "--workers", "1"]
    assert main(["doctor", "--pace", "a100-80", "--", *words]) == 0
    said = capfd.readouterr().err
    assert "the roofline of a step of the script on NVIDIA A100" in " ".join(said.split())
    assert "waiting for data 9" in said, "a tiny network takes microseconds there, and its samples 5 ms each"
