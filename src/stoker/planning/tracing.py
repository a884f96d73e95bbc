"""A training step without a device: real model code on fake tensors, and what it would allocate and compute."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedOperatorException,
)

from stoker.errors import UserError
from stoker.facts.plan import TracedOp
from stoker.planning.trace_autocast import cuda_autocast_rules
from stoker.planning.trace_model import build_without_memory, make_fake
from stoker.planning.trace_recorder import Category, Recorder
from stoker.training.ema import WeightAverage
from stoker.training.precision import Precision
from stoker.training.ranks import Ranks
from stoker.training.step import TrainStep
from stoker.training.traceable import TraceableStep

# The first step makes the optimizer's state, in the gaps that its activations left; the second is like all others.
TRACED_STEPS = 2


@dataclass(frozen=True)
class Trace:
    """What a step does to memory and asks of the device, for one batch size."""

    batch: int
    sizes: tuple[int, ...]
    """Bytes of each piece of memory."""
    categories: tuple[Category, ...]
    """What each is for."""
    events: tuple[int, ...]
    """In order, from the building of the model to the end of the second step: `n` allocates piece n, `~n` frees it."""
    ops: tuple[TracedOp, ...]
    """Of the second step, in order."""
    parameters: int
    """Numbers that the model is made of."""
    trained_bytes: int
    """Of the parameters that have gradients."""

    @property
    def flops(self) -> int:
        return sum(op.flops for op in self.ops)

    def parts_after(self, event: int) -> dict[str, int]:
        """Bytes in use by category, after that event."""
        parts: dict[str, int] = {}
        for entry in self.events[: event + 1]:
            number = entry if entry >= 0 else ~entry
            size = self.sizes[number] if entry >= 0 else -self.sizes[number]
            parts[self.categories[number]] = parts.get(self.categories[number], 0) + size
        return parts


class CannotTrace(UserError):
    """The model does something that has no answer without data."""

    def __init__(self, operator: str, why: str) -> None:
        super().__init__(
            "model-not-traced",
            f"the model calls {operator}, which cannot be followed without data",
            why=why,
            hint="the memory of the device is bounded from one real sample instead",
        )
        self.operator = operator


def trace_step(step: TraceableStep, batch: int | None = None) -> Trace:
    """Two training steps with this batch (the step's own where none is given); raises CannotTrace."""
    batch = step.batch_size if batch is None else batch
    model = build_without_memory(step.build_model)
    recorder = Recorder()
    with (
        torch.random.fork_rng(devices=[]),
        cuda_autocast_rules(),
        _naming_operators(),
        FakeTensorMode(allow_non_fake_inputs=True),
        recorder,
    ):
        _run(step, batch, model, recorder)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return Trace(
        batch=batch,
        sizes=tuple(storage.size for storage in recorder.storages),
        categories=tuple(storage.category for storage in recorder.storages),
        events=tuple(_in_order(recorder.events)),
        ops=tuple(recorder.ops),
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        trained_bytes=sum(parameter.numel() * parameter.element_size() for parameter in trained),
    )


def _run(step: TraceableStep, batch: int, model: nn.Module, recorder: Recorder) -> None:
    with recorder.making("parameters"):
        make_fake(model)
        model.train()
    with recorder.making("optimizer"):
        optimizer = step.build_optimizer(model)
    with recorder.making("ema"):
        ema = None if step.ema_decay is None else WeightAverage(model, step.ema_decay)
    with recorder.making("parameters"):  # the step keeps a copy of the buffers
        train_step = TrainStep(
            model, optimizer, step.loss, Precision(step.precision, torch.device("cpu")), Ranks(),
            micro_batch=batch, clip_grad_norm=step.clip_grad_norm, seed=0, say=lambda _text: None,
        )  # fmt: skip
    model.register_forward_pre_hook(recorder.enter_model)
    model.register_forward_hook(recorder.leave_model)
    optimizer.register_step_pre_hook(recorder.begin_update)
    prepared: Any = None
    result: Any = None
    for number in range(TRACED_STEPS):
        recorder.begin_step(watch_ops=number == TRACED_STEPS - 1)
        # As in the loop: the names are bound anew only when the new batches, and the new result, are there.
        with recorder.making("batch"):
            prepared = [step.make_batch(batch) for _ in range(step.accumulation)]
        result = train_step(prepared, number)
        if ema is not None:
            ema.update()
        recorder.end_step()
        recorder.mark(_gradients(model), "gradients")
        recorder.mark(_state(optimizer), "optimizer")
    del prepared, result


def _in_order(events: list[int]) -> Iterator[int]:
    """Frees that follow each other, sorted: autocast drops its copies of weights in the order of their addresses.

    To an allocator it is the same: neighbours are merged whichever comes first.
    """
    for freed, run in groupby(events, key=lambda event: event < 0):
        group = list(run)
        yield from sorted(group, reverse=True) if freed else group


def _gradients(model: nn.Module) -> list[Tensor]:
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def _state(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]


@contextmanager
def _naming_operators() -> Iterator[None]:
    try:
        yield
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        raise CannotTrace(str(error.func), "its result depends on the values, not only on the shapes") from error
    except UnsupportedOperatorException as error:
        raise CannotTrace(str(error.func), "torch does not know the shape of its result") from error
