"""Opens a volume by its name: TIFF stacks, .npy, NIfTI, Zarr; and keeps the opened ones of a process."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from stoker.data.store.stores import ReadFailure, is_url
from stoker.data.volumes.packed import PackedFacts, open_packed
from stoker.data.volumes.volume import (
    ArrayVolume,
    CroppedVolume,
    ReadingOptions,
    Region,
    Volume,
    check_extent,
    failure_of,
    identity_of,
    map_file,
)
from stoker.errors import UserError

TIFF_SUFFIXES = (".tif", ".tiff")
NIFTI_SUFFIXES = (".nii", ".nii.gz")
SUFFIXES = (*TIFF_SUFFIXES, ".npy", *NIFTI_SUFFIXES, ".zarr")
# A mapping needs no descriptor, but the kernel allows a process 65,530 of them (vm.max_map_count).
MOST_OPEN = 8192


@dataclass(frozen=True)
class VolumeRef:
    """Where a volume is: a file, a Zarr folder or its URL."""

    location: str
    level: int = 0
    """Of an OME-Zarr pyramid; 0 is the full resolution."""
    packed: PackedFacts | None = None
    """What the index says about a volume of a pack; None for any other."""


def open_volume(ref: VolumeRef, options: ReadingOptions | None = None) -> Volume:
    """The volume at a location; raises ReadFailure if it cannot be read, StoreDown if its store cannot."""
    options = options or ReadingOptions()
    location = ref.location
    if ref.packed is not None:
        facts = ref.packed
        return _with_libraries(lambda: open_packed(location, facts, options))
    suffix = suffix_of(location)
    if is_url(location) or suffix == ".zarr" or Path(location).is_dir():
        from stoker.data.volumes.zarr_volume import open_zarr

        return _with_libraries(lambda: open_zarr(location, ref.level, options))
    if suffix in TIFF_SUFFIXES:
        from stoker.data.volumes.tiff import open_tiff

        return _with_libraries(lambda: open_tiff(location, options))
    if suffix in NIFTI_SUFFIXES:
        from stoker.data.volumes.nifti import open_nifti

        return _with_libraries(lambda: open_nifti(location, options))
    if suffix == ".npy":
        return open_npy(location, options)
    raise ReadFailure(location, "unknown format", f"volumes are recognised by their suffix: {', '.join(SUFFIXES)}")


def suffix_of(location: str) -> str:
    """The suffix that tells a volume's format, `.nii.gz` included; empty if it is none of ours."""
    name = location.rstrip("/").lower()
    return next((suffix for suffix in sorted(SUFFIXES, key=len, reverse=True) if name.endswith(suffix)), "")


def open_npy(path: str, options: ReadingOptions) -> Volume:
    """A `.npy` file, mapped."""
    try:
        # mmap_mode never unpickles: an array of objects is refused.
        array: Any = np.load(path, mmap_mode="r", allow_pickle=False)
    except OSError as error:
        raise failure_of(path, error) from None
    except Exception as error:  # numpy parses the header as Python's syntax, which can fail in many ways
        size = Path(path).stat().st_size
        short = "length" in str(error) or "larger than" in str(error) or size < 128
        raise ReadFailure(path, "short" if short else "unreadable", str(error).split("\n", 1)[0][:200]) from None
    if not isinstance(array, np.ndarray):
        array.close()
        raise ReadFailure(path, "not a volume", "it is a .npz archive")
    if array.dtype == np.bool_:
        array = array.view(np.uint8)  # masks are often saved as truth values
    check_extent(path, array.shape, array.dtype, options)
    # A plain array over the mapping: every slice of an np.memmap runs Python code.
    return ArrayVolume(path, np.asarray(array), identity_of(path))


class OpenVolumes:
    """The volumes that a process has opened, for all its threads; the least recently used are closed."""

    def __init__(self, options: ReadingOptions | None = None, most: int = MOST_OPEN) -> None:
        self.options = options or ReadingOptions()
        self._most = most
        self._open: OrderedDict[VolumeRef, Volume] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, ref: VolumeRef, box: Region | None = None) -> Volume:
        """The volume, or only this box of it; raises as `open_volume` does."""
        with self._lock:
            volume = self._open.get(ref)
            if volume is not None:
                self._open.move_to_end(ref)
        if volume is None:
            # Without the lock: a worst case of two threads opening the same file costs little, waiting costs more.
            volume = open_volume(ref, self.options)
            with self._lock:
                self._open[ref] = volume
                while len(self._open) > self._most:
                    self._open.popitem(last=False)
        if box is None:
            return volume
        if box.within(volume.shape) != box:
            raise ReadFailure(volume.name, "changed", f"its shape is {volume.shape}; the split has a part {tuple(box)}")
        return CroppedVolume(volume, box)

    def __reduce__(self) -> Any:
        # Mappings and network threads stay in their process.
        return OpenVolumes, (self.options, self._most)


def map_array(path: str, dtype: np.dtype[Any], shape: tuple[int, ...], offset: int) -> tuple[Any, str]:
    """An array at an offset of a mapped file, and the file's identity; raises ReadFailure if the file is too short."""
    memory, identity = map_file(path)
    wanted = offset + int(np.prod(shape, dtype=object)) * dtype.itemsize
    if len(memory) < wanted:
        raise ReadFailure(path, "short", f"{len(memory):,} bytes; its header promises {wanted:,}")
    return np.ndarray(shape, dtype, memory, offset), identity


def _with_libraries(open_it: Callable[[], Volume]) -> Volume:
    try:
        return open_it()
    except ModuleNotFoundError as error:
        raise library_missing(error) from None


def library_missing(error: ModuleNotFoundError) -> UserError:
    """The error if a library of the optional extra is not there."""
    return UserError(
        "library-missing",
        f"{error.name} is not installed",
        why="volumes of this format need it",
        hint="pip install 'stoker[volumes]'",
    )
