"""The demos, handwritten digits and made-up scans of scrolls: their data, and the result of training on them.

The scans, which tests use too, are rolled thin sheets in noise, most of it unlabelled, in the layout of the Vesuvius
surface competition. The same seed gives the same voxels.
"""

from __future__ import annotations

import csv
import io
import shlex
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stoker.core.errors import UserError
from stoker.core.files import write_bytes, write_text
from stoker.core.units import rate_text
from stoker.loader.rng import mix_numbers
from stoker.profile.batch_costs import STAGES
from stoker.profile.clock_reading import read_observed
from stoker.run.folder import RunFolder
from stoker.run.metrics import read_metrics
from stoker.tasks.volumes.formats.opening import library
from stoker.tasks.volumes.formats.volume import Shape

SIDE = 32
QUALITY = 95
# Every fifth digit is for validation; the collection is in the order in which people wrote.
VALIDATION_EVERY = 5
# Two volumes of each of three scrolls, and one without labels to predict.
VOLUMES, SCROLLS_SHAPE, SCROLLS_SEED = 6, (96, 96, 96), 0
BAR = 40

BACKGROUND, SHEET, UNLABELLED = 0, 1, 2
UNLABELLED_SHARE = 0.58
"""Share of a typical volume of the competition; 37 % are background and 5 % sheet."""
_THICKNESS = 2.0
_PITCH = (12.0, 18.0)
"""Voxels from one turn of a sheet to the next; with sheets of two voxels, about a seventh of the labelled ones."""


@dataclass(frozen=True)
class Demo:
    config_name: str
    folder: str
    """Folder of its data, below the demo's."""
    about: str
    """The data in words."""
    write: Callable[[Path], object]
    """Writes the data below a folder, once."""
    metric: str
    """In percent."""
    threshold: float
    """What a run must reach."""
    outcome: str
    """What the network has learned at that score."""
    unit: str
    units: str
    """A sample of the network's input, singular and plural."""
    suggestions: tuple[str, ...]
    """Commands to type next, with `{run}`, `{config}` and `{data}`."""


def write_digits(root: Path) -> Path:
    """Writes the digits below `root`, once; returns the folder for a config's data_root."""
    done = root / ".complete"
    if done.exists():
        return root
    import cv2
    import simplejpeg

    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise UserError(
            "digits-missing",
            "scikit-learn is not installed",
            why="the demo's handwritten digits come with it",
            hint="pip install 'stoker[demo]'",
        ) from None
    digits = load_digits()
    for number, (pixels, label) in enumerate(zip(digits.images, digits.target, strict=True)):
        split = "val" if number % VALIDATION_EVERY == 0 else "train"
        folder = root / split / f"digit{label}"
        folder.mkdir(parents=True, exist_ok=True)
        grey = (pixels * (255 / 16)).astype(np.uint8)
        large = cv2.resize(grey, (SIDE, SIDE), interpolation=cv2.INTER_CUBIC)
        colour = np.ascontiguousarray(np.repeat(large[:, :, None], 3, axis=2))
        (folder / f"{number:04d}.jpg").write_bytes(simplejpeg.encode_jpeg(colour, quality=QUALITY))
    done.touch()
    return root


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
    tifffile = library("tifffile")
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


def write_demo_scrolls(root: Path) -> Path:
    """Writes scans of scrolls below `root`, once; returns the folder for a config's data_root."""
    if not (root / "train.csv").exists():  # which is written last
        write_scrolls(root, volumes=VOLUMES, shape=SCROLLS_SHAPE, seed=SCROLLS_SEED)
    return root


DIGITS = Demo(
    config_name="demo.yaml", folder="digits", about="1,797 handwritten digits as JPEGs", write=write_digits,
    metric="acc1", threshold=97.0,  # the config reaches 99 (tests/commands/test_demo.py)
    outcome="it learned to read", unit="image", units="images",
    suggestions=(
        "stoker predict {run} {data}/val/digit7   # classify some sevens",
        "stoker eval {run}   # see which digits it confuses",
        "stoker lr-find {config}   # find a learning rate",
        "stoker train {config} lr=0.4 run_name=faster   # another run; stop it with Ctrl-C, run it again to resume",
        "stoker train configs/rsb_a3.yaml data_root=/your/imagenet   # the same code on ImageNet",
    ),
)  # fmt: skip
SCROLLS = Demo(
    config_name="demo_volumes.yaml", folder="scrolls", about="seven made-up scans of scrolls as TIFF stacks",
    write=write_demo_scrolls,
    metric="dice", threshold=90.0,  # the config reaches 95
    outcome="it found the sheets of a scroll it had not seen", unit="patch", units="patches",
    suggestions=(
        "stoker eval {run}   # score the held-out volumes one by one",
        "stoker predict {run} {data}/test_images --out predictions   # segment a scan without labels",
        "stoker train {config} volume_loss='dice + ce + 0.2 cldice' run_name=thin   # another loss",
        "stoker train configs/vesuvius_surface.yaml data_root=/your/scrolls   # the same code on real scans",
    ),
)  # fmt: skip


@dataclass(frozen=True)
class TimeSpent:
    """Where the time of a run went; None and empty if the run did not record it."""

    computing_s: float | None = None
    """Steps without waiting: augmentation on the device, forward, backward, update."""
    waiting_s: float | None = None
    """The model was idle because no batch was ready."""
    validation_s: float | None = None
    images_per_second: float | None = None
    """Over all training steps."""
    stages_s: dict[str, float] = field(default_factory=dict)
    """Seconds a worker took for one sample, by stage."""


def time_spent(folder: RunFolder) -> TimeSpent:
    try:
        seen = read_observed(folder.root)
    except UserError:  # a run of another version
        return TimeSpent()
    # Observed leaves out the first step of each epoch, except for its wait.
    firsts = len(seen.times.epoch_starts_s)
    costs = [record for record in read_metrics(folder.metrics_file, "step") if "batch/wall_s" in record]
    last = costs[-1] if costs else {}  # the mean over most of the last epoch
    return TimeSpent(
        computing_s=(seen.times.elapsed_s - seen.times.wait_s) * (1 + firsts / max(1, seen.steps)),
        waiting_s=seen.times.wait_s + sum(seen.times.epoch_starts_s),
        validation_s=seen.times.validation_s,
        images_per_second=seen.images_per_second,
        stages_s={name: last[f"batch/{name}_s"] for name in STAGES if last.get(f"batch/{name}_s")},
    )


@dataclass(frozen=True)
class DemoResult:
    config: Path
    run_folder: Path
    demo: Demo
    best: float | None
    """Score in the demo's metric."""
    epochs: int
    seconds: float
    """Duration of the whole command; short if the run was already finished."""
    spent: TimeSpent

    @property
    def learned(self) -> bool:
        return self.best is not None and self.best >= self.demo.threshold

    def as_dict(self) -> dict[str, Any]:
        spent = self.spent
        return {
            f"best_val_{self.demo.metric}": self.best,
            "threshold": self.demo.threshold,
            "learned": self.learned,
            "epochs": self.epochs,
            "seconds": self.seconds,
            f"{self.demo.units}_per_second": spent.images_per_second,
            "computing_s": spent.computing_s,
            "waiting_s": spent.waiting_s,
            "validation_s": spent.validation_s,
            "stages": spent.stages_s,
            "config": str(self.config),
            "run_folder": str(self.run_folder),
        }


def demo_text(result: DemoResult) -> str:
    """The score, where the time went as bars, and commands to type next."""
    demo = result.demo
    best = "no validation" if result.best is None else f"val/{demo.metric} {result.best:.1f} %"
    outcome = demo.outcome if result.learned else f"below the expected {demo.threshold:g} %"
    lines = [f"\n{best} after {result.epochs} epochs ({outcome}), {result.seconds:.0f} s in total"]
    lines += _bars(result.spent, demo)
    places = {"run": result.run_folder, "config": result.config, "data": result.config.parent / demo.folder}
    quoted = {name: shlex.quote(str(path)) for name, path in places.items()}
    return "\n".join([*lines, "", "try next:", *(f"  {one.format(**quoted)}" for one in demo.suggestions)])


def _bars(spent: TimeSpent, demo: Demo) -> list[str]:
    parts = {
        "computing": spent.computing_s,
        "waiting for data": spent.waiting_s,
        "validation": spent.validation_s,
    }
    known = {name: seconds for name, seconds in parts.items() if seconds is not None}
    whole = sum(known.values())
    if not whole:
        return []
    rate = "" if spent.images_per_second is None else f" ({rate_text(spent.images_per_second, demo.units)} in training)"
    lines = ["", f"where the time of the epochs went{rate}:"]
    for name, seconds in known.items():
        lines.append(_bar(name, f"{seconds:7.1f} s ", seconds / whole))
    making = sum(spent.stages_s.values())
    if making:
        lines += ["", f"what a worker of the loader does for each {demo.unit}, meanwhile:"]
        lines += [_bar(name, f"{value * 1e6:7.0f} us", value / making) for name, value in spent.stages_s.items()]
    return lines


def _bar(name: str, amount: str, share: float) -> str:
    return f"  {name:<17}{amount}  {share:4.0%}  {'#' * round(BAR * share)}".rstrip()
