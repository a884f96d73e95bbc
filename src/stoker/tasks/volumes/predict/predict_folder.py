"""`stoker predict` on volumes: each of them into a file of a folder, with a note of what it was made with.

A killed prediction resumes: finished volumes are kept, and the unfinished one resumes at its layer of windows. A
folder holds the predictions of one set of checkpoints and options; others are refused, never mixed.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from stoker.core.console import Advance, Answer, Say, format_table, progress_bar, say, shown
from stoker.core.errors import Interrupted, UsageError, UserError
from stoker.core.units import count, size_text
from stoker.io.stores import ReadFailure, is_url
from stoker.profile.memory import read_memory
from stoker.tasks.volumes.cases.cases import Case
from stoker.tasks.volumes.formats.opening import OpenVolumes
from stoker.tasks.volumes.formats.volume import Region
from stoker.tasks.volumes.predict.inputs import cases_to_predict, warn_if_unprepared
from stoker.tasks.volumes.predict.manifest import (
    UNFINISHED,
    Job,
    Manifest,
    PredictedVolume,
    PredictionOptions,
    only_one,
    settings_of,
)
from stoker.tasks.volumes.predict.output import (
    SUFFIX,
    FileFormat,
    RawVolume,
    Workspace,
    disk_errors,
    free_bytes,
    write_submission,
    write_volume,
)
from stoker.tasks.volumes.predict.postprocess import apply_step, parse_chain, working_bytes
from stoker.tasks.volumes.predict.prediction import (
    Scale,
    Segmenter,
    check_channels,
    decided,
    predict_volume,
    scaled,
    segmenter_of,
)
from stoker.tasks.volumes.predict.windows import SlidingWindow, WindowGrid, prediction_size
from stoker.tasks.volumes.reading_options import reading_options
from stoker.tasks.volumes.segment import TrainedVolumeModel, open_trained

SUBMISSION = "submission.zip"
# The share that deflate leaves of a mask, with room to spare: those of made-up scrolls shrink to a twentieth or less.
_COMPRESSED_MASK = 1 / 10


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
    cases = cases_to_predict(data, say)
    trained = [open_trained(path, say, settings, raw=raw) for path in (checkpoint, *(more or ()))]
    config = trained[0].config
    options = PredictionOptions(
        SlidingWindow(config.predict_overlap, config.predict_flips), config.predict_threshold, probabilities,
        format_ or "tiff", parse_chain(config.predict_postprocess), submission, force,
    )  # fmt: skip
    try:
        with progress_bar("predicting", None, unit="windows") as advance:
            found = predict_folder(trained, cases, out, options, progress=advance, say=say)
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
    """A row for each predicted volume, and where the submission is."""
    rows = []
    for one in found.volumes:
        speed = "earlier" if one.seconds is None else f"{one.seconds:,.1f} s"
        share = "" if one.foreground is None else f"{one.foreground:.2%}"
        rows.append(
            (shown(one.id), "x".join(map(str, one.shape)), f"{one.windows:,}", speed, share, shown(str(one.path)))
        )
    if not rows:
        return ""
    table = format_table(rows, ("volume", "shape", "windows", "time", "not class 0", "file"))
    return table if found.submission is None else f"{table}\n\n{found.submission}: {len(rows)} volumes"


def predict_folder(
    trained: Sequence[TrainedVolumeModel],
    cases: Sequence[Case],
    out: Path,
    options: PredictionOptions,
    *,
    progress: Advance | None = None,
    say: Say = lambda _line: None,
) -> VolumePredictions:
    """Predicts every case into `out`. A case that cannot be read is set aside; all other problems are raised
    before anything is predicted."""
    segmenter = segmenter_of(trained)
    options.check(segmenter.classes)
    warn_if_unprepared(trained[0], cases, say)
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


def _opened(
    cases: Sequence[Case], volumes: OpenVolumes, segmenter: Segmenter, out: Path, options: PredictionOptions
) -> tuple[list[Job], list[tuple[str, str]]]:
    jobs: list[Job] = []
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
        jobs.append(Job(case.id, images, out / f"{case.id}{SUFFIX[options.file_format]}", size))
        inputs |= {Path(ref.location).resolve() for ref in case.images if not is_url(ref.location)}
    for job in jobs:
        if job.target.resolve() in inputs:
            raise UserError(
                "out-is-input", f"{job.target} would replace a volume that is read", hint="--out ANOTHER_FOLDER"
            )
    return jobs, bad


def _predict_all(
    jobs: Sequence[Job],
    manifest: Manifest,
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
            # Work of an earlier start does not count, or the rate would be wrong.
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


def _workspace(job: Job, manifest: Manifest, segmenter: Segmenter, options: PredictionOptions) -> Workspace:
    grid = WindowGrid(job.shape, segmenter.patch, options.sliding.overlap)
    return Workspace(
        manifest.unfinished(job), grid, segmenter.classes, _kind(segmenter, options), _channels(segmenter, options),
        manifest.key_of(job),
    )  # fmt: skip


def _predict_one(
    job: Job, workspace: Workspace, segmenter: Segmenter, options: PredictionOptions, progress: Advance, say: Say
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


def _check_resources(jobs: Sequence[Job], out: Path, segmenter: Segmenter, options: PredictionOptions) -> None:
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
            f"{out} has {size_text(free)} left; {count(len(jobs), 'volume')} need about {size_text(needed)}",
            why="sums and the uncompressed result of the volume in the making are on disk, besides the finished ones",
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
            why="the process would be killed in the middle",
            hint=hint,
        )


def _kind(segmenter: Segmenter, options: PredictionOptions) -> np.dtype[Any]:
    if options.probabilities is not None:
        return np.dtype(options.probabilities)
    return np.dtype(np.uint8 if segmenter.classes <= 256 else np.int16)


def _channels(segmenter: Segmenter, options: PredictionOptions) -> int:
    return segmenter.classes - 1 if options.probabilities is not None else 1
