"""Opens a volume by its name: TIFF stacks, .npy, NIfTI, Zarr; and keeps the opened ones of a process."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from stoker.core.errors import UserError
from stoker.io.stores import ReadFailure, is_url
from stoker.tasks.volumes.formats.arrays import open_nifti, open_npy
from stoker.tasks.volumes.formats.byte_source import open_source, staged_file
from stoker.tasks.volumes.formats.packed import PackedFacts, open_packed
from stoker.tasks.volumes.formats.volume import CroppedVolume, LruCache, ReadingOptions, Region, Volume

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
    """Level of an OME-Zarr pyramid; 0 is the full resolution."""
    version: str = ""
    """An object's size and ETag from a listing. Saves a request for each volume."""
    packed: PackedFacts | None = None
    """The index entry of a volume in a pack; None for any other."""


def open_volume(ref: VolumeRef, options: ReadingOptions | None = None) -> Volume:
    """The volume at a location; raises ReadFailure if it cannot be read, StoreDown if its store cannot."""
    options = options or ReadingOptions()
    location = local_path(ref.location)
    try:
        if ref.packed is not None and not is_url(location):
            return open_packed(staged_file(location, options) or location, ref.packed, options)
        return _open_by_suffix(location, ref, options)
    except ModuleNotFoundError as error:
        raise library_missing(error) from None


def _open_by_suffix(location: str, ref: VolumeRef, options: ReadingOptions) -> Volume:
    suffix = suffix_of(location)
    if suffix == ".zarr" or (not suffix and (is_url(location) or Path(location).is_dir())):
        from stoker.tasks.volumes.formats.zarr_volume import open_zarr

        return open_zarr(location, ref.level, options)
    if not suffix:
        raise ReadFailure(location, "unknown format", f"volumes are recognised by their suffix: {', '.join(SUFFIXES)}")
    if not is_url(location) and Path(location).is_dir():
        raise ReadFailure(location, "is a directory")
    source = open_source(location, ref.version, options)
    if suffix in TIFF_SUFFIXES:
        from stoker.tasks.volumes.formats.tiff import open_tiff

        return open_tiff(source, options)
    return open_nifti(source, options) if suffix in NIFTI_SUFFIXES else open_npy(source, options)


def local_path(location: str) -> str:
    """The path of a `file://` URL; any other location as it is."""
    return unquote(urlsplit(location).path) if location.startswith("file://") else location


def suffix_of(location: str) -> str:
    """The suffix that determines a volume's format, `.nii.gz` included; empty if we do not support it."""
    name = location.rstrip("/").lower()
    return next((suffix for suffix in sorted(SUFFIXES, key=len, reverse=True) if name.endswith(suffix)), "")


class OpenVolumes:
    """The volumes that a process has opened, for all its threads; the least recently used are closed."""

    def __init__(self, options: ReadingOptions | None = None) -> None:
        self.options = options or ReadingOptions()
        self._open: LruCache[VolumeRef, Volume] = LruCache(MOST_OPEN)
        self._not_staged: set[VolumeRef] = set()
        """Volumes that were opened at the source because the local copy did not have them yet."""

    def get(self, ref: VolumeRef, box: Region | None = None) -> Volume:
        """The volume, or only this box of it; raises as `open_volume` does."""
        if ref in self._not_staged and staged_file(ref.location, self.options) is not None:
            # The local copy got it since it was opened at the source.
            self._not_staged.discard(ref)
            self._open.drop(ref)
        volume = self._open.get(ref, partial(self._opened_now, ref))
        if box is None:
            return volume
        if box.within(volume.shape) != box:
            raise ReadFailure(volume.name, "changed", f"its shape is {volume.shape}; the split has a part {tuple(box)}")
        return CroppedVolume(volume, box)

    def opened(self, ref: VolumeRef) -> Volume | None:
        return self._open.peek(ref)

    def _opened_now(self, ref: VolumeRef) -> Volume:
        copy = self.options.copy
        is_staged = copy is None or copy.is_cache or staged_file(ref.location, self.options) is not None
        volume = open_volume(ref, self.options)
        if not is_staged:
            self._not_staged.add(ref)
        return volume

    def __reduce__(self) -> Any:
        # Mappings and network threads stay in their process.
        return OpenVolumes, (self.options,)


def library(name: str) -> Any:
    """A module of the extra for volumes; raises UserError if it is not installed."""
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        raise library_missing(error) from None


def library_missing(error: ModuleNotFoundError) -> UserError:
    return UserError(
        "library-missing",
        f"{error.name} is not installed",
        why="volumes of this format need it",
        hint="pip install 'stoker[volumes]'",
    )
