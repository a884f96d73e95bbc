"""`stoker predict` on volumes: each of them into a file of a folder, with a note of what it was made with.

A killed prediction resumes: finished volumes are kept, and the one in the making goes on at its layer of windows. A
folder holds the predictions of one set of checkpoints and options; others are refused, never mixed.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from torch import Tensor

from stoker.console import Advance, Say, count, some
from stoker.data.store.stores import ReadFailure, is_url
from stoker.data.volumes.cases import Case, open_cases
from stoker.data.volumes.opening import SUFFIXES, OpenVolumes, VolumeRef, suffix_of
from stoker.data.volumes.pack.index import INDEX as PACK_INDEX
from stoker.data.volumes.pack.index import read_index
from stoker.data.volumes.places import Place, UrlPath, place_at
from stoker.data.volumes.volume import Region, Shape, Volume
from stoker.errors import UsageError, UserError
from stoker.files import read_json, write_text
from stoker.machine.memory import read_memory
from stoker.run.lease import Lease, LeaseHeld
from stoker.tasks.results import PredictedVolume
from stoker.tasks.volumes.output import (
    SUFFIX,
    FileFormat,
    RawVolume,
    Workspace,
    disk_errors,
    free_bytes,
    is_begun,
    write_submission,
    write_volume,
)
from stoker.tasks.volumes.postprocess import PostStep, apply_step, check_chain, working_bytes
from stoker.tasks.volumes.prediction import (
    Scale,
    Segmenter,
    check_channels,
    decided,
    predict_volume,
    scaled,
    segmenter_of,
)
from stoker.tasks.volumes.reading import reading_options
from stoker.tasks.volumes.segment import TrainedVolumeModel
from stoker.tasks.volumes.windows import PredictionSize, SlidingWindow, WindowGrid, prediction_size

MANIFEST, UNFINISHED, LEASE, SUBMISSION = "prediction.json", ".unfinished", "lease", "submission.zip"
FORMAT = 1
LARGEST_MANIFEST_BYTES = 256 << 20
# Of a pack's options, those that leave voxels as they are.
_NOT_VOXELS = ("layout", "labels")
# What deflate leaves of a mask, with room to spare: those of made-up scrolls shrink to a twentieth or less.
_COMPRESSED_MASK = 1 / 10


@dataclass(frozen=True)
class PredictionOptions:
    """What is predicted, and into which files."""

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
                f"--threshold {self.threshold:g}, and the network knows {classes} classes",
                why="with more than two, the most probable one is chosen",
                hint="leave out --threshold",
            )
        if self.probabilities is not None:
            used = [name for name, is_set in (("--threshold", self.threshold is not None), ("--post", self.post),
                                              ("--submission", self.submission)) if is_set]  # fmt: skip
            if used:
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
class VolumePredictions:
    """The volumes that were predicted, and those that could not be read."""

    volumes: tuple[PredictedVolume, ...]
    bad: tuple[tuple[str, str], ...]
    """Id and reason."""
    submission: Path | None = None


def cases_to_predict(data: Sequence[str], say: Say = lambda _line: None) -> tuple[Case, ...]:
    """The cases of volume files, Zarr folders and URLs, YAML lists, folders of volumes, and the layouts of data sets
    (their test part)."""
    found: list[Case] = []
    for place in map(place_at, data):
        if _is_volume(place):
            found.append(_single(place))
        elif place.is_dir() and not _has_layout(place):
            files = sorted(one for one in place.iterdir() if suffix_of(one.name) and not one.name.startswith("."))
            if not files:
                raise UserError(
                    "no-volumes",
                    f"{place} has no volumes",
                    why=f"they are recognised by their suffix: {', '.join(SUFFIXES)}",
                    hint=f"ls {place}",
                )
            found += map(_single, files)
        else:
            listed = open_cases(place.url if isinstance(place, UrlPath) else place, "test")
            for note in listed.notes:
                say(f"note: {note}")
            found += listed.cases
    ids = [case.id for case in found]
    if twice := sorted({name for name in ids if ids.count(name) > 1}):
        raise UserError(
            "case-twice", f"{count(len(twice), 'name')} more than once: {some(twice)}",
            why="each prediction is stored under the name of its volume", hint="predict them into different folders",
        )  # fmt: skip
    if odd := [name for name in ids if "/" in name or name.startswith(".") or not name.isprintable()]:
        raise UserError("bad-name", f"{some(odd)} cannot be the name of a file", hint="give these cases another id")
    return tuple(found)


def warn_if_unprepared(trained: TrainedVolumeModel, cases: Sequence[Case], say: Say) -> None:
    """Says so if the network has learned from voxels that packing had changed, and these are as they were scanned."""
    root = trained.config.data_root
    with suppress(UserError, OSError, ReadFailure):
        if root is None or is_url(root) or not (place_at(root) / PACK_INDEX).is_file():
            return
        changed = {key: value for key, value in read_index(place_at(root)).options.items() if key not in _NOT_VOXELS}
        if changed and any(ref.packed is None for case in cases for ref in case.images):
            options = ", ".join(f"{key} {value}" for key, value in changed.items())
            say(
                f"warning: the network was trained on {root}, whose voxels were changed when it was packed "
                f"({options}); pack the volumes to predict in the same way"
            )


def predict_folder(
    trained: Sequence[TrainedVolumeModel],
    cases: Sequence[Case],
    out: Path,
    options: PredictionOptions,
    *,
    progress: Advance | None = None,
    say: Say = lambda _line: None,
) -> VolumePredictions:
    """Predicts every case into `out`. A case that cannot be read is set aside; everything else that is wrong raises
    before anything is predicted."""
    segmenter = segmenter_of(trained)
    options.check(segmenter.classes)
    warn_if_unprepared(trained[0], cases, say)
    volumes = OpenVolumes(reading_options(trained[0].config, cases))
    jobs, bad = _opened(cases, volumes, segmenter, out, options)
    with disk_errors(out):
        out.mkdir(parents=True, exist_ok=True)
        (out / UNFINISHED).mkdir(exist_ok=True)
    with _only_one(out), disk_errors(out):
        manifest = _Manifest(out, settings_of(trained, options), options.force)
        manifest.check_targets(jobs)
        waiting = [job for job in jobs if not manifest.has(job)]
        if len(waiting) < len(jobs):
            say(f"{count(len(jobs) - len(waiting), 'volume')} of {len(jobs)} predicted already")
        _check_resources(waiting, out, segmenter, options)
        # A file that is there and was not made with these settings is not listed, so the list comes first.
        manifest.write()
        finished, failed = _predict_all(waiting, manifest, segmenter, options, progress, say)
        bad += failed
        done = [finished.get(job.id) or manifest.known(job) for job in jobs if job.id not in dict(failed)]
        submission = None
        if options.submission and not bad:
            submission = out / SUBMISSION
            write_submission([one.path for one in done], submission)
        elif options.submission:
            say(f"{SUBMISSION} is not written: {count(len(bad), 'volume')} would be missing in it")
    return VolumePredictions(tuple(done), tuple(bad), submission)


@dataclass(frozen=True)
class _Job:
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


def _opened(
    cases: Sequence[Case], volumes: OpenVolumes, segmenter: Segmenter, out: Path, options: PredictionOptions
) -> tuple[list[_Job], list[tuple[str, str]]]:
    jobs: list[_Job] = []
    bad: list[tuple[str, str]] = []
    inputs: set[Path] = set()
    for case in cases:
        try:
            images = tuple(volumes.get(ref, case.box) for ref in case.images)
        except ReadFailure as failure:
            bad.append((case.id, str(failure)))
            continue
        check_channels(segmenter, images)
        size = prediction_size(
            images[0].shape, segmenter.patch, options.sliding, classes=segmenter.classes,
            networks=len(segmenter.models),
            voxel_bytes=_channels(segmenter, options) * _kind(segmenter, options).itemsize,
        )  # fmt: skip
        jobs.append(_Job(case.id, images, out / f"{case.id}{SUFFIX[options.file_format]}", size))
        inputs |= {Path(ref.location).resolve() for ref in case.images if not is_url(ref.location)}
    for job in jobs:
        if job.target.resolve() in inputs:
            raise UserError(
                "out-is-input", f"{job.target} would replace a volume that is read", hint="--out ANOTHER_FOLDER"
            )
    return jobs, bad


def _predict_all(
    jobs: Sequence[_Job],
    manifest: _Manifest,
    segmenter: Segmenter,
    options: PredictionOptions,
    progress: Advance | None,
    say: Say,
) -> tuple[dict[str, PredictedVolume], list[tuple[str, str]]]:
    finished: dict[str, PredictedVolume] = {}
    failed: list[tuple[str, str]] = []
    total, before = sum(job.size.windows for job in jobs), 0

    for job in jobs:
        workspace = _workspace(job, manifest, segmenter, options)
        skipped = workspace.first_layer * (job.size.windows // job.size.layers)
        if workspace.first_layer:
            say(f"{job.id}: resumed at layer {workspace.first_layer + 1} of {job.size.layers}")
        total -= skipped

        def advance(done: int, _of: int | None, skipped: int = skipped) -> None:
            # What an earlier start has done does not count, or the rate would be wrong.
            if progress is not None:
                progress(before + done - skipped, total)  # noqa: B023 - called before the next volume begins

        try:
            finished[job.id] = _predict_one(job, workspace, segmenter, options, advance, say)
        except ReadFailure as failure:
            failed.append((job.id, str(failure)))
            workspace.remove()
        except BaseException:
            workspace.close()
            raise
        else:
            manifest.add(job, finished[job.id])
            workspace.remove()
        before += job.size.windows - skipped
    return finished, failed


def _workspace(job: _Job, manifest: _Manifest, segmenter: Segmenter, options: PredictionOptions) -> Workspace:
    grid = WindowGrid(job.shape, segmenter.patch, options.sliding.overlap)
    return Workspace(
        manifest.unfinished(job), grid, segmenter.classes, _kind(segmenter, options), _channels(segmenter, options),
        manifest.key_of(job),
    )  # fmt: skip


def _predict_one(
    job: _Job, workspace: Workspace, segmenter: Segmenter, options: PredictionOptions, progress: Advance, say: Say
) -> PredictedVolume:
    began_s = time.monotonic()

    def take(region: Region, probabilities: Tensor) -> None:
        if options.probabilities is not None:
            found = scaled(probabilities, options.probabilities)
        else:
            found = decided(probabilities, options.threshold)
        workspace.result.write(region, found.cpu().numpy())  # waits for the device, once in a row of windows

    predict_volume(
        segmenter, job.images, take, sliding=options.sliding, carried=workspace, progress=progress, say=say
    )  # fmt: skip
    result = workspace.result
    for number, step in enumerate(options.post):
        cleaned = RawVolume(workspace.folder / f"post.{number % 2}", job.shape, result.dtype)
        apply_step(step, result, cleaned)
        if result is not workspace.result:
            result.close()
        result = cleaned
    foreground = None if options.probabilities is not None else _foreground(result)
    write_volume(result, job.target, options.file_format)
    if result is not workspace.result:
        result.close()
    seconds = time.monotonic() - began_s
    return PredictedVolume(job.id, job.target, job.shape, job.size.windows, seconds, foreground)


def _foreground(result: RawVolume) -> float:
    depth = result.shape[0]
    set_voxels = sum(int(np.count_nonzero(result.planes(z, z + 1))) for z in range(depth))
    return set_voxels / max(1, depth * result.shape[1] * result.shape[2])


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


class _Manifest:
    """The note in a folder of what its files were made with."""

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
                f"{out} has predictions of other settings\n" + "\n".join(lines),
                why="half of the volumes would be predicted in one way and half in another",
                hint="--out ANOTHER_FOLDER, or --force to replace them",
            )

    def unfinished(self, job: _Job) -> Path:
        return self._out / UNFINISHED / job.id

    def key_of(self, job: _Job) -> str:
        """Changes with the settings and with the volume."""
        document = json.dumps([FORMAT, self._settings, job.identity, job.shape], sort_keys=True)
        return hashlib.blake2b(document.encode(), digest_size=16).hexdigest()

    def has(self, job: _Job) -> bool:
        """Whether this volume, as it is now, was predicted with these settings, and the file is there."""
        return self._volumes.get(job.id, {}).get("key") == self.key_of(job) and job.target.exists()

    def known(self, job: _Job) -> PredictedVolume:
        entry = self._volumes[job.id]
        return PredictedVolume(job.id, job.target, job.shape, job.size.windows, None, entry.get("foreground"))

    def check_targets(self, jobs: Sequence[_Job]) -> None:
        """Refuses to replace files that are not of this prediction."""
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
                f"{self._out} has {count(len(strange), 'file')} of another origin: {some(strange)}",
                why=f"{MANIFEST} does not list them, so they would be lost",
                hint="--out ANOTHER_FOLDER, or --force to replace them",
            )

    def add(self, job: _Job, made: PredictedVolume) -> None:
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
                why="it says what the files beside it were made with", hint="--out ANOTHER_FOLDER, or --force",
            ) from None  # fmt: skip
        return document


@contextmanager
def _only_one(out: Path) -> Iterator[None]:
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


def _check_resources(jobs: Sequence[_Job], out: Path, segmenter: Segmenter, options: PredictionOptions) -> None:
    """Refuses what the disk or the memory cannot hold, before hours of work."""
    if not jobs:
        return
    share = 1.0 if options.probabilities is not None else _COMPRESSED_MASK
    # A chain of steps has the mask before and after a step.
    extra = min(2, len(options.post))
    needed = max(job.size.disk_bytes + extra * job.size.result_bytes for job in jobs)
    needed += int(share * sum(job.size.result_bytes for job in jobs)) * (2 if options.submission else 1)
    free = free_bytes(out)
    if needed > free:
        raise UserError(
            "disk-too-small",
            f"{out} has {free / 1e9:,.1f} GB left; {count(len(jobs), 'volume')} need about {needed / 1e9:,.1f} GB",
            why="sums and the uncompressed result of the volume in the making are on disk, besides the finished ones",
            hint="--out FOLDER on a larger disk, or fewer volumes at a time",
        )
    memory = read_memory()
    cleaning = max(working_bytes(job.shape, options.post) for job in jobs)
    sums = max(job.size.sums_bytes for job in jobs) if segmenter.device.type == "cpu" else 0
    if memory is not None and max(cleaning, 2 * sums) > memory.available_bytes:
        what = f"--post takes {cleaning / 1e9:.1f} GB" if cleaning > 2 * sums else f"sums take {2 * sums / 1e9:.1f} GB"
        raise UserError(
            "memory-too-small",
            f"{what}; {memory.available_bytes / 1e9:.1f} GB are available",
            why="the process would be killed in the middle",
            hint="leave out --post" if cleaning > 2 * sums else "save the volume with its shortest axis as x",
        )


def _kind(segmenter: Segmenter, options: PredictionOptions) -> np.dtype[Any]:
    if options.probabilities is not None:
        return np.dtype(options.probabilities)
    return np.dtype(np.uint8 if segmenter.classes <= 256 else np.int16)


def _channels(segmenter: Segmenter, options: PredictionOptions) -> int:
    return segmenter.classes - 1 if options.probabilities is not None else 1


def _single(place: Place) -> Case:
    suffix = suffix_of(place.name)
    name = place.name[: -len(suffix)] if suffix else place.name
    # Not `ref_to`, which lists the folder around it: a URL may be of a place that cannot be listed.
    return Case(name, name, (VolumeRef(place.url if isinstance(place, UrlPath) else str(place)),), None)


def _is_volume(place: Place) -> bool:
    """By its suffix, or by the files of a Zarr array; a folder may be called anything."""
    suffix = suffix_of(place.name)
    if suffix == ".zarr" or (suffix and (isinstance(place, UrlPath) or not place.is_dir())):
        return True
    return any((place / name).is_file() for name in ("zarr.json", ".zarray", ".zgroup"))


def _has_layout(place: Place) -> bool:
    named = (place / name for name in ("dataset.json", "train.csv", PACK_INDEX))
    return any(one.is_file() for one in named) or (place / "test_images").is_dir()


def _digest(path: Path) -> str:
    state = xxhash.xxh3_128()
    with path.open("rb") as file:
        while part := file.read(1 << 24):
            state.update(part)
    return state.hexdigest()
