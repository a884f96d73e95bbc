"""A training step without a device: real model code on fake tensors, and what it would allocate and compute."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedOperatorException,
)
from torch.utils._python_dispatch import TorchDispatchMode

from stoker.attach.operators import Call, aten, bytes_of, is_channels_last, operator_facts
from stoker.core.errors import StokerError, UserError
from stoker.plan.autocast import cuda_autocast_rules
from stoker.plan.records import Phase, TracedOp
from stoker.train.compute import Precision
from stoker.train.ema import WeightAverage
from stoker.train.ranks import Ranks
from stoker.train.step import Pending, Prepared, TraceableStep, TrainStep

# A model without memory: the real module tree, with tensors that only have shapes.


def build_without_memory(build_model: Callable[[], nn.Module]) -> nn.Module:
    """The model on the meta device; or on the CPU, with its weights, if its constructor reads values.

    Not built under the fake mode: a fake parameter cannot change its memory format (torch refuses to swap it).
    """
    try:
        with torch.device("meta"):
            return build_model()
    except StokerError:
        raise
    except Exception:
        return build_model()


def make_fake(model: nn.Module) -> None:
    """Replaces parameters and buffers by tensors of the active fake mode; shared ones stay shared."""
    # By id, together with the original: its id stays unique only as long as it lives.
    made: dict[int, tuple[Tensor, Tensor]] = {}
    for module in model.modules():
        both: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
        for held in both:
            for name, tensor in held.items():
                if tensor is None:
                    continue
                if id(tensor) not in made:
                    fake = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="cpu")
                    if isinstance(tensor, nn.Parameter):
                        fake = nn.Parameter(fake, requires_grad=tensor.requires_grad)
                    made[id(tensor)] = tensor, fake
                held[name] = made[id(tensor)][1]


# Records every operator of a step: what it allocates, when that is freed, and what it computes.

Category = Literal[
    "parameters", "gradients", "optimizer", "ema", "activations", "temporary", "batch", "workspace"
]  # fmt: skip
_UPDATE_PREFIXES = ("_foreach_", "_fused_", "_amp_")


@dataclass(slots=True)
class TracedStorage:
    size: int
    born_in: Phase | None
    """None: allocated while building the model, the optimizer or the batch."""
    category: Category = "temporary"


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the events and operators of everything that runs inside it."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.storages: list[TracedStorage] = []
        self.events: list[int] = []
        self.ops: list[TracedOp] = []
        self._living: dict[int, tuple[int, weakref.ref[Any]]] = {}
        self._stage: Phase | None = None
        self._default: Category = "temporary"
        self._in_model = 0
        self._going_back = False
        self._watch_ops = False
        self._overflows: set[int] = set()

    @contextmanager
    def making(self, category: Category) -> Iterator[None]:
        """Allocations inside belong to `category`."""
        before, self._default = self._default, category
        try:
            yield
        finally:
            self._default = before

    @contextmanager
    def step(self, *, watch_ops: bool) -> Iterator[None]:
        """What happens inside is a step; with `watch_ops`, its operators are recorded too."""
        self._stage, self._watch_ops, self._going_back = "forward", watch_ops, False
        yield
        self._stage = None

    def begin_update(self, *_: Any) -> None:
        self._stage = "update"

    def enter_model(self, *_: Any) -> None:
        self._in_model += 1
        self._going_back = False

    def leave_model(self, *_: Any) -> None:
        self._in_model -= 1

    def mark(self, tensors: Iterable[Tensor], category: Category) -> None:
        """Sets what the memory of these tensors is for."""
        for tensor in tensors:
            known = self._living.get(tensor.untyped_storage()._cdata)
            if known is not None:
                self.storages[known[0]].category = category

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "prim":
            return func(*args, **kwargs)
        backward = torch._C._current_graph_task_id() != -1  # inside autograd's engine
        if func is aten._local_scalar_dense.default and not self._in_model and not backward:
            return self._answer(args[0])
        if func.__name__.startswith("_amp_foreach_non_finite"):
            self._overflows.add(args[1].untyped_storage()._cdata)
        if backward and not self._going_back and self._stage is not None:
            self._keep_for_backward()
        out = func(*args, **kwargs)
        call, phase = Call(func, args, kwargs, out), self._phase(func, backward)
        fresh = [tensor for tensor in call.made if self._allocate(tensor, phase, backward)]
        # Autocast's half-precision copies of weights live as long as activations, but do not grow with the batch.
        if fresh and phase == "forward" and func is aten._to_copy.default and call.given:
            source = self._living.get(call.given[0].untyped_storage()._cdata)
            if source is not None and self.storages[source[0]].category == "parameters":
                self.mark(fresh, "parameters")
        if phase is not None:
            for size in filter(None, convolution_workspace(call)):
                self.events += [len(self.storages), ~len(self.storages)]
                self.storages.append(TracedStorage(size, None, "workspace"))
            if self._watch_ops:
                facts = operator_facts(call, fresh, phase)
                if facts is not None:
                    self.ops.append(TracedOp(**facts))
        return out

    def _answer(self, tensor: Tensor) -> bool | int | float:
        """Answers what the step itself reads: is the loss finite (yes), was there an overflow (no), step number (1)."""
        if tensor.dtype == torch.bool:
            return True
        if not tensor.is_floating_point():
            return 1
        return 0.0 if tensor.untyped_storage()._cdata in self._overflows else 1.0

    def _phase(self, func: Any, backward: bool) -> Phase | None:
        if self._stage is None:
            return None
        if backward:
            return "backward"
        # Unscaling and clipping run before the optimizer's own step, on all gradients at once.
        return "update" if func.__name__.startswith(_UPDATE_PREFIXES) else self._stage

    def _allocate(self, tensor: Tensor, phase: Phase | None, backward: bool) -> bool:
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key in self._living or size == 0:
            return False
        number = len(self.storages)
        # Gradients enabled inside the engine: a checkpointed part is being recomputed.
        again = backward and torch.is_grad_enabled()
        self.storages.append(TracedStorage(size, phase, "activations" if again else self._default))
        self.events.append(number)

        def freed(_: Any, key: int = key, number: int = number) -> None:
            del self._living[key]
            self.events.append(~number)

        self._living[key] = number, weakref.ref(storage, freed)
        return True

    def _keep_for_backward(self) -> None:
        """Whatever is left of the forward pass when the backward pass begins was kept for it."""
        self._going_back = True
        for number, _ in self._living.values():
            storage = self.storages[number]
            if storage.born_in == "forward" and storage.category == "temporary":
                storage.category = "activations"


# The first step allocates the optimizer's state, in gaps left by its activations; the second is like all others.
TRACED_STEPS = 2


@dataclass(frozen=True)
class Trace:
    """What a step allocates and computes, for one batch size."""

    batch: int
    sizes: tuple[int, ...]
    """Bytes of each piece of memory."""
    categories: tuple[Category, ...]
    """What each is for."""
    events: tuple[int, ...]
    """In order, from building the model to the end of the second step: `n` allocates piece n, `~n` frees it."""
    ops: tuple[TracedOp, ...]
    """Operators of the second step, in order."""
    parameters: int
    """Number of scalar parameters."""
    trained_bytes: int
    """Size of the parameters with gradients."""

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
    """The model does something that cannot be traced without data."""

    def __init__(self, operator: str, why: str) -> None:
        super().__init__(
            "model-not-traced",
            f"the model calls {operator}, which cannot be traced without data",
            why=why,
            hint="the memory of the device is estimated from a real forward pass instead",
        )
        self.operator = operator


def trace_step(step: TraceableStep, batch: int | None = None) -> Trace:
    """Two training steps with this batch size (default: the step's own); raises CannotTrace."""
    batch = step.batch_size if batch is None else batch
    model = build_without_memory(step.build_model)
    with torch.random.fork_rng(devices=[]), _recording() as recorder:
        _run(step, batch, model, recorder)
    return _traced(recorder, batch, model)


def _traced(recorder: Recorder, batch: int, model: nn.Module) -> Trace:
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
    # Its state is marked after each step; what remains is scratch (LAMB's), which no checkpoint holds.
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
    batches = _DeviceBatches(step, batch, recorder)
    result: Any = None
    for number in range(TRACED_STEPS):
        with recorder.step(watch_ops=number == TRACED_STEPS - 1):
            result = train_step([Pending(batch, batches.take) for _ in range(step.accumulation)], number)
            if ema is not None:
                ema.update()
        recorder.mark([weight.grad for weight in model.parameters() if weight.grad is not None], "gradients")
        state = [value for kept in optimizer.state.values() for value in kept.values() if isinstance(value, Tensor)]
        recorder.mark(state, "optimizer")
    del batches, result


def trace_forward(step: TraceableStep, batch: int) -> Trace:
    """One forward pass of the network without gradients, as in a prediction; raises CannotTrace."""
    model = build_without_memory(step.build_model)
    with _recording() as recorder:
        with recorder.making("parameters"):
            make_fake(model)
        model.eval()
        with recorder.making("batch"):
            inputs = step.make_batch(batch).inputs
        with recorder.step(watch_ops=True), torch.no_grad(), Precision(step.precision, torch.device("cpu")).autocast():
            output = model(inputs)
        del output
    return _traced(recorder, batch, model)


class _DeviceBatches:
    """Batches as the loop has them on the device: while one is computed, the next is already there."""

    def __init__(self, step: TraceableStep, batch: int, recorder: Recorder) -> None:
        self._step, self._batch, self._recorder = step, batch, recorder
        self._next: Prepared | None = self._make() if step.ahead else None

    def take(self) -> Prepared:
        taken = self._next if self._next is not None else self._make()
        self._next = self._make() if self._step.ahead else None
        return taken

    def _make(self) -> Prepared:
        with self._recorder.making("batch"):
            return self._step.make_batch(self._batch)


def _in_order(events: list[int]) -> Iterator[int]:
    """Sorts consecutive frees: autocast frees its copies of weights in the order of their addresses, which varies.

    It makes no difference to an allocator, which merges neighbours in any order.
    """
    for freed, run in groupby(events, key=lambda event: event < 0):
        group = list(run)
        yield from sorted(group, reverse=True) if freed else group


@contextmanager
def _recording() -> Iterator[Recorder]:
    """What runs inside is recorded, on fake tensors, with CUDA's precisions; raises CannotTrace."""
    try:
        with cuda_autocast_rules(), FakeTensorMode(allow_non_fake_inputs=True), Recorder() as recorder:
            yield recorder
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        raise CannotTrace(str(error.func), "its result depends on values, not only on shapes") from error
    except UnsupportedOperatorException as error:
        raise CannotTrace(str(error.func), "torch does not know the shape of its result") from error


def convolution_workspace(call: Call) -> list[int]:
    """Bytes of workspace that cuDNN uses for a convolution, kernel by kernel, and frees at once; none otherwise.

    By rule, because there is no cuDNN to ask. Its tensor-core kernels (half precision, and float32 as TF32) work on
    channels-last data; contiguous tensors are first converted into its workspace ('Tensor Layouts In Memory: NCHW vs
    NHWC' in NVIDIA's guide to convolutional layers). The gradient of the weights is summed in float32. Depthwise
    convolutions run in torch's own kernels, which need no workspace.
    """
    args, backward = call.args, call.func is aten.convolution_backward.default
    if not backward and call.func is not aten.convolution.default:
        return []
    first, second, weight = (args[0], args[1], args[2]) if backward else (call.out, args[0], args[1])
    groups = args[9] if backward else (args[8] if len(args) > 8 else call.kwargs.get("groups", 1))
    if groups > 1 and groups == second.shape[1]:
        return []
    converted = 0 if is_channels_last(second) else bytes_of([first]) + bytes_of([second]) + bytes_of([weight])
    if not backward:
        return [converted]
    needs_input, needs_weight, _ = args[10]
    return [converted * needs_input, (converted + 4 * weight.numel()) * needs_weight]
