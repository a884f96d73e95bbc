"""The record of how the files in a folder of predictions were made: with one set of checkpoints and options."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import xxhash

from stoker.core.console import some
from stoker.core.errors import UsageError, UserError
from stoker.core.files import read_json, write_text
from stoker.core.units import count
from stoker.run.lease import Lease, LeaseHeld
from stoker.tasks.volumes.formats.volume import Shape, Volume
from stoker.tasks.volumes.predict.output import FileFormat, disk_errors, is_begun
from stoker.tasks.volumes.predict.postprocess import PostStep, check_chain
from stoker.tasks.volumes.predict.segmenter import Scale
from stoker.tasks.volumes.predict.windows import PredictionSize, SlidingWindow
from stoker.tasks.volumes.segment import TrainedVolumeModel

MANIFEST, UNFINISHED, LEASE = "prediction.json", ".unfinished", "lease"
FORMAT = 1
LARGEST_MANIFEST_BYTES = 256 << 20


@dataclass(frozen=True)
class PredictionOptions:
    """What to predict, and into which files."""

    sliding: SlidingWindow = field(default_factory=SlidingWindow)
    threshold: float | None = None
    """Class 1 wherever it is more probable than this; None for the most probable class."""
    probabilities: Scale | None = None
    """Store probabilities in this form, not the classes."""
    file_format: FileFormat = "tiff"
    post: tuple[PostStep, ...] = ()
    submission: bool = False
    """Also write submission.zip with all files."""
    force: bool = False
    """Replace what was predicted with other settings."""

    def check(self, classes: int) -> None:
        """Refuses options that exclude each other, or do not fit the network."""
        check_chain(self.post, classes)
        if self.threshold is not None and classes != 2:
            raise UsageError(
                "threshold-for-two-classes",
                f"predict_threshold is {self.threshold:g}, and the network knows {classes} classes",
                why="with more than two, the most probable one is chosen",
                hint="leave out predict_threshold",
            )
        if self.probabilities is not None:
            masks = {
                "predict_threshold": self.threshold is not None, "predict_postprocess": self.post,
                "--submission": self.submission,
            }  # fmt: skip
            if used := [name for name, is_set in masks.items() if is_set]:
                raise UsageError(
                    "probabilities-are-no-mask", f"--probabilities with {', '.join(used)}",
                    why="these need classes", hint="leave out --probabilities",
                )  # fmt: skip
            if classes > 2 and self.file_format == "tiff":
                raise UsageError(
                    "tiff-has-one-channel", f"probabilities of {classes - 1} classes as TIFF",
                    why="a TIFF stack holds one volume", hint="--format zarr",
                )  # fmt: skip
        if self.submission and self.file_format != "tiff":
            raise UsageError(
                "submission-is-tiff", f"--submission with --format {self.file_format}", hint="--format tiff"
            )


@dataclass(frozen=True)
class PredictedVolume:
    """A volume that is finished."""

    id: str
    path: Path
    shape: Shape
    windows: int
    seconds: float | None
    """None if an earlier start finished it."""
    foreground: float | None
    """Share of voxels of a class other than 0; None for probabilities."""


@dataclass(frozen=True)
class Job:
    """One volume to predict."""

    id: str
    images: tuple[Volume, ...]
    target: Path
    size: PredictionSize

    @property
    def shape(self) -> Shape:
        return self.images[0].shape

    @property
    def identity(self) -> str:
        return " ".join(image.identity for image in self.images)


def settings_of(trained: Sequence[TrainedVolumeModel], options: PredictionOptions) -> dict[str, Any]:
    """Everything that the voxels of a prediction depend on, apart from the volume."""
    config = trained[0].config
    return {
        "checkpoints": [
            {"xxh128": _digest(one.path), "weights": "averaged" if one.averaged else "raw"} for one in trained
        ],
        "patch_size": list(config.patch_size or ()),
        "normalize": config.normalize,
        "precision": config.precision,
        "overlap": options.sliding.overlap,
        "flips": "".join(sorted(options.sliding.flips, reverse=True)),
        "output": options.probabilities or "classes",
        "threshold": options.threshold,
        "post": ",".join(map(str, options.post)),
        "format": options.file_format,
    }


class Manifest:
    """The file in a folder of predictions that says how they were made."""

    def __init__(self, out: Path, settings: dict[str, Any], force: bool) -> None:
        self.path, self._out, self._settings, self._force = out / MANIFEST, out, settings, force
        self._volumes: dict[str, dict[str, Any]] = {}
        known = self._read()
        if known is None:
            return
        different = sorted(key for key in settings if known.get("settings", {}).get(key) != settings[key])
        if not different:
            self._volumes = dict(known.get("volumes", {}))
        elif not force:
            lines = [f"  {key}: {known['settings'].get(key)} there, {settings[key]} now" for key in different]
            raise UserError(
                "out-of-other-settings",
                f"{out} has predictions made with other settings\n" + "\n".join(lines),
                why="half of the volumes would be predicted in one way and half in another",
                hint="--out ANOTHER_FOLDER, or --force to replace them",
            )

    def unfinished(self, job: Job) -> Path:
        return self._out / UNFINISHED / job.id

    def key_of(self, job: Job) -> str:
        """Changes with the settings and with the volume."""
        document = json.dumps([FORMAT, self._settings, job.identity, job.shape], sort_keys=True)
        return hashlib.blake2b(document.encode(), digest_size=16).hexdigest()

    def has(self, job: Job) -> bool:
        """Whether this volume, as it is now, was predicted with these settings, and the file is there."""
        return self._volumes.get(job.id, {}).get("key") == self.key_of(job) and job.target.exists()

    def known(self, job: Job) -> PredictedVolume:
        entry = self._volumes[job.id]
        return PredictedVolume(job.id, job.target, job.shape, job.size.windows, None, entry.get("foreground"))

    def check_targets(self, jobs: Sequence[Job]) -> None:
        """Refuses to replace files that this prediction did not write."""
        if self._force:
            return
        strange = [
            job.target.name
            for job in jobs
            if job.target.exists()
            and job.id not in self._volumes
            and not is_begun(self.unfinished(job), self.key_of(job))
        ]
        if strange:
            raise UserError(
                "out-exists",
                f"{self._out} has {count(len(strange), 'file')} from elsewhere: {some(strange)}",
                why=f"{MANIFEST} does not list them, so they would be lost",
                hint="--out ANOTHER_FOLDER, or --force to replace them",
            )

    def add(self, job: Job, made: PredictedVolume) -> None:
        self._volumes[job.id] = {"key": self.key_of(job), "file": made.path.name, "foreground": made.foreground}
        self.write()

    def write(self) -> None:
        document = {"format": FORMAT, "settings": self._settings, "volumes": self._volumes}
        write_text(self.path, json.dumps(document, indent=1) + "\n")

    def _read(self) -> dict[str, Any] | None:
        try:
            document = read_json(self.path, LARGEST_MANIFEST_BYTES)
            if not isinstance(document, dict) or not isinstance(document.get("settings"), dict):
                raise ValueError
        except FileNotFoundError:
            return None
        except ValueError:
            if self._force:
                return None
            raise UserError(
                "bad-manifest", f"{self.path} is damaged, or was not written by stoker predict",
                why="it says how the files beside it were made", hint="--out ANOTHER_FOLDER, or --force",
            ) from None  # fmt: skip
        return document


@contextmanager
def only_one(out: Path) -> Iterator[None]:
    """Keeps a second prediction out of the folder, and removes the folder of unfinished ones if nothing is in it."""
    lease = Lease(out / UNFINISHED / LEASE)
    try:
        with disk_errors(out):
            lease.acquire()
    except LeaseHeld as held:
        raise UserError(
            "out-busy", held.seen, why="two predictions would write the same files",
            hint="wait for the other one, or --out ANOTHER_FOLDER",
        ) from None  # fmt: skip
    try:
        yield
    finally:
        lease.release()
        with suppress(OSError):
            if [one.name for one in (out / UNFINISHED).iterdir()] == [LEASE]:
                (out / UNFINISHED / LEASE).unlink()
                (out / UNFINISHED).rmdir()


def _digest(path: Path) -> str:
    state = xxhash.xxh3_128()
    with path.open("rb") as file:
        while part := file.read(1 << 24):
            state.update(part)
    return state.hexdigest()
