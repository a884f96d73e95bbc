"""A training state as JSON text and named tensors, and back, without copying.

In the text, an object whose first key starts with `$` stands for what JSON lacks: `$tensor`, `$array` (numpy),
`$tuple`, `$dict` (keys that are not text), `$float` (nan, inf), `$bytes`.
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch


@dataclass(frozen=True)
class FlatState:
    """A state taken apart without copying: later changes to its tensors show here too."""

    text: str
    """The tree as JSON, with names in place of tensors."""
    tensors: dict[str, torch.Tensor]
    """Every tensor once, even if the tree holds it twice (tied weights)."""


def flatten(state: Mapping[Any, Any] | FlatState) -> FlatState:
    """The state as text and tensors; mappings of any kind are read back as dicts."""
    if isinstance(state, FlatState):
        return state
    flattening = _Flattening()
    tree = flattening.encode(state, "")
    return FlatState(json.dumps(tree, separators=(",", ":"), allow_nan=False), flattening.tensors)


def rebuild(text: str, tensors: Mapping[str, torch.Tensor]) -> dict[Any, Any]:
    """The state that was flattened; tied tensors are one tensor again. Raises ValueError if the text makes no sense."""
    state = decode(json.loads(text), tensors)
    if not isinstance(state, dict):
        raise ValueError("the state is not a dict")
    return state


# Both are called for every tensor of every save while the loop waits; a model has few distinct shapes.
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
    """Whether the elements fill one stretch of memory without holes or overlaps, in any order."""
    expected = 1
    for stride, size in sorted(pair for pair in zip(strides, shape, strict=True) if pair[1] != 1):
        if stride != expected:
            return False
        expected *= size
    return True


class _Flattening:
    """One walk over a state, collecting its tensors."""

    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self._known: dict[tuple[Any, ...], str] = {}

    def encode(self, value: Any, path: str) -> Any:
        if isinstance(value, torch.Tensor):
            return self._encode_tensor(value, path)
        if value is None or isinstance(value, bool | int | str):
            return value
        if isinstance(value, float):
            # json writes repr, which gives back the same bits for every finite float.
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
            raise TypeError(
                f"{path.lstrip('.')} is a tensor of layout {tensor.layout}: only dense tensors can be saved"
            )
        shape, strides = tensor.shape, tensor.stride()
        if strides == contiguous_strides(shape) or not is_dense(shape, strides):
            return {"$tensor": self._name_of(tensor, path)}
        # channels_last must be restored as channels_last: the kernels it selects round differently.
        return {"$tensor": self._name_of(tensor, path), "strides": list(strides)}

    def _name_of(self, tensor: torch.Tensor, path: str) -> str:
        place = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        if tensor.numel() and place in self._known:
            return self._known[place]
        name = wanted = path.lstrip(".") or "state"
        number = 1
        # {"a.b": x} and {"a": {"b": y}} have the same path; and safetensors reserves one name.
        while name in self.tensors or name == "__metadata__":
            number += 1
            name = f"{wanted}~{number}"
        self.tensors[name] = tensor
        self._known[place] = name
        return name


def decode(value: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """A part of the tree with its tensors in place of their names."""
    if isinstance(value, list):
        return [decode(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    mark = next(iter(value), "")
    if not mark.startswith("$"):
        return {key: decode(item, tensors) for key, item in value.items()}
    content = value[mark]
    match mark:
        case "$tensor":
            return _with_strides(tensors[content], value.get("strides"))
        case "$array":
            return tensors[content].numpy().reshape(value["shape"])
        case "$tuple":
            return tuple(decode(item, tensors) for item in content)
        case "$dict":
            return {decode(key, tensors): decode(item, tensors) for key, item in content}
        case "$float":
            return float(content)
        case "$bytes":
            return base64.b64decode(content, validate=True)
    raise ValueError(f"unknown mark {mark}")


def _with_strides(tensor: torch.Tensor, strides: list[int] | None) -> torch.Tensor:
    if strides is None or tensor.stride() == tuple(strides):
        return tensor
    if not is_dense(tensor.shape, tuple(strides)):
        raise ValueError(f"impossible strides {strides}")
    # Swaps the storage and keeps the object, so that tied tensors stay one object.
    ordered = torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype).copy_(tensor)
    return tensor.set_(ordered.untyped_storage(), 0, ordered.shape, ordered.stride())
