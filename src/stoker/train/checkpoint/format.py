"""One checkpoint in one file: a training state as safetensors and JSON, hashed, without pickle.

    8 bytes    length of the header
    header     JSON: our metadata (format, two hashes, the state as JSON text), then name, type, shape and offsets
               of every tensor
    tensors    one after the other

Any safetensors reader opens the file. The library itself neither writes nor reads it here: it cannot hash the bytes
in the pass that moves them, nor fill in a hash afterwards, and its memory map would turn a disk error into SIGBUS.

The hash in the header covers the header; the tensors' hash, which is part of the header, covers the rest.

In the state's text, an object whose first key starts with `$` stands for what JSON lacks: `$tensor`, `$array` (numpy),
`$tuple`, `$dict` (keys that are not text), `$float` (nan, inf), `$bytes`.
"""

from __future__ import annotations

import base64
import errno
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
import xxhash

from stoker.core.errors import UserError
from stoker.core.files import atomic_file, open_regular


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


DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
WHOLE_NUMBERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

FORMAT = "stoker checkpoint 1"
NO_HASH = "0" * 32
OPENING = f'{{"__metadata__":{{"format":"{FORMAT}","header_xxh3_128":"'.encode()
BETWEEN = b'","tensors_xxh3_128":"'
HEADER_HASH = slice(8 + len(OPENING), 8 + len(OPENING) + 32)
TENSORS_HASH = slice(HEADER_HASH.stop + len(BETWEEN), HEADER_HASH.stop + len(BETWEEN) + 32)
# safetensors' own limit; the header of ResNet-50 with optimizer and EMA takes 0.1 MB.
LARGEST_HEADER = 100_000_000
MOST_DIMENSIONS = 64

Stop = Callable[[str], None]
"""Called at named points of a save; tests kill the process there."""
TensorTable = dict[str, tuple[torch.dtype, tuple[int, ...], int]]
"""Type, shape and bytes by name, in the order of the file."""


def no_stop(point: str) -> None:
    """The `Stop` of every real save."""


class CheckpointCorrupt(UserError):
    """A checkpoint whose content cannot be trusted; names the file and what is wrong with it."""

    def __init__(self, path: Path, what: str) -> None:
        others = sorted(other.name for other in path.parent.glob("*.ckpt") if other != path)
        super().__init__(
            "checkpoint-corrupt",
            f"{path} {what}",
            why="none of it was loaded: a wrong weight would spoil the run unnoticed",
            # The hint never says to delete it: a part of somebody's best model may still be worth saving.
            hint=f"--resume {path.parent / others[-1]} (beside it: {', '.join(others[:6])})"
            if others
            else "copy it again from where it came; run_name=NAME for a new run beside it; --fresh, which keeps it",
        )


class CheckpointForeign(UserError):
    """A file that another program wrote: nothing is wrong with it, but a run cannot be resumed from it."""

    def __init__(self, path: Path, what: str) -> None:
        super().__init__(
            "checkpoint-foreign",
            f"{path} {what}",
            why="only a checkpoint of stoker holds what a run needs to resume; the file was left as it is",
            hint=f"stoker train CONFIG --from {path} starts a new run with its weights; so does weights={path}",
        )


def write_checkpoint(
    path: Path,
    state: Mapping[Any, Any] | FlatState,
    *,
    stop: Stop = no_stop,
    before_rename: Callable[[], None] = lambda: None,
) -> None:
    """Writes the whole state to `path`, or leaves the old file untouched."""
    flat = flatten(state)
    stop("before temp")
    with atomic_file(path, "wb") as stream:
        _write_to(stream, flat, stop)
        before_rename()
        stop("before rename")
    stop("after rename")


def read_checkpoint(path: Path) -> dict[Any, Any]:
    """The state as it was saved, every bit checked, its tensors on the CPU."""
    with _opened(path) as stream:
        text, table, tensors_hash = _read_header(stream, path)
        tensors = {}
        digest = xxhash.xxh3_128()
        for name, (dtype, shape, size) in table.items():
            try:
                data = torch.empty(size, dtype=torch.uint8)
            except RuntimeError as error:
                raise UserError("checkpoint-unreadable", f"{path}: no memory for a tensor of {size:,} bytes") from error
            view = memoryview(data.numpy())  # type: ignore[arg-type]
            if stream.readinto(view) != size:  # type: ignore[attr-defined]
                raise CheckpointCorrupt(path, f"ends within {name}")
            digest.update(view)
            with _checking_content(path):
                tensors[name] = data.view(dtype).reshape(shape) if size else torch.empty(shape, dtype=dtype)
        if digest.hexdigest() != tensors_hash:
            raise CheckpointCorrupt(path, "holds tensors that differ from what was saved (hash mismatch)")
    with _checking_content(path):
        return rebuild(text, tensors)


def peek(path: Path, *parts: str) -> dict[str, Any]:
    """Parts of the state that hold plain data, without reading the tensors; None for a part that is not there."""
    with _opened(path) as stream:
        text, _, _ = _read_header(stream, path)
    with _checking_content(path):
        tree = json.loads(text)
        return {part: decode(tree.get(part), {}) for part in parts}


def is_ours(path: Path) -> bool:
    """Whether a file is a checkpoint of stoker, whole or damaged; a file that cannot be read is not."""
    try:
        with open_regular(path) as stream:
            start = stream.read(8 + len(OPENING))
            return _what_else(start, os.fstat(stream.fileno()).st_size) is None
    except OSError:
        return False


def _write_to(stream: BinaryIO, flat: FlatState, stop: Stop) -> None:
    """Writes a state to an empty file and waits until it is on the disk."""
    header, names = _header_of(flat)
    total = sum(tensor.nbytes for tensor in flat.tensors.values())
    stream.write(header)
    digest, written, past_half = xxhash.xxh3_128(), 0, False
    for name in names:
        data = _bytes_of(flat.tensors[name])
        digest.update(data)
        stream.write(data)
        written += len(data)
        if written * 2 >= total and not past_half:
            past_half = True
            stream.flush()
            stop("half of temp")
    # One pass over the tensors: the hashes are filled in once they are known.
    header[TENSORS_HASH] = digest.hexdigest().encode()
    header[HEADER_HASH] = xxhash.xxh3_128(header).hexdigest().encode()
    stream.seek(0)
    stream.write(header)
    stream.flush()
    os.fsync(stream.fileno())
    stop("after temp")


def _header_of(flat: FlatState) -> tuple[bytearray, list[str]]:
    """Length and header, its hashes still zero, and the names in the order in which the tensors must follow."""
    for name, tensor in flat.tensors.items():
        if tensor.dtype not in DTYPE_NAMES:
            raise TypeError(f"{name} has type {tensor.dtype}, which safetensors cannot hold")
    # Wide types first, so that every tensor is aligned: the format allows no gaps.
    names = sorted(flat.tensors, key=lambda name: -flat.tensors[name].element_size())
    metadata = {"format": FORMAT, "header_xxh3_128": NO_HASH, "tensors_xxh3_128": NO_HASH, "state": flat.text}
    document: dict[str, Any] = {"__metadata__": metadata}
    start = 0
    for name in names:
        tensor = flat.tensors[name]
        end = start + tensor.nbytes
        document[name] = {
            "dtype": DTYPE_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
        start = end
    text = json.dumps(document, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return bytearray(len(text).to_bytes(8, "little") + text), names


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    # numpy reorders channels_last, not torch: in the writer thread, torch would start a second team of threads beside
    # the loop's. As whole numbers, because numpy does not know bfloat16.
    whole_numbers = tensor.detach().cpu().view(WHOLE_NUMBERS[tensor.element_size()]).numpy()
    return memoryview(np.ascontiguousarray(whole_numbers).reshape(-1).view(np.uint8))  # type: ignore[arg-type]


@contextmanager
def _opened(path: Path) -> Iterator[BinaryIO]:
    """The open file; disk errors are raised as errors for users."""
    try:
        with open_regular(path) as stream:
            yield stream
    except OSError as error:
        if error.errno == errno.EIO:
            raise CheckpointCorrupt(path, "cannot be read: the disk reports an error") from error
        raise UserError("checkpoint-unreadable", f"{path} cannot be read: {error.strerror or error}") from error


@contextmanager
def _checking_content(path: Path) -> Iterator[None]:
    """For content that makes no sense although the hashes match: not written by stoker, or forged."""
    try:
        yield
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RuntimeError) as error:
        raise CheckpointCorrupt(path, f"makes no sense: {type(error).__name__}: {str(error)[:200]}") from error


def _read_header(stream: BinaryIO, path: Path) -> tuple[str, TensorTable, str]:
    """The state's text, the table of tensors and their hash; leaves the stream at the first tensor."""
    size = os.fstat(stream.fileno()).st_size
    start = stream.read(8 + len(OPENING))
    if start[8:] != OPENING:
        if (what := _what_else(start, size)) is not None:
            raise CheckpointForeign(path, what)
        begins = "does not begin as this version of stoker writes it"
        raise CheckpointCorrupt(path, f"ends after {size} bytes" if size < 8 + len(OPENING) else begins)
    length = int.from_bytes(start[:8], "little")
    # Checked before anything is allocated: the length is whatever the file says.
    if not TENSORS_HASH.stop - 8 < length <= min(size - 8, LARGEST_HEADER):
        raise CheckpointCorrupt(path, f"says its header has {length} bytes; the file has {size}")
    raw = bytearray(start + stream.read(8 + length - len(start)))
    if len(raw) != 8 + length:
        raise CheckpointCorrupt(path, "ends within its header")
    expected = raw[HEADER_HASH].decode("ascii", "replace")
    raw[HEADER_HASH] = NO_HASH.encode()
    if xxhash.xxh3_128(raw).hexdigest() != expected:
        raise CheckpointCorrupt(path, "holds a header that differs from what was saved (hash mismatch)")
    with _checking_content(path):
        document = json.loads(raw[8:])
        metadata = document.pop("__metadata__")
        text, tensors_hash = metadata["state"], metadata["tensors_xxh3_128"]
        table, end = _checked_table(document)
    if 8 + length + end != size:
        raise CheckpointCorrupt(path, f"has {size} bytes and must have {8 + length + end}")
    return text, table, tensors_hash


def _checked_table(document: dict[str, Any]) -> tuple[TensorTable, int]:
    """The table of tensors, and where the last one ends; ValueError if it contradicts itself."""
    table: TensorTable = {}
    position = 0
    for name, entry in sorted(document.items(), key=lambda item: tuple(item[1]["data_offsets"])):
        dtype, shape, (start, end) = DTYPES[entry["dtype"]], entry["shape"], entry["data_offsets"]
        if len(shape) > MOST_DIMENSIONS or not all(type(number) is int and number >= 0 for number in (*shape, end)):
            raise ValueError(f"{name} has an impossible shape")
        if start != position or end - start != math.prod(shape) * dtype.itemsize:
            raise ValueError(f"{name} is not at the offset it must have")
        table[name] = (dtype, tuple(shape), end - start)
        position = end
    return table, position


def _what_else(start: bytes, size: int) -> str | None:
    """What a file is, from its first bytes; None if they are ours, or a damaged version of ours."""
    opening = start[8:]
    # A file of ours with a few flipped bytes is damaged, not foreign.
    agree = sum(a == b for a, b in zip(opening, OPENING, strict=False))
    if size <= 8 or agree >= 0.9 * len(opening):
        return None
    if start.startswith(b"PK"):
        return "is a zip file, as torch.save writes it (Lightning, timm, torchvision)"
    if start.startswith(b"\x80"):
        return "is a pickle, as torch wrote before version 1.6"
    if opening[:1] == b"{" and int.from_bytes(start[:8], "little") < size:
        return "is a safetensors file of another program"
    return "is not a checkpoint of stoker"
