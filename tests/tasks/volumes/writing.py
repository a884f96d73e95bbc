"""Writes an array as a volume of each format that is read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import tifffile
import zarr
from PIL import Image

from stoker.tasks.volumes.formats.opening import VolumeRef

Array = np.ndarray[Any, Any]


def tiff(**options: Any) -> Callable[[Path, Array], VolumeRef]:
    def write(folder: Path, array: Array) -> VolumeRef:
        path = folder / "volume.tif"
        tifffile.imwrite(path, array, photometric="minisblack", **options)
        return VolumeRef(str(path))

    return write


def tiff_by_pillow(compression: str | None) -> Callable[[Path, Array], VolumeRef]:
    """Pages with their headers in between, as libtiff writes them."""

    def write(folder: Path, array: Array) -> VolumeRef:
        path = folder / "volume.tiff"
        first, *others = [Image.fromarray(page) for page in array]
        first.save(path, save_all=True, append_images=others, compression=compression)
        return VolumeRef(str(path))

    return write


def tiff_pages_of_uneven_distance(folder: Path, array: Array) -> VolumeRef:
    path = folder / "volume.tif"
    with tifffile.TiffWriter(path) as file:
        for number, page in enumerate(array):
            file.write(page, contiguous=False, metadata=None, description="x" * (17 * (number % 3)))
    return VolumeRef(str(path))


def npy(folder: Path, array: Array) -> VolumeRef:
    np.save(folder / "volume.npy", array)
    return VolumeRef(str(folder / "volume.npy"))


def npy_fortran(folder: Path, array: Array) -> VolumeRef:
    return npy(folder, np.asfortranarray(array))


def npy_big_endian(folder: Path, array: Array) -> VolumeRef:
    return npy(folder, array.astype(array.dtype.newbyteorder(">")))


def nifti(suffix: str, kind: Any = nibabel.Nifti1Image) -> Callable[[Path, Array], VolumeRef]:
    def write(folder: Path, array: Array) -> VolumeRef:
        path = folder / f"volume{suffix}"
        nibabel.save(kind(array.transpose(2, 1, 0), np.diag([0.5, 1.0, 2.0, 1.0])), path)
        return VolumeRef(str(path))

    return write


def zarr_array(version: int, chunks: Any = (16, 16, 16), shards: Any = None) -> Callable[[Path, Array], VolumeRef]:
    def write(folder: Path, array: Array) -> VolumeRef:
        path = folder / "volume.zarr"
        made = zarr.create_array(
            path, shape=array.shape, chunks=chunks, shards=shards, dtype=array.dtype, zarr_format=version, fill_value=0,
            config={"write_empty_chunks": True},
        )  # fmt: skip
        made[...] = array
        return VolumeRef(str(path))

    return write


def ome_zarr(version: int, axes: str) -> Callable[[Path, Array], VolumeRef]:
    """A pyramid whose level 1 is the array, stored with its axes in this order."""

    def write(folder: Path, array: Array) -> VolumeRef:
        path = folder / "volume.ome.zarr"
        stored = array.transpose(["zyx".index(axis) for axis in axes if axis in "zyx"])
        stored = stored.reshape([1 if axis not in "zyx" else array.shape["zyx".index(axis)] for axis in axes])
        pyramid = {
            "axes": [{"name": axis} for axis in axes],
            "datasets": [{"path": "0"}, {"path": "half/1"}],
        }
        ome: dict[str, Any] = {"multiscales": [pyramid]} if version == 2 else {"ome": {"multiscales": [pyramid]}}
        group = zarr.create_group(path, zarr_format=version, attributes=ome)
        for level, content in (("0", np.zeros((1,) * len(axes), array.dtype)), ("half/1", stored)):
            chunks = tuple(min(16, size) for size in content.shape)
            made = group.create_array(level, shape=content.shape, chunks=chunks, dtype=array.dtype,
                                      config={"write_empty_chunks": True})  # fmt: skip
            made[...] = content
        return VolumeRef(str(path), level=1)

    return write


FORMATS: dict[str, Callable[[Path, Array], VolumeRef]] = {
    "tiff": tiff(),
    "tiff big-endian": tiff(byteorder=">", bigtiff=True),
    "tiff deflate": tiff(compression="zlib", predictor=True),
    "tiff lzw": tiff(compression="lzw"),
    "tiff tiles": tiff(compression="zlib", tile=(32, 16)),
    "tiff by ImageJ": tiff(imagej=True),
    "tiff pages of uneven distance": tiff_pages_of_uneven_distance,
    "npy": npy,
    "npy fortran": npy_fortran,
    "npy big-endian": npy_big_endian,
    "nii": nifti(".nii"),
    "nii.gz": nifti(".nii.gz"),
    "nii.gz version 2": nifti(".nii.gz", nibabel.Nifti2Image),
    "zarr v2": zarr_array(2),
    "zarr v3": zarr_array(3),
    "zarr v3 sharded": zarr_array(3, (8, 8, 8), (24, 24, 24)),
    "ome-zarr 0.4": ome_zarr(2, "czyx"),
    "ome-zarr 0.5, axes reversed": ome_zarr(3, "xyz"),
}
PILLOW = {"tiff by Pillow": tiff_by_pillow(None), "tiff by Pillow, lzw": tiff_by_pillow("tiff_lzw")}
"""Pillow writes only some kinds of voxels."""
