"""Watches every operator of a step: what it allocates, when that is freed, and what it computes."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from stoker.facts.plan import Phase, TracedOp
from stoker.planning.trace_ops import convolution_workspace, traced_op

Category = Literal[
    "parameters", "gradients", "optimizer", "ema", "activations", "temporary", "batch", "workspace"
]  # fmt: skip
_UPDATE_PREFIXES = ("_foreach_", "_fused_", "_amp_")


@dataclass(slots=True)
class Storage:
    """One piece of memory over its life."""

    size: int
    born_in: Phase | None
    """None: while model, optimizer or batch were made."""
    category: Category = "temporary"


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Events and operators of all that runs inside it."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.storages: list[Storage] = []
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
        """What is allocated inside belongs to `category`."""
        before, self._default = self._default, category
        try:
            yield
        finally:
            self._default = before

    def begin_step(self, *, watch_ops: bool) -> None:
        self._stage, self._watch_ops, self._going_back = "forward", watch_ops, False

    def end_step(self) -> None:
        self._stage = None

    def begin_update(self, *_: Any) -> None:
        self._stage = "update"

    def enter_model(self, *_: Any) -> None:
        self._in_model += 1
        self._going_back = False

    def leave_model(self, *_: Any) -> None:
        self._in_model -= 1

    def mark(self, tensors: Iterable[Tensor], category: Category) -> None:
        """Says what the memory of these tensors is for."""
        for tensor in tensors:
            known = self._living.get(tensor.untyped_storage()._cdata)
            if known is not None:
                self.storages[known[0]].category = category

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "prim":
            return func(*args, **kwargs)
        backward = torch._C._current_graph_task_id() != -1  # inside autograd's engine
        if func is torch.ops.aten._local_scalar_dense.default and not self._in_model and not backward:
            return self._answer(args[0])
        if func.__name__.startswith("_amp_foreach_non_finite"):
            self._overflows.add(args[1].untyped_storage()._cdata)
        if backward and not self._going_back and self._stage is not None:
            self._keep_for_backward()
        out = func(*args, **kwargs)
        given = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        # Not every leaf: an operator with nothing to return returns None.
        made = [leaf for leaf in pytree.tree_leaves(out) if isinstance(leaf, Tensor)]
        phase = self._phase(func, backward)
        fresh = [tensor for tensor in made if self._allocate(tensor, phase, backward)]
        if fresh and phase == "forward":
            self._recognise_weight_copies(func, given, fresh)
        if phase is not None:
            if "convolution" in func.__name__:
                self._borrow(convolution_workspace(func, args, kwargs, out))
            if self._watch_ops:
                op = traced_op(func, args, kwargs, out, given, made, fresh, phase)
                if op is not None:
                    self.ops.append(op)
        return out

    def _answer(self, tensor: Tensor) -> bool | int | float:
        """What the step itself asks: is the loss finite (yes), was there an overflow (no), the how-manieth step."""
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
        # Unscaling and clipping come before the optimizer's own step, and are over all gradients at once.
        return "update" if func.__name__.startswith(_UPDATE_PREFIXES) else self._stage

    def _allocate(self, tensor: Tensor, phase: Phase | None, backward: bool) -> bool:
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key in self._living or size == 0:
            return False
        number = len(self.storages)
        # With gradients on inside the engine, a checkpointed part is computed once more.
        again = backward and torch.is_grad_enabled()
        self.storages.append(Storage(size, phase, "activations" if again else self._default))
        self.events.append(number)

        def freed(_: Any, key: int = key, number: int = number) -> None:
            del self._living[key]
            self.events.append(~number)

        self._living[key] = number, weakref.ref(storage, freed)
        return True

    def _borrow(self, sizes: Iterable[int]) -> None:
        """Memory that an operator takes and gives back by itself."""
        for size in sizes:
            if size:
                self.events += [len(self.storages), ~len(self.storages)]
                self.storages.append(Storage(size, None, "workspace"))

    def _keep_for_backward(self) -> None:
        """What of the forward pass still lives when the backward pass begins is kept for it."""
        self._going_back = True
        for number, _ in self._living.values():
            storage = self.storages[number]
            if storage.born_in == "forward" and storage.category == "temporary":
                storage.category = "activations"

    def _recognise_weight_copies(self, func: Any, given: list[Tensor], fresh: list[Tensor]) -> None:
        """Autocast's half copies of weights live as long as the activations, but do not grow with the batch."""
        if func is not torch.ops.aten._to_copy.default or not given:
            return
        source = self._living.get(given[0].untyped_storage()._cdata)
        if source is not None and self.storages[source[0]].category == "parameters":
            self.mark(fresh, "parameters")
