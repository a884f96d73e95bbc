"""Reads files of torch.save without executing anything in them.

Such a file is a zip: `data.pkl` describes objects, `data/0`, `data/1`, ... hold the tensors' bytes. A pickle is a
program for a small machine, and Python's own machine imports and calls whatever the program names. The one here imports
nothing and calls nothing: it builds numbers, texts, containers and descriptions of tensors. Every other object becomes
a `Foreign`, which keeps its class's name and its content. Checkpoints of Lightning, timm and torchvision hold many:
paths, namespaces, states of callbacks.
"""

from __future__ import annotations

import pickletools
import struct
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

# The program of ResNet-50 with momentum and average takes 0.1 MB and 20,000 instructions; one of 60,000 tensors fits.
LARGEST_PROGRAM = 32_000_000
MOST_INSTRUCTIONS = 2_000_000
MOST_DIMENSIONS = 64
STORAGES = {
    "DoubleStorage": torch.float64, "FloatStorage": torch.float32, "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16, "LongStorage": torch.int64, "IntStorage": torch.int32,
    "ShortStorage": torch.int16, "CharStorage": torch.int8, "ByteStorage": torch.uint8, "BoolStorage": torch.bool,
    "ComplexFloatStorage": torch.complex64, "ComplexDoubleStorage": torch.complex128,
}  # fmt: skip
# Given by name with tensors whose storage has no type (torch.uint16, the float8 types).
TYPES = {
    f"torch.{name}": getattr(torch, name)
    for name in (
        "float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "uint16", "uint32",
        "uint64", "bool", "complex64", "complex128", "float8_e4m3fn", "float8_e5m2",
    )
}  # fmt: skip
# Instructions that put their own argument on the stack.
_VALUES = {
    "INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT", "STRING", "BINSTRING",
    "SHORT_BINSTRING", "BINBYTES", "SHORT_BINBYTES", "BINBYTES8", "BYTEARRAY8", "UNICODE", "BINUNICODE",
    "SHORT_BINUNICODE", "BINUNICODE8",
}  # fmt: skip
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}


class NotReadable(Exception):
    """The file is damaged, or is not one of torch.save; the message says how."""


@dataclass(frozen=True, eq=False)
class Name:
    """Something that the file names by module and name; it is not imported."""

    text: str


@dataclass(eq=False)
class Foreign:
    """An object of a class that is not built here: its class's name, and its content."""

    name: str
    arguments: Any = ()
    state: Any = None
    """What its class would have restored: usually its attributes by name."""
    items: dict[Any, Any] = field(default_factory=dict)
    """Its content as a mapping."""

    def get(self, key: str) -> Any:
        """An item or an attribute, whichever it has; None without it."""
        attributes = self.state if isinstance(self.state, dict) else {}
        return self.items.get(key, attributes.get(key))


@dataclass(frozen=True, eq=False)
class Storage:
    """The bytes of one or several tensors, still in the file."""

    key: str
    dtype: torch.dtype | None
    """None: untyped; each tensor says how to read it."""


@dataclass(frozen=True, eq=False)
class SavedTensor:
    """A tensor whose bytes are still in the file."""

    storage: Storage
    dtype: torch.dtype
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class TorchFile:
    """A file of torch.save: `content` is what was saved, `load` reads a tensor of it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._storages: dict[str, Tensor] = {}
        try:
            with zipfile.ZipFile(path) as archive:
                self._top = _checked(archive, path)
                self.content = _run(archive.read(f"{self._top}/data.pkl"))
        except (zipfile.BadZipFile, OSError, EOFError, NotImplementedError, RuntimeError) as error:
            raise NotReadable(str(error) or type(error).__name__) from None

    def load(self, tensor: SavedTensor) -> Tensor:
        """The tensor, on the CPU; tensors that shared memory still do."""
        itemsize = tensor.dtype.itemsize
        count = self._bytes_of(tensor.storage.key).numel() // itemsize
        last = tensor.offset + sum(
            (size - 1) * stride for size, stride in zip(tensor.shape, tensor.strides, strict=True)
        )
        if 0 not in tensor.shape and last >= count:
            raise NotReadable(f"a tensor of {list(tensor.shape)} lies outside its {count} stored numbers")
        values = self._bytes_of(tensor.storage.key)[: count * itemsize].view(tensor.dtype)
        return values.as_strided(tensor.shape, tensor.strides, tensor.offset)

    def _bytes_of(self, key: str) -> Tensor:
        if key not in self._storages:
            try:
                with zipfile.ZipFile(self.path) as archive:
                    data = bytearray(archive.read(f"{self._top}/data/{key}"))
            except (KeyError, zipfile.BadZipFile, OSError, EOFError, RuntimeError) as error:
                raise NotReadable(f"the data of tensor {key} is missing: {error}") from None
            empty = torch.empty(0, dtype=torch.uint8)
            self._storages[key] = torch.frombuffer(data, dtype=torch.uint8) if data else empty
        return self._storages[key]


def _checked(archive: zipfile.ZipFile, path: Path) -> str:
    """The folder inside the zip; raises unless the zip is plain, whole and no larger than its file."""
    entries = archive.infolist()
    programs = [entry for entry in entries if entry.filename.count("/") == 1 and entry.filename.endswith("/data.pkl")]
    if len(programs) != 1:
        raise NotReadable("it is a zip file, but not one of torch.save")
    top = programs[0].filename.partition("/")[0]
    names = {entry.filename for entry in entries}
    if f"{top}/constants.pkl" in names:
        raise NotReadable("it is a TorchScript program, not a table of tensors")
    # torch stores without compressing; a compressed entry could grow a thousandfold in memory.
    if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):
        raise NotReadable("it is compressed, which torch never does")
    # Entries may claim the same bytes, so that a small file fills the memory.
    if sum(entry.file_size for entry in entries) > path.stat().st_size:
        raise NotReadable("its parts add up to more than the file")
    if programs[0].file_size > LARGEST_PROGRAM:
        raise NotReadable(f"it describes its content in {programs[0].file_size:,} bytes; at most {LARGEST_PROGRAM:,}")
    if (damaged := archive.testzip()) is not None:
        raise NotReadable(f"the checksum of {damaged} is wrong")
    if f"{top}/byteorder" in names and archive.read(f"{top}/byteorder") != b"little":
        raise NotReadable("it was written on a big-endian machine")
    return top


def _run(program: bytes) -> Any:
    try:
        return _Machine().run(program)
    # Errors that a nonsensical program leads to; pickletools raises the last three.
    except (IndexError, KeyError, TypeError, AttributeError, ValueError, OverflowError, struct.error) as error:
        raise NotReadable(f"its content makes no sense: {type(error).__name__}: {str(error)[:200]}") from None


class _Machine:
    """Executes a pickle's instructions on a stack; no instruction imports or calls anything that the file names."""

    def __init__(self) -> None:
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: dict[int, Any] = {}

    def run(self, program: bytes) -> Any:
        for count, (instruction, argument, _) in enumerate(pickletools.genops(program)):
            if count > MOST_INSTRUCTIONS:
                raise ValueError(f"more than {MOST_INSTRUCTIONS:,} instructions")
            name = instruction.name
            if name in _VALUES:
                self.stack.append(argument)
            elif name in _CONSTANTS:
                self.stack.append(_CONSTANTS[name])
            elif name == "STOP":
                break
            elif name not in ("PROTO", "FRAME"):
                self._step(name, argument)
        return self.stack[-1]

    def _step(self, name: str, argument: Any) -> None:
        stack = self.stack
        match name:
            case "MARK":
                self.marks.append(len(stack))
            case "POP":
                stack.pop()
            case "POP_MARK":
                self._since_mark()
            case "DUP":
                stack.append(stack[-1])
            case "PUT" | "BINPUT" | "LONG_BINPUT":
                self.memo[argument] = stack[-1]
            case "MEMOIZE":
                self.memo[len(self.memo)] = stack[-1]
            case "GET" | "BINGET" | "LONG_BINGET":
                stack.append(self.memo[argument])
            case "GLOBAL":
                stack.append(Name(argument.replace(" ", ".")))
            case "STACK_GLOBAL":
                attribute, module = stack.pop(), stack.pop()
                stack.append(Name(f"{module}.{attribute}" if isinstance(module, str) else "unknown"))
            case "BINPERSID":
                stack.append(_storage(stack.pop()))
            case "EMPTY_DICT":
                stack.append({})
            case "EMPTY_LIST" | "EMPTY_SET":
                stack.append([])
            case "EMPTY_TUPLE":
                stack.append(())
            case "TUPLE1" | "TUPLE2" | "TUPLE3":
                parts = [stack.pop() for _ in range(int(name[-1]))]
                stack.append(tuple(reversed(parts)))
            case "TUPLE":
                stack.append(tuple(self._since_mark()))
            case "LIST" | "FROZENSET":  # sets too: hashing what a file nests deeply can end the process
                stack.append(self._since_mark())
            case "DICT":
                parts = self._since_mark()
                stack.append({})
                self._set_items(parts)
            case "APPEND":
                value = stack.pop()
                self._extend([value])
            case "APPENDS" | "ADDITEMS":
                self._extend(self._since_mark())
            case "SETITEM":
                value, key = stack.pop(), stack.pop()
                self._set_items([key, value])
            case "SETITEMS":
                self._set_items(self._since_mark())
            case "REDUCE" | "NEWOBJ":
                arguments, made = stack.pop(), stack.pop()
                stack.append(_made(made, arguments))
            case "NEWOBJ_EX":
                _keywords, arguments, made = stack.pop(), stack.pop(), stack.pop()
                stack.append(_made(made, arguments))
            case "INST":
                stack.append(Foreign(argument.replace(" ", "."), tuple(self._since_mark())))
            case "OBJ":
                made, *arguments = self._since_mark()
                stack.append(_made(made, tuple(arguments)))
            case "BUILD":
                state = stack.pop()
                # On a tensor or a table: attributes, such as the versions of layers in a state_dict.
                if isinstance(stack[-1], Foreign):
                    stack[-1].state = state
            case _:
                raise ValueError(f"the instruction {name} is not known")

    def _since_mark(self) -> list[Any]:
        start = self.marks.pop()
        if start > len(self.stack):
            raise IndexError("the mark is above the stack")
        found = self.stack[start:]
        del self.stack[start:]
        return found

    def _extend(self, values: list[Any]) -> None:
        target = self.stack[-1]
        if isinstance(target, list):
            target += values
        elif not isinstance(target, Foreign):
            raise TypeError(f"a {type(target).__name__} takes no items")

    def _set_items(self, parts: list[Any]) -> None:
        target = self.stack[-1]
        table = target.items if isinstance(target, Foreign) else target
        if not isinstance(table, dict):
            raise TypeError(f"a {type(target).__name__} takes no keys")
        for key, value in zip(parts[::2], parts[1::2], strict=True):
            # Only keys whose hash is safe to compute: that of nested tuples recurses without a limit.
            simple = key is None or isinstance(key, str | int | float | bytes)
            table[key if simple else Foreign("a key")] = value


def _made(made: Any, arguments: Any) -> Any:
    """What calling `made` would have returned, for the few functions that build tensors and tables."""
    if not isinstance(made, Name):  # the result of another call that was not made
        return Foreign(made.name if isinstance(made, Foreign) else "no class", arguments)
    builder = _BUILDERS.get(made.text)
    return Foreign(made.text, arguments) if builder is None else builder(*arguments)


def _storage(description: Any) -> Storage:
    kind, storage_type, key, _location, _count = description
    if kind != "storage" or not isinstance(key, str) or not isinstance(storage_type, Name):
        raise ValueError("a storage is not described as torch does")
    name = storage_type.text.rpartition(".")[2]
    if name != "UntypedStorage" and name not in STORAGES:
        raise ValueError(f"its tensors are of the unknown type {name[:60]}")
    return Storage(key, STORAGES.get(name))


def _tensor(
    storage: Any, offset: Any, shape: Any, strides: Any, _gradient: Any = None, _hooks: Any = None, *more: Any
) -> Any:
    if not isinstance(storage, Storage):
        raise TypeError("a tensor has no storage")
    dtype = storage.dtype or TYPES[more[0].text]
    numbers = (offset, *shape, *strides)
    if not all(type(number) is int and 0 <= number < 2**62 for number in numbers) or len(shape) != len(strides):
        raise ValueError("a tensor has an impossible shape")
    if len(shape) > MOST_DIMENSIONS:
        raise ValueError(f"a tensor has {len(shape)} dimensions")
    return SavedTensor(storage, dtype, offset, tuple(shape), tuple(strides))


def _first(tensor: Any, *_more: Any) -> Any:
    return tensor


def _typed_tensor(made: Any, _kind: Any, arguments: Any, _state: Any) -> Any:
    """A tensor with attributes, which are left out."""
    return _made(made, arguments)


def _table(*arguments: Any) -> dict[Any, Any]:
    if arguments and not (len(arguments) == 1 and isinstance(arguments[0], list)):
        raise ValueError("a table is not described as torch does")
    table: dict[Any, Any] = {}
    for key, value in arguments[0] if arguments else ():
        table[key if isinstance(key, str) else Foreign("a key")] = value
    return table


_BUILDERS: dict[str, Callable[..., Any]] = {
    "collections.OrderedDict": _table,
    "torch._utils._rebuild_tensor_v2": _tensor,
    "torch._utils._rebuild_tensor_v3": _tensor,
    "torch._utils._rebuild_parameter": _first,
    "torch._utils._rebuild_parameter_with_state": _first,
    "torch._tensor._rebuild_from_type_v2": _typed_tensor,
}
