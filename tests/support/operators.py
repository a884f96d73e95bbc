"""Counts what a piece of code asks of the device: kernels, and copies between host and device."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

# Neither moves nor computes: they allocate, or look at the same memory differently. `is_view` of an operator's schema
# covers most; these are the rest.
FREE = {
    "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "detach", "alias", "as_strided",
    "_unsafe_view", "_reshape_alias", "lift_fresh", "set_", "resize_", "is_same_size", "sym_size", "sym_stride",
    "sym_numel", "sym_storage_offset",
}  # fmt: skip


class Operators(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The operators that ran inside it."""

    def __init__(self, *, strict: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.strict = strict
        self.by_name: Counter[str] = Counter()
        self.copies = 0
        """Between two devices."""
        self.blocking: list[str] = []
        """What would make the host wait for the device: copies without `non_blocking`, and tensors on a device that are
        made from numbers of the host."""

    @property
    def kernels(self) -> int:
        return self.by_name.total()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        name = func.overloadpacket.__name__
        given, made = (_tensors(tree) for tree in ((args, kwargs), out))
        if _is_free(func, name):
            return out
        devices = {tensor.device for tensor in (*given, *made)}
        if len(devices) > 1 and name in ("_to_copy", "copy_"):
            self.copies += 1
            if not (kwargs.get("non_blocking") or (name == "copy_" and True in args[2:])):
                self.blocking.append(name)
            return out
        if name in ("scalar_tensor", "lift_fresh_copy", "_local_scalar_dense", "item", "nonzero"):
            self.blocking.append(name)
        self.by_name[name] += self._launches(name, args, made)
        return out

    def _launches(self, name: str, args: Any, made: list[Tensor]) -> int:
        if not self.strict or not name.startswith("_foreach_"):
            return 1
        lists = [group for group in args if isinstance(group, list | tuple) and group and isinstance(group[0], Tensor)]
        return 1 if _same_everywhere(lists) else max((len(group) for group in lists), default=1)


@contextmanager
def counted(*, strict: bool = False) -> Iterator[Operators]:
    """`with counted() as ops: ...`, then `ops.kernels` and `ops.copies`.

    A `_foreach_` operator is one kernel; with `strict` only if torch has a fast path for its lists. Else it launches
    one kernel for each tensor, and is counted so.
    """
    operators = Operators(strict=strict)
    with operators:
        yield operators


def _same_everywhere(lists: list[Any]) -> bool:
    """Whether all lists go in step: the tensors at each place agree in shape and strides, and all of them in type."""
    dtypes = {tensor.dtype for group in lists for tensor in group}
    devices = {tensor.device for group in lists for tensor in group}
    aligned = all(len({_layout(tensor) for tensor in row}) == 1 for row in zip(*lists, strict=False))
    dense = all(torch.ops.aten.is_non_overlapping_and_dense(tensor) for group in lists for tensor in group)
    return len(dtypes) == 1 and len(devices) == 1 and aligned and dense


def _layout(tensor: Tensor) -> tuple[Any, ...]:
    """Shape and strides; the stride of a dimension of size 1 does not count."""
    strides = tuple(stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size != 1)
    return tensor.shape, strides


def _is_free(func: Any, name: str) -> bool:
    return name in FREE or func.is_view or func.namespace == "prim"


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]
