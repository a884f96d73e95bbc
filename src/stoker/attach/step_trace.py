"""One step of the script, operator by operator: for `--pace a100-80` the doctor adds up what each would take there.

Imported only where a trace was asked for: it needs torch. The operators run as they would without it.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from stoker.attach.operators import is_channels_last, operator_facts
from stoker.attach.session import Session
from stoker.attach.stage_clock import here

FILE = "step-{pid}.json"
MOST_OPERATORS = 200_000


class StepTrace(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records what runs in this thread between `begin` and `end`, except for what prepares batches."""

    def __init__(self, wanted_dtype: str | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._wanted_dtype = wanted_dtype
        self._ops: list[dict[str, Any]] = []
        self._convolutions = [0, 0]
        self._failure: str | None = None

    def begin(self) -> None:
        self.__enter__()  # type: ignore[no-untyped-call]

    def end(self, batches: int, opened: Session) -> None:
        """Stops recording, and writes what was recorded while the loop took this many batches."""
        self.leave()
        if self._failure is None and not self._ops:
            self._failure = "nothing was computed in the thread that takes the batches"
        if self._failure is not None:
            opened.say(untraced=self._failure)
            return
        contiguous, last = self._convolutions
        products = torch.backends.cudnn.allow_tf32 if contiguous + last else torch.backends.cuda.matmul.allow_tf32
        document = {
            "batches": batches,
            "channels_last": last > contiguous,
            "tf32": bool(products),
            "wanted_dtype": self._wanted_dtype,
            "ops": self._ops,
        }
        path = os.path.join(opened.folder, FILE.format(pid=os.getpid()))  # noqa: PTH118
        with open(f"{path}.part", "w") as stream:  # noqa: PTH123
            json.dump(document, stream)
        os.replace(f"{path}.part", path)  # noqa: PTH105

    def leave(self) -> None:
        """Stops recording."""
        if _innermost_mode() is self:
            self.__exit__(None, None, None)
        else:
            # Something that was entered after us is still open: only it may leave first.
            self._failure = "the script opened a mode of torch's in the step, and left it open"

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if self._failure is None and not here.preparing:
            try:
                self._record(func, args, kwargs, out)
            except Exception as error:  # the script comes first
                self._failure = f"{func} could not be traced: {type(error).__name__}: {error}"
        return out

    def _record(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        given = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        made = [leaf for leaf in pytree.tree_leaves(out) if isinstance(leaf, Tensor)]
        known = {tensor.untyped_storage()._cdata for tensor in given}
        fresh = [tensor for tensor in made if tensor.untyped_storage()._cdata not in known]
        op = operator_facts(func, args, kwargs, out, given, made, fresh, _phase())
        if op is None:
            return
        if op["name"] == "convolution":
            self._convolutions[is_channels_last(given[0]) and not given[0].is_contiguous()] += 1
        self._ops.append(op)
        if len(self._ops) > MOST_OPERATORS:
            raise ValueError(f"a step has more than {MOST_OPERATORS:,} operators")


def uses_compile() -> bool:
    """Whether something was compiled so far: its operators are not torch's own."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    return dynamo is not None and dynamo.counters["frames"]["total"] > 0


def _phase() -> str:
    if torch._C._current_graph_task_id() != -1:  # inside autograd's engine
        return "backward"
    # An optimizer changes weights, which needs gradients switched off.
    return "forward" if torch.is_grad_enabled() else "update"


def _innermost_mode() -> Any:
    depth = torch._C._len_torch_dispatch_stack()
    return torch._C._get_dispatch_stack_at(depth - 1) if depth else None
