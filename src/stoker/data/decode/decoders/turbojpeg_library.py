"""Finds a libturbojpeg with the functions of version 3, which alone can decode a region, and binds them."""

from __future__ import annotations

import ctypes
import ctypes.util
import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

VARIABLE = "STOKER_LIBTURBOJPEG"


class Region(ctypes.Structure):
    """tjregion"""

    _fields_ = (("x", ctypes.c_int), ("y", ctypes.c_int), ("w", ctypes.c_int), ("h", ctypes.c_int))


class Scale(ctypes.Structure):
    """tjscalingfactor"""

    _fields_ = (("num", ctypes.c_int), ("denom", ctypes.c_int))


@dataclass(frozen=True)
class Library:
    """The same library twice."""

    path: str
    waiting: Any
    """Keeps the interpreter's lock: for calls of a microsecond, which giving it up would double."""
    working: Any
    """Gives the interpreter's lock up: for the decoding."""


def candidates() -> Iterator[str]:
    """Where such a library may be, the user's own word first."""
    named = os.environ.get(VARIABLE)
    if named:
        yield named
    with suppress(metadata.PackageNotFoundError):  # the wheel's own module is of no use to us: only its library
        for file in metadata.files("turbojpeg") or ():
            if file.name.startswith(("libturbojpeg", "turbojpeg.dll")):
                yield str(file.locate())
    for folder in (Path(sys.prefix) / "lib", Path(sys.base_prefix) / "lib"):  # conda
        yield from map(str, sorted(folder.glob("libturbojpeg*.so*")))
        yield from map(str, sorted(folder.glob("libturbojpeg*.dylib")))
    system = ctypes.util.find_library("turbojpeg")
    if system:
        yield system


def bind(path: str) -> Library:
    """The library's functions with their types; OSError or AttributeError where it is none of version 3."""
    waiting, working = ctypes.PyDLL(path), ctypes.CDLL(path)
    pointer, number, size = ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t
    signatures = {
        "tj3Init": ([number], pointer),
        "tj3Destroy": ([pointer], None),
        "tj3Set": ([pointer, number, number], number),
        "tj3Get": ([pointer, number], number),
        "tj3DecompressHeader": ([pointer, pointer, size], number),
        "tj3SetScalingFactor": ([pointer, Scale], number),
        "tj3SetCroppingRegion": ([pointer, Region], number),
        "tj3Decompress8": ([pointer, pointer, size, pointer, number, number], number),
    }
    for library in (waiting, working):
        for name, (arguments, result) in signatures.items():
            function = getattr(library, name)
            function.argtypes, function.restype = arguments, result
    return Library(path, waiting, working)
