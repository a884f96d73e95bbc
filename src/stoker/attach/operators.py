"""What one operator of torch computes and moves: FLOPs, bytes, kernels; and one step of a script, operator by operator.

Imported only where it is asked for: it needs torch.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils import flop_counter
from torch.utils._python_dispatch import TorchDispatchMode

from stoker.attach.session import Session
from stoker.attach.stage_clock import here

aten = torch.ops.aten

# At most allocates memory; no kernel runs.
_NO_KERNEL = frozenset(
    ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "lift_fresh", "as_strided_", "detach_",
     "squeeze_", "unsqueeze_", "t_", "transpose_", "set_", "resize_")
)  # fmt: skip
# Writes its first argument without reading it.
_ONLY_WRITES = frozenset(("copy_", "fill_", "zero_", "_foreach_copy_", "_foreach_zero_"))
# Tensors per launch of multi_tensor_apply, by the number of lists (depth_to_max_tensors in
# ATen/native/cuda/MultiTensorApply.cuh).
_TENSORS_A_LAUNCH = {1: 110, 2: 64, 3: 48, 4: 36, 5: 30}


class Call:
    """An operator that was called, with the tensors among its arguments and results."""

    def __init__(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        self.func, self.args, self.kwargs, self.out = func, args, kwargs, out
        self.given = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        # Not every leaf is a tensor: an operator without a result returns None.
        self.made = [leaf for leaf in pytree.tree_leaves(out) if isinstance(leaf, Tensor)]


def operator_facts(call: Call, fresh: list[Tensor], phase: str) -> dict[str, Any] | None:
    """The fields of a `TracedOp` (stoker.plan.records); None if it runs nothing on a device, such as a view. `fresh`:
    those of its results that are not views of something older."""
    func, args, kwargs, given = call.func, call.args, call.kwargs, call.given
    name = func._overloadpacket.__name__
    mutable = func._schema.is_mutable
    if name in _NO_KERNEL or func.namespace != "aten" or not (fresh or mutable):
        return None
    changed = _changed(func, args, kwargs) if mutable else []
    read = given[1:] if name in _ONLY_WRITES else given
    numbers = [tensor for tensor in (*given, *call.made) if tensor.is_floating_point()]
    return {
        "name": name,
        "phase": phase,
        "flops": _flops(call),
        # Integers are moved, not computed with: datasheets have no peak rate for them.
        "dtype": str(numbers[0].dtype).removeprefix("torch.") if numbers else "float32",
        "read_bytes": bytes_of(read),
        "written_bytes": bytes_of([*fresh, *changed]),
        "kernels": _kernels(name, args),
        "depthwise": _is_depthwise(func, args),
        "volumetric": "convolution" in name and given[0].ndim == 5,
    }


def is_channels_last(tensor: Tensor) -> bool:
    """Whether images or volumes are stored with their channels last."""
    wanted = torch.channels_last_3d if tensor.ndim == 5 else torch.channels_last
    return tensor.ndim in (4, 5) and tensor.is_contiguous(memory_format=wanted)


def convolution_backward_flops(grad_output: Any, inputs: Any, weight: Any, *arguments: Any, **_named: Any) -> int:
    """FLOPs of `aten.convolution_backward` from its arguments (tensors or shapes): each gradient costs a forward pass.

    torch's own formula counts the gradient of a grouped convolution's weight `groups` times over, which makes
    EfficientNet-B0 fourteen times as expensive as it is (torch 2.15).
    """
    # After the three tensors: bias_sizes, stride, padding, dilation, transposed, output_padding, groups, output_mask.
    transposed, wanted = arguments[4], arguments[7]
    shape = _shape(inputs)
    positions = shape if transposed else _shape(grad_output)
    forward = 2 * shape[0] * prod(positions[2:]) * prod(_shape(weight))
    return forward * sum(map(bool, wanted[:2]))


CORRECTED_FORMULAS: Mapping[Any, Callable[..., int]] = {aten.convolution_backward: convolution_backward_flops}
"""Corrections for torch.utils.flop_counter."""


# Attention has other names on the CPU; of its arguments, only the tensors at the front count.
_ATTENTION: dict[Any, tuple[Any, int]] = {
    aten._scaled_dot_product_flash_attention_for_cpu: (flop_counter.sdpa_flop_count, 3),
    aten._scaled_dot_product_flash_attention_for_cpu_backward: (flop_counter.sdpa_backward_flop_count, 4),
}


def _flops(call: Call) -> int:
    packet = call.func._overloadpacket
    if packet in _ATTENTION:
        count, tensors = _ATTENTION[packet]
        return int(count(*(tensor.shape for tensor in call.args[:tensors])))
    formula = CORRECTED_FORMULAS.get(packet) or flop_counter.flop_registry.get(packet)
    return 0 if formula is None else int(formula(*call.args, **call.kwargs, out_val=call.out))


def bytes_of(tensors: list[Tensor]) -> int:
    """Bytes of the distinct tensors; an expanded tensor counts as its storage."""
    seen: dict[tuple[int, int, int], int] = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        key = (storage._cdata, int(tensor.storage_offset()), tensor.numel())
        seen[key] = min(tensor.numel() * tensor.element_size(), storage.nbytes())
    return sum(seen.values())


def _changed(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    found: list[Tensor] = []
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = args[place] if place < len(args) else kwargs.get(argument.name)
        found += [one for one in (value if isinstance(value, (list, tuple)) else [value]) if isinstance(one, Tensor)]
    return found


def _is_depthwise(func: Any, args: Any) -> bool:
    if func is aten.convolution.default:
        weight, groups = args[1], args[8]
    elif func is aten.convolution_backward.default:
        weight, groups = args[2], args[9]
    else:
        return False
    return bool(groups > 1 and weight.shape[1] == 1)


def _kernels(name: str, args: Any) -> int:
    if name == "convolution_backward":
        return max(1, sum(bool(wanted) for wanted in args[10][:2]))
    lists = [value for value in args if isinstance(value, (list, tuple)) and value and isinstance(value[0], Tensor)]
    if not lists or not name.startswith(("_foreach_", "_fused_", "_amp_")):
        return 1
    return -(-max(map(len, lists)) // _TENSORS_A_LAUNCH.get(len(lists), 30))


def _shape(value: Any) -> tuple[int, ...]:
    return tuple(value.shape) if isinstance(value, Tensor) else tuple(value)


FILE = "step-{pid}.json"
MOST_OPERATORS = 200_000


class StepTrace(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records what runs in this thread between `begin` and `end`, except for what prepares batches.

    For `--pace a100-80` the doctor adds up what each operator would take there. They run as they would without it."""

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
        depth = torch._C._len_torch_dispatch_stack()
        if depth and torch._C._get_dispatch_stack_at(depth - 1) is self:
            self.__exit__(None, None, None)
        else:
            # Something that was entered after us is still open: only it may leave first.
            self._failure = "the script opened a mode of torch's in the step, and left it open"

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if self._failure is None and not here.preparing:
            try:
                self._record(Call(func, args, kwargs, out))
            except Exception as error:  # the script comes first
                self._failure = f"{func} could not be traced: {type(error).__name__}: {error}"
        return out

    def _record(self, call: Call) -> None:
        known = {tensor.untyped_storage()._cdata for tensor in call.given}
        fresh = [tensor for tensor in call.made if tensor.untyped_storage()._cdata not in known]
        phase = "backward"
        if torch._C._current_graph_task_id() == -1:  # outside autograd's engine
            # An optimizer changes weights, which needs gradients switched off.
            phase = "forward" if torch.is_grad_enabled() else "update"
        op = operator_facts(call, fresh, phase)
        if op is None:
            return
        if op["name"] == "convolution":
            images = call.given[0]
            self._convolutions[is_channels_last(images) and not images.is_contiguous()] += 1
        self._ops.append(op)
        if len(self._ops) > MOST_OPERATORS:
            raise ValueError(f"a step has more than {MOST_OPERATORS:,} operators")


def uses_compile() -> bool:
    """Whether something was compiled so far: its operators are not torch's own."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    return dynamo is not None and dynamo.counters["frames"]["total"] > 0
