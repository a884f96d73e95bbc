"""Made-up scans of scrolls, for the demo and for tests: rolled thin sheets in noise, most of it unlabelled.

Written in the layout of the Vesuvius surface competition. The same seed gives the same voxels.
"""

from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stoker.core.files import write_bytes, write_text
from stoker.loader.rng import mix_numbers
from stoker.tasks.volumes.formats.opening import library_missing
from stoker.tasks.volumes.formats.volume import Shape

BACKGROUND, SHEET, UNLABELLED = 0, 1, 2
UNLABELLED_SHARE = 0.58
"""Share of a typical volume of the competition; 37 % are background and 5 % sheet."""
_THICKNESS = 2.0
_PITCH = (12.0, 18.0)
"""Voxels from one turn of a sheet to the next; with sheets of two voxels, about a seventh of the labelled ones."""


def scroll_volume(shape: Shape, seed: int, scroll: int = 0) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """An image and its labels: a piece of a scroll, whose sheets have the scroll's own distance and brightness."""
    of_scroll = np.random.default_rng([scroll, 1])
    random = np.random.default_rng([seed, scroll, 2])
    depth, height, width = shape
    z, y, x = (np.arange(size, dtype=np.float32) for size in shape)
    # The axis of the scroll is beside the piece, so that the sheets cross it as bent planes.
    angle, distance = random.uniform(0, 2 * np.pi), random.uniform(0.4, 1.2) * max(height, width)
    y = y[None, :, None] - np.float32(height / 2 + distance * np.sin(angle))
    x = x[None, None, :] - np.float32(width / 2 + distance * np.cos(angle))
    z = z[:, None, None]
    around = np.arctan2(y, x)
    radius = np.hypot(y, x)
    pitch = np.float32(of_scroll.uniform(*_PITCH))
    for _ in range(3):
        # Sheets are not round: dents that run along the scroll and around it.
        size = random.uniform(0.05, 0.25) * pitch
        tilt, turns = 2 * np.pi * random.uniform(-1.5, 1.5) / max(depth, 32), random.integers(3, 12)
        radius = radius + np.float32(size) * np.sin(np.float32(tilt) * z + np.float32(turns) * around)
    turn = radius / pitch - around / np.float32(2 * np.pi)
    from_sheet = np.abs(turn - np.round(turn)) * pitch
    bright, dark, noise = of_scroll.uniform(120, 170), of_scroll.uniform(50, 80), of_scroll.uniform(14, 22)
    # A sheet fades over a voxel, as in a scan; fibres vary its brightness along it.
    image = np.clip(_THICKNESS / 2 + 0.5 - from_sheet, 0, 1) * np.float32(bright - dark)
    image *= 1 + 0.2 * _waves(shape, random, longest=1.5 * float(pitch))
    image += np.float32(dark) + np.float32(noise) * random.standard_normal(shape, np.float32)
    label = (from_sheet < _THICKNESS / 2).astype(np.uint8)
    known = _waves(shape, random, longest=max(shape))
    label[known < np.quantile(known, UNLABELLED_SHARE)] = UNLABELLED
    return np.clip(image, 0, 255).astype(np.uint8), label


def write_scrolls(
    root: Path, *, volumes: int, shape: Shape, seed: int = 0, scrolls: int = 3, tests: int = 1
) -> list[str]:
    """Writes a data set in the competition's layout and returns the ids for training; `train.csv` comes last."""
    try:
        import tifffile
    except ModuleNotFoundError as error:
        raise library_missing(error) from None
    rows: list[tuple[str, str]] = []
    for number in range(volumes + tests):
        scroll = number % scrolls
        name = str(mix_numbers(seed, number) % 4_000_000_000)
        image, label = scroll_volume(shape, mix_numbers(seed, number) % (1 << 32), scroll)
        is_test = number >= volumes
        pairs: list[tuple[str, Any]] = [("test_images" if is_test else "train_images", image)]
        if not is_test:
            pairs.append(("train_labels", label))
            rows.append((name, str(10_000 + scroll)))
        for folder, voxels in pairs:
            file = io.BytesIO()
            tifffile.imwrite(file, voxels, photometric="minisblack")
            write_bytes(root / folder / f"{name}.tif", file.getvalue())
    table = io.StringIO()
    csv.writer(table, lineterminator="\n").writerows([("id", "scroll_id"), *rows])
    write_text(root / "train.csv", table.getvalue())
    return [name for name, _ in rows]


def _waves(shape: Shape, random: np.random.Generator, longest: float) -> NDArray[np.float32]:
    """A smooth random field around zero, of about unit size: a few plane waves."""
    z, y, x = (np.arange(size, dtype=np.float32) for size in shape)
    field = np.zeros(shape, np.float32)
    for _ in range(5):
        direction = random.standard_normal(3)
        step = 2 * np.pi / (random.uniform(0.5, 1.0) * longest) * direction / np.linalg.norm(direction)
        phases = [np.float32(k) * axis for k, axis in zip(step, (z, y, x), strict=True)]
        # exp(i(a + b + c)) is a product of vectors: one sine per axis instead of one per voxel.
        plane = np.exp(1j * (phases[1][:, None] + phases[2][None, :] + random.uniform(0, 2 * np.pi)))
        along = np.exp(1j * phases[0])
        field += (along.real[:, None, None] * plane.real - along.imag[:, None, None] * plane.imag).astype(np.float32)
    return field / np.float32(np.sqrt(2.5))
