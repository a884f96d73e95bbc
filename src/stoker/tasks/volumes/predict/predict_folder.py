"""`stoker predict` on volumes: which ones, and each into a file of a folder, with a record of how it was made.

A killed prediction resumes: finished volumes are kept, and the unfinished one resumes at its layer of windows. A
folder holds the predictions of one set of checkpoints and options; others are refused, never mixed.
"""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from torch import Tensor

from stoker.core.console import Advance, Answer, format_table, progress_bar, say, say_notes, shown, some
from stoker.core.errors import Interrupted, UsageError, UserError
from stoker.core.units import count, size_text
from stoker.io.stores import ReadFailure, is_url
from stoker.profile.memory import read_memory
from stoker.tasks.volumes.cases.cases import Case, files_in, open_cases
from stoker.tasks.volumes.cases.places import Place, UrlPath, place_at
from stoker.tasks.volumes.data import reading_options
from stoker.tasks.volumes.formats.opening import SUFFIXES, OpenVolumes, VolumeRef, suffix_of
from stoker.tasks.volumes.formats.volume import Region
from stoker.tasks.volumes.pack.index import INDEX as PACK_INDEX
from stoker.tasks.volumes.pack.index import read_index
from stoker.tasks.volumes.predict.output import (
    SUFFIX,
    UNFINISHED,
    FileFormat,
    Job,
    Manifest,
    PredictedVolume,
    PredictionOptions,
    RawVolume,
    Workspace,
    disk_errors,
    only_one,
    settings_of,
    write_submission,
    write_volume,
)
from stoker.tasks.volumes.predict.postprocess import apply_step, parse_chain, working_bytes
from stoker.tasks.volumes.predict.segmenter import (
    Scale,
    Segmenter,
    check_channels,
    decided,
    predict_volume,
    scaled,
    segmenter_of,
)
from stoker.tasks.volumes.predict.windows import SlidingWindow, WindowGrid, prediction_size
from stoker.tasks.volumes.segment import TrainedVolumeModel, open_trained

SUBMISSION = "submission.zip"
# The share that deflate leaves of a mask, with room to spare: those of made-up scrolls shrink to a twentieth or less.
_COMPRESSED_MASK = 1 / 10
# A pack's options that leave voxels as they are.
_NOT_VOXELS = ("layout", "labels")


@dataclass(frozen=True)
class VolumePredictions:
    """The volumes that were predicted, and those that could not be read."""

    volumes: tuple[PredictedVolume, ...]
    bad: tuple[tuple[str, str], ...]
    """Id and reason."""
    submission: Path | None = None


def predict(
    checkpoint: Path,
    data: Sequence[str],
    settings: Sequence[str],
    *,
    raw: bool,
    out: Path | None,
    more: Sequence[Path] | None,
    format_: FileFormat | None,
    probabilities: Scale | None,
    submission: bool,
    force: bool,
) -> Answer:
    """Writes the classes of each volume's voxels into a folder; the same command again resumes there."""
    if out is None:
        raise UsageError("no-out", "no folder for the predictions given", hint="--out predictions/")
    cases = cases_to_predict(data)
    trained = [open_trained(path, say, settings, raw=raw) for path in (checkpoint, *(more or ()))]
    config = trained[0].config
    options = PredictionOptions(
        SlidingWindow(config.predict_overlap, config.predict_flips), config.predict_threshold, probabilities,
        format_ or "tiff", parse_chain(config.predict_postprocess), submission, force,
    )  # fmt: skip
    try:
        found = predict_folder(trained, cases, out, options)
    except KeyboardInterrupt:
        raise Interrupted("interrupted", "stopped by Ctrl-C", hint="the same command resumes") from None
    for name, reason in found.bad:
        say(f"bad volume: {name}: {reason}")
    document = {
        "checkpoints": [str(one.path) for one in trained],
        "weights": ["averaged" if one.averaged else "raw" for one in trained],
        "out": str(out),
        "volumes": [asdict(one) | {"path": str(one.path), "shape": list(one.shape)} for one in found.volumes],
        "bad": [{"id": name, "reason": reason} for name, reason in found.bad],
        "submission": None if found.submission is None else str(found.submission),
    }
    return Answer(_text(found), document, complete=not found.bad)


def _text(found: VolumePredictions) -> str:
    rows = [
        (
            shown(one.id),
            "x".join(map(str, one.shape)),
            f"{one.windows:,}",
            "earlier" if one.seconds is None else f"{one.seconds:,.1f} s",
            "" if one.foreground is None else f"{one.foreground:.2%}",
            shown(str(one.path)),
        )
        for one in found.volumes
    ]
    if not rows:
        return ""
    table = format_table(rows, ("volume", "shape", "windows", "time", "not class 0", "file"))
    return table if found.submission is None else f"{table}\n\n{found.submission}: {len(rows)} volumes"


def cases_to_predict(data: Sequence[str]) -> tuple[Case, ...]:
    """The cases of volume files, Zarr folders and URLs, YAML lists, folders of volumes, and the layouts of data sets
    (their test part)."""
    found: list[Case] = []
    for place in map(place_at, data):
        if _is_volume(place):
            found.append(_single(place))
        elif place.is_dir() and not _has_layout(place):
            files = [one for one in files_in(place) if suffix_of(one.name)]
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
            say_notes(listed.notes)
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


def warn_if_unprepared(trained: TrainedVolumeModel, cases: Sequence[Case]) -> None:
    """Warns if the network was trained on voxels that packing had changed, and these volumes are unchanged."""
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


def _single(place: Place) -> Case:
    suffix = suffix_of(place.name)
    name = place.name[: -len(suffix)] if suffix else place.name
    # Not `ref_to`, which lists the folder around it: a URL may point to a place that cannot be listed.
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


def predict_folder(
    trained: Sequence[TrainedVolumeModel], cases: Sequence[Case], out: Path, options: PredictionOptions
) -> VolumePredictions:
    """Predicts every case into `out`. A case that cannot be read is set aside; all other problems are raised
    before anything is predicted."""
    segmenter = segmenter_of(trained)
    options.check(segmenter.classes)
    warn_if_unprepared(trained[0], cases)
    volumes = OpenVolumes(reading_options(trained[0].config, cases))
    jobs, bad = _opened(cases, volumes, segmenter, out, options)
    with disk_errors(out):
        out.mkdir(parents=True, exist_ok=True)
        (out / UNFINISHED).mkdir(exist_ok=True)
    with only_one(out), disk_errors(out):
        manifest = Manifest(out, settings_of(trained, options), options.force)
        manifest.check_targets(jobs)
        waiting = [job for job in jobs if not manifest.has(job)]
        if len(waiting) < len(jobs):
            say(f"{count(len(jobs) - len(waiting), 'volume')} of {len(jobs)} predicted already")
        _check_resources(waiting, out, segmenter, options)
        # Written first, so that it never lists a file made with other settings.
        manifest.write()
        with progress_bar("predicting", None, unit="windows") as advance:
            finished, failed = _predict_all(waiting, manifest, segmenter, options, advance)
        bad += failed
        done = [finished.get(job.id) or manifest.known(job) for job in jobs if job.id not in dict(failed)]
        submission = None
        if options.submission and not bad:
            submission = out / SUBMISSION
            write_submission([one.path for one in done], submission)
        elif options.submission:
            say(f"{SUBMISSION} is not written: {count(len(bad), 'volume')} would be missing in it")
    return VolumePredictions(tuple(done), tuple(bad), submission)


def _opened(
    cases: Sequence[Case], volumes: OpenVolumes, segmenter: Segmenter, out: Path, options: PredictionOptions
) -> tuple[list[Job], list[tuple[str, str]]]:
    jobs: list[Job] = []
    bad: list[tuple[str, str]] = []
    inputs: set[Path] = set()
    dtype, channels = options.stored_as(segmenter.classes)
    for case in cases:
        try:
            images = tuple(volumes.get(ref, case.box) for ref in case.images)
        except ReadFailure as failure:
            bad.append((case.id, str(failure)))
            continue
        check_channels(segmenter, images)
        size = prediction_size(
            images[0].shape, segmenter.patch, options.sliding, classes=segmenter.classes,
            networks=len(segmenter.models), voxel_bytes=channels * dtype.itemsize,
        )  # fmt: skip
        jobs.append(Job(case.id, images, out / f"{case.id}{SUFFIX[options.file_format]}", size))
        inputs |= {Path(ref.location).resolve() for ref in case.images if not is_url(ref.location)}
    for job in jobs:
        if job.target.resolve() in inputs:
            raise UserError(
                "out-is-input", f"{job.target} would replace a volume that is read", hint="--out ANOTHER_FOLDER"
            )
    return jobs, bad


def _predict_all(
    jobs: Sequence[Job], manifest: Manifest, segmenter: Segmenter, options: PredictionOptions, progress: Advance
) -> tuple[dict[str, PredictedVolume], list[tuple[str, str]]]:
    finished: dict[str, PredictedVolume] = {}
    failed: list[tuple[str, str]] = []
    total, before = sum(job.size.windows for job in jobs), 0

    for job in jobs:
        workspace = Workspace(
            manifest.unfinished(job), WindowGrid(job.shape, segmenter.patch, options.sliding.overlap),
            segmenter.classes, *options.stored_as(segmenter.classes), manifest.key_of(job),
        )  # fmt: skip
        skipped = workspace.first_layer * (job.size.windows // job.size.layers)
        if workspace.first_layer:
            say(f"{job.id}: resumed at layer {workspace.first_layer + 1} of {job.size.layers}")
        total -= skipped

        def advance(done: int, _of: int | None, skipped: int = skipped) -> None:
            # Windows predicted by an earlier start do not count, or the rate would be wrong.
            progress(before + done - skipped, total)  # noqa: B023 - called before the next volume begins

        try:
            finished[job.id] = _predict_one(job, workspace, segmenter, options, advance)
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


def _predict_one(
    job: Job, workspace: Workspace, segmenter: Segmenter, options: PredictionOptions, progress: Advance
) -> PredictedVolume:
    began_s = time.monotonic()

    def take(region: Region, probabilities: Tensor) -> None:
        if options.probabilities is not None:
            found = scaled(probabilities, options.probabilities)
        else:
            found = decided(probabilities, options.threshold)
        workspace.result.write(region, found.cpu().numpy())  # waits for the device, once in a row of windows

    predict_volume(segmenter, job.images, take, sliding=options.sliding, carried=workspace, progress=progress)
    result = workspace.result
    for number, step in enumerate(options.post):
        cleaned = RawVolume(workspace.folder / f"post.{number % 2}", job.shape, result.dtype)
        apply_step(step, result, cleaned)
        result.close()
        result = cleaned
    foreground = None
    if options.probabilities is None:
        found = sum(int(np.count_nonzero(result.planes(z, z + 1))) for z in range(job.shape[0]))
        foreground = found / math.prod(job.shape)
    write_volume(result, job.target, options.file_format)
    result.close()
    seconds = time.monotonic() - began_s
    return PredictedVolume(job.id, job.target, job.shape, job.size.windows, seconds, foreground)


def _check_resources(jobs: Sequence[Job], out: Path, segmenter: Segmenter, options: PredictionOptions) -> None:
    """Refuses, before hours of work, what does not fit on the disk or into memory."""
    if not jobs:
        return
    share = 1.0 if options.probabilities is not None else _COMPRESSED_MASK
    # A chain of steps has the mask before and after a step.
    extra = min(2, len(options.post))
    needed = max(job.size.disk_bytes + extra * job.size.result_bytes for job in jobs)
    needed += int(share * sum(job.size.result_bytes for job in jobs)) * (2 if options.submission else 1)
    free = shutil.disk_usage(out).free
    if needed > free:
        raise UserError(
            "disk-too-small",
            f"{out} has {size_text(free)} left; {count(len(jobs), 'volume')} need about {size_text(needed)}",
            why="besides the finished volumes, the sums and uncompressed result of the current one are on disk",
            hint="--out FOLDER on a larger disk, or fewer volumes at a time",
        )
    memory = read_memory()
    cleaning = max(working_bytes(job.shape, options.post) for job in jobs)
    sums = max(job.size.sums_bytes for job in jobs) if segmenter.device.type == "cpu" else 0
    if memory is not None and max(cleaning, 2 * sums) > memory.available_bytes:
        what, hint = f"sums take {size_text(2 * sums)}", "save the volume with its shortest axis as x"
        if cleaning > 2 * sums:
            what, hint = f"cleaning takes {size_text(cleaning)}", "leave out predict_postprocess"
        raise UserError(
            "memory-too-small",
            f"{what}; {size_text(memory.available_bytes)} are available",
            why="the process would be killed halfway",
            hint=hint,
        )
