"""A training state as one JSON text and a table of named tensors, and back.

What JSON lacks is marked by an object with one key that starts with `$`:
`$tensor`, `$array` (numpy), `$tuple`, `$dict` (keys that are not text), `$float` (nan, inf), `$bytes`.
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch


@dataclass(frozen=True)
class FlatState:
    """A state taken apart; equal to it until one of its tensors changes."""

    text: str
    """The tree as JSON, with names where tensors stood."""
    tensors: dict[str, torch.Tensor]
    """Every tensor once, also where it stood in the tree twice (tied weights)."""


def flatten(state: Mapping[Any, Any] | FlatState) -> FlatState:
    """The state as text and tensors, without copying any; a mapping of another kind comes back as a dict."""
    if isinstance(state, FlatState):
        return state
    taking = _Taking()
    tree = taking.encode(state, "")
    return FlatState(json.dumps(tree, separators=(",", ":"), allow_nan=False), taking.tensors)


def rebuild(text: str, tensors: Mapping[str, torch.Tensor]) -> dict[Any, Any]:
    """The state that was flattened; tensors that were one are one again. Raises ValueError where it makes no sense."""
    state = _decode(json.loads(text), tensors)
    if not isinstance(state, dict):
        raise ValueError("the state is no dict")
    return state


def plain_part(text: str) -> dict[Any, Any]:
    """The same tree with None where a tensor stood."""
    return rebuild(text, _Absent())


# Both are asked for every tensor of every save, while the loop stands still; a model has few shapes.
@lru_cache(maxsize=4096)
def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The strides of a tensor of this shape in plain (C) order, as torch gives them."""
    strides: list[int] = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


@lru_cache(maxsize=4096)
def is_dense(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Whether the elements fill one stretch of memory without holes or overlaps, in whatever order."""
    expected = 1
    for stride, size in sorted(pair for pair in zip(strides, shape, strict=True) if pair[1] != 1):
        if stride != expected:
            return False
        expected *= size
    return True


class _Absent(Mapping[str, Any]):
    """Stands for every tensor when only the rest is wanted."""

    def __getitem__(self, name: str) -> None:
        return None

    def __iter__(self) -> Any:
        return iter(())

    def __len__(self) -> int:
        return 0


class _Taking:
    """One walk over a state."""

    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self._known: dict[tuple[Any, ...], str] = {}

    def encode(self, value: Any, path: str) -> Any:
        if isinstance(value, torch.Tensor):
            return self._encode_tensor(value, path)
        if value is None or isinstance(value, bool | int | str):
            return value
        if isinstance(value, float):
            # repr, which json uses, gives back the same bits for every finite float.
            return value if math.isfinite(value) else {"$float": repr(float(value))}
        if isinstance(value, Mapping):
            return self._encode_mapping(value, path)
        if isinstance(value, list):
            return [self.encode(item, f"{path}.{number}") for number, item in enumerate(value)]
        if isinstance(value, tuple):
            return {"$tuple": [self.encode(item, f"{path}.{number}") for number, item in enumerate(value)]}
        if isinstance(value, np.ndarray):
            copy = torch.from_numpy(np.array(value, order="C", ndmin=1))
            return {"$array": self._name_of(copy, path), "shape": value.shape}
        if isinstance(value, bytes):
            return {"$bytes": base64.b64encode(value).decode()}
        raise TypeError(f"{path.lstrip('.')} is a {type(value).__module__}.{type(value).__qualname__}: not plain data")

    def _encode_mapping(self, value: Mapping[Any, Any], path: str) -> Any:
        if all(isinstance(key, str) and not key.startswith("$") for key in value):
            return {key: self.encode(item, f"{path}.{key}") for key, item in value.items()}
        items = [[self.encode(key, path), self.encode(item, f"{path}.{key}")] for key, item in value.items()]
        return {"$dict": items}

    def _encode_tensor(self, tensor: torch.Tensor, path: str) -> Any:
        if tensor.layout != torch.strided:
            raise TypeError(f"{path.lstrip('.')} is a tensor of layout {tensor.layout}: only dense ones can be saved")
        shape, strides = tensor.shape, tensor.stride()
        if strides == contiguous_strides(shape) or not is_dense(shape, strides):
            return {"$tensor": self._name_of(tensor, path)}
        # channels_last must come back as channels_last: the kernels that it selects round differently.
        return {"$tensor": self._name_of(tensor, path), "strides": list(strides)}

    def _name_of(self, tensor: torch.Tensor, path: str) -> str:
        place = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        if tensor.numel() and place in self._known:
            return self._known[place]
        name = wanted = path.lstrip(".") or "state"
        number = 1
        # {"a.b": x} and {"a": {"b": y}} lead to the same path; the format keeps one name for itself.
        while name in self.tensors or name == "__metadata__":
            number += 1
            name = f"{wanted}~{number}"
        self.tensors[name] = tensor
        self._known[place] = name
        return name


def _decode(value: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    if isinstance(value, list):
        return [_decode(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    mark = next(iter(value), "")
    if not mark.startswith("$"):
        return {key: _decode(item, tensors) for key, item in value.items()}
    if mark not in _READERS:
        raise ValueError(f"unknown mark {mark}")
    return _READERS[mark](value, tensors)


def _tensor(mark: dict[str, Any], tensors: Mapping[str, torch.Tensor]) -> Any:
    tensor, strides = tensors[mark["$tensor"]], mark.get("strides")
    if tensor is None or strides is None or tensor.stride() == tuple(strides):
        return tensor
    if not is_dense(tensor.shape, tuple(strides)):
        raise ValueError(f"impossible strides {strides}")
    # The storage is swapped and not the object: every place that shares this tensor sees the same one.
    ordered = torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device).copy_(tensor)
    return tensor.set_(ordered.untyped_storage(), 0, ordered.shape, ordered.stride())


def _array(mark: dict[str, Any], tensors: Mapping[str, torch.Tensor]) -> Any:
    tensor = tensors[mark["$array"]]
    return None if tensor is None else tensor.cpu().numpy().reshape(mark["shape"])


_READERS: dict[str, Callable[[dict[str, Any], Mapping[str, torch.Tensor]], Any]] = {
    "$tensor": _tensor,
    "$array": _array,
    "$tuple": lambda mark, tensors: tuple(_decode(item, tensors) for item in mark["$tuple"]),
    "$dict": lambda mark, tensors: {_decode(key, tensors): _decode(item, tensors) for key, item in mark["$dict"]},
    "$float": lambda mark, _: float(mark["$float"]),
    "$bytes": lambda mark, _: base64.b64decode(mark["$bytes"], validate=True),
}
