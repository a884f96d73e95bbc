"""Copies a source into a local copy: which files, what of them is missing, whether there is room, whether it pays off,
the copying itself, and `--verify`."""

from __future__ import annotations

import json
import os
import random
import shutil
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import xxhash

from stoker.config import Config
from stoker.core.console import Advance, shown, some
from stoker.core.errors import UserError
from stoker.core.files import write_text
from stoker.core.redact import redact_text
from stoker.core.units import count, size_text
from stoker.io.copy_manifest import CopiedFile
from stoker.io.local_copy import SUBSET, LocalCopy, remove_abandoned, temporary_name
from stoker.io.stores import Location, is_url
from stoker.profile.mounts import same_device
from stoker.stage.sources import Source, SourceFile
from stoker.stage.transfer import StageOptions, Summary, Transfer, failure_lines, room_margin, writing
from stoker.tasks.base import Selection, task_for

if TYPE_CHECKING:
    from stoker.plan.break_even import Payback

MARKERS = ("index.json", "volumes.json")
"""The file that a pack writes last, and so does a copy of it: once it is there, the pack is complete."""


def selected_files(selection: Selection, source: Source, progress: Advance | None = None) -> Iterator[SourceFile]:
    """The files to copy, as the source lists them now; raises UserError if one that is wanted is not there."""
    missing = None if selection.paths is None else set(selection.paths)
    told: set[str] = set()
    for folder in sorted(selection.support_in):
        for file in source.directly_in(folder):
            if selection.wanted(file.path):
                told.add(file.path)
                yield file
    for file in source.files(_without_nested(selection.folders), progress):
        if selection.wanted(file.path) and file.path not in told:
            yield file
            if missing is not None:
                missing.discard(file.path)
    if missing:
        missing -= told
    if missing:
        raise UserError(
            "data-changed",
            f"{redact_text(source.url)} lacks {count(len(missing), 'file')} of the index: {some(sorted(missing))}",
            why="the data has changed since it was listed, and so may the part that was chosen",
            hint="run it again; an index of a URL is renewed if its folder below index_dir is removed",
        )


def _without_nested(folders: tuple[str, ...]) -> tuple[str, ...]:
    """The folders that are not inside another one, which lists them already."""
    known = set(folders)

    def is_nested(folder: str) -> bool:
        while folder:
            folder = folder.rpartition("/")[0]
            if folder in known:
                return True
        return False

    return tuple(folder for folder in dict.fromkeys(folders) if not is_nested(folder))


@dataclass(frozen=True)
class Work:
    """What is left to copy, known before the first byte."""

    files: list[SourceFile]
    bytes: int
    total_files: int
    total_bytes: int

    @property
    def present_files(self) -> int:
        return self.total_files - len(self.files)


def find_work(source: Source, copy: LocalCopy, selection: Selection, progress: Advance | None = None) -> Work:
    """What is missing in the copy or differs from the source; raises UserError if some names cannot be in one copy."""
    ignore_case = ignores_case(copy.folder)
    left: list[SourceFile] = []
    paths: list[str] = []
    total_bytes = 0
    for file in selected_files(selection, source, progress):
        total_bytes += file.size
        paths.append(file.path)
        known = copy.present(file.path) if "\0" not in file.path else None
        if known is None or (known.size, known.version) != (file.size, file.version):
            left.append(file)
    check_names(paths, ignore_case=ignore_case)
    if not paths:
        raise UserError(
            "nothing-to-stage",
            f"there are no files at {source.url}",
            why="an empty copy is probably not what you want",
            hint="check the path; a prefix of a bucket is spelled exactly, with upper and lower case",
        )
    return Work(left, sum(file.size for file in left), len(paths), total_bytes)


def check_names(paths: Iterable[str], *, ignore_case: bool) -> None:
    """Raises UserError if some of these names cannot be files beside each other."""
    files, folders, twins = set[str](), set[str](), list[str]()
    for path in paths:
        folded = path.casefold() if ignore_case else path
        if ignore_case and folded in files:
            twins.append(path)
        files.add(folded)
        folder = folded.rpartition("/")[0]
        while folder and folder not in folders:
            folders.add(folder)
            folder = folder.rpartition("/")[0]
    if twins:
        raise UserError(
            "names-differ-in-case",
            f"{count(len(twins), 'name')} the same as another except for upper and lower case: {some(twins)}",
            why="the target's file system does not distinguish them, so one would overwrite the other",
            hint="choose a target on a file system that does, such as ext4 or XFS",
        )
    if both := sorted(files & folders):
        raise UserError(
            "file-and-folder",
            f"{count(len(both), 'name')} used for a file and for a folder: {some(both)}",
            why="an object store allows that, a file system does not",
            hint="stage the folders one by one",
        )


def ignores_case(folder: str) -> bool:
    """Whether the file system of a folder is case-insensitive: `A` and `a` are the same name."""
    name = temporary_name(folder)
    with writing(folder):
        os.close(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666))
        try:
            return os.path.exists(f"{folder}/{os.path.basename(name).upper()}")  # noqa: PTH110, PTH119
        finally:
            os.unlink(name)  # noqa: PTH108


def check_room(work: Work, folder: str) -> None:
    """Raises UserError if the disk has no room for what is left to copy."""
    disk = shutil.disk_usage(folder)
    margin = room_margin(folder)
    usable = disk.free - margin
    if work.bytes > usable:
        raise UserError(
            "disk-too-small",
            f"{size_text(work.bytes)} to copy, and {folder} has room for {size_text(max(0, usable))}",
            why=f"{size_text(disk.free)} are free, of which {size_text(margin)} stay free",
            hint="choose another disk, or a part of the data: --classes 100 --train-per-class 500",
        )


MEASURE_S = 3.0
READERS = 64
PART = 16 << 20
"""Bytes read from a large file: enough to see its rate."""


def measure_payback(
    source: Source, files: Sequence[SourceFile], folder: str, *, seconds: float | None = None
) -> Payback | None:
    """When the copy pays off, from reading some of the files for some seconds; None if too little could be read."""
    # These need numpy, which copying does without.
    from stoker.io.storage_speed import drop_from_cache, measure_local_disk, read_round
    from stoker.plan.break_even import payback_of

    root = None if is_url(source.url) else source.url
    by_path = {file.path: file for file in files}

    def read(place: Location) -> int:
        # Local files that stay in the page cache would show the speed of memory, not of the source.
        if root is not None and not drop_from_cache(f"{root}/{place.path}", 0, place.size):
            raise OSError("it stays in the page cache")
        file = by_path[place.path]
        return len(source.read(file, 0, min(file.size, PART)).data)

    places = [Location(file.path, 0, min(file.size, PART)) for file in files if file.size]
    random.Random(0).shuffle(places)  # noqa: S311
    seen = read_round(read, places, READERS, seconds or MEASURE_S, min(4, len(files)))
    if seen is None:
        return None
    size = sum(file.size for file in files)
    # Beside the target and not in it: if we are killed, no folder is left that a data set would take for a class.
    beside = Path(folder).absolute().parent
    local = measure_local_disk(beside, size / len(files), 1.0) if same_device(str(beside), folder) else None
    return payback_of(size, seen.bytes_per_second, seen.at_once, local)


Show = Callable[[Summary, int], None]
"""Shows progress: the summary so far, and the bytes that have to be copied."""


def copy_all(
    source: Source, copy: LocalCopy, selection: Selection, work: Work, options: StageOptions, show: Show
) -> Summary:
    """Copies what is left; returns a summary. However it ends, copied files stay and are in the manifest."""
    summary = Summary(source.url, copy.folder, work.total_files, work.total_bytes, present_files=work.present_files)
    summary.subset = selection.record
    run = Transfer(source, copy, options, summary, lambda: show(summary, work.bytes))
    try:
        with suppress(FileExistsError):
            for folder in selection.empty_folders:
                os.makedirs(copy.place(folder), exist_ok=True)  # noqa: PTH103
        run.copy(file for file in work.files if not _is_marker(file))
        markers = [file for file in work.files if _is_marker(file)]
        if summary.failures:
            summary.failures += [(file.path, "not copied: it comes last, and others failed") for file in markers]
        else:
            run.copy(markers)
    finally:
        run.close()
    remove_abandoned(copy.folder)
    return summary


def _is_marker(file: SourceFile) -> bool:
    return file.path.rpartition("/")[2] in MARKERS


def check_apart(source: str, target: str) -> None:
    """Raises UserError if the target is inside the source or the other way round."""
    target = os.path.realpath(target)
    for inner, outer, what in ((target, source, "the target is inside"), (source, target, "the source is inside")):
        if inner == outer or inner.startswith(f"{outer.rstrip('/')}/"):
            raise UserError(
                "target-inside-source" if outer == source else "source-inside-target",
                f"{inner} is {'the same folder as' if inner == outer else 'inside'} {outer}",
                why="the copy would contain itself"
                if outer == source
                else f"{what} the copy, which it could overwrite",
                hint="choose a folder elsewhere",
            )


def write_config_of_copy(file: Path, config: Config, overrides: list[str], folder: str, output: Path | None) -> Path:
    """Writes a config with the original one as its base and the copy as its data_root; returns its path."""
    target = (output or Path(folder) / file.name).absolute()
    base = os.path.relpath(file.resolve(), target.parent.resolve())
    root = task_for(config).root_in_copy(config, folder)
    keys = dict(override.split("=", 1) for override in overrides)
    keys.pop("data_root", None)
    lines = [f"base: {json.dumps(base)}", f"data_root: {json.dumps(root)}"]
    lines += [f"{key}: {value}" for key, value in keys.items()]
    write_text(target, "\n".join(lines) + "\n")
    return target


# `--verify`: reads a whole copy again and compares every file with its hash in the manifest.

_THREADS = 8
_PIECE = 4 << 20
_BATCH = 4096


@dataclass
class Verification:
    """The state of a copy's files."""

    folder: str
    source: str
    files: int = 0
    bytes: int = 0
    wrong: list[tuple[str, str]] = field(default_factory=list)
    """Files that differ from the manifest, and how."""
    unknown: list[str] = field(default_factory=list)
    """Files that are not in the manifest."""

    @property
    def whole(self) -> bool:
        """Whether every file of the manifest is there and has its content."""
        return not self.wrong

    def as_dict(self) -> dict[str, Any]:
        return {
            "target": self.folder,
            "source": self.source,
            "whole": self.whole,
            "files": self.files,
            "bytes": self.bytes,
            "wrong": [{"path": path, "reason": reason} for path, reason in self.wrong],
            "not_in_the_manifest": self.unknown,
        }


def verification_text(result: Verification) -> str:
    lines = failure_lines(result.wrong)
    if result.unknown:
        lines.append(f"note: {count(len(result.unknown), 'file')} not in the manifest: {shown(result.unknown[0])} …")
    verdict = "all as copied" if result.whole else f"{count(len(result.wrong), 'file')} wrong or missing"
    lines.append(f"verified {count(result.files, 'file')}, {size_text(result.bytes)} of {result.folder}: {verdict}")
    return "\n".join(lines)


def verify_copy(copy: LocalCopy, progress: Advance) -> Verification:
    """Reads every file that the manifest lists; `progress` counts files. Those that are wrong are taken out of the
    manifest, so that the next staging copies them again."""
    result = Verification(copy.folder, copy.source)
    known: set[int] = set()
    with ThreadPoolExecutor(_THREADS) as pool:
        records = copy.records()
        while batch := list(islice(records, _BATCH)):
            for record, reason in zip(batch, pool.map(lambda one: _difference(copy, one), batch), strict=True):
                known.add(xxhash.xxh3_64_intdigest(record.path.encode("utf-8", "surrogateescape")))
                result.files += 1
                result.bytes += record.size
                if reason is not None:
                    result.wrong.append((record.path, reason))
            progress(result.files, len(copy))
    if not copy.read_only:
        copy.forget(path for path, _ in result.wrong)
    for path in _files_of(copy.folder):
        if xxhash.xxh3_64_intdigest(path.encode("utf-8", "surrogateescape")) not in known:
            result.unknown.append(path)
    return result


def _difference(copy: LocalCopy, record: CopiedFile) -> str | None:
    """How a file differs from its line in the manifest; None if it does not."""
    try:
        descriptor = os.open(copy.place(record.path), os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return "missing"
    except OSError as error:
        return error.strerror
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            return "not a file"
        if found.st_size != record.size:
            return f"{found.st_size} bytes instead of {record.size}"
        # A page that is correct in memory may be damaged on the disk.
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        digest = xxhash.xxh3_128()
        while piece := os.read(descriptor, _PIECE):
            digest.update(piece)
    except OSError as error:
        return error.strerror
    finally:
        os.close(descriptor)
    return None if digest.hexdigest() == record.xxh3 else "its content has changed"


def _files_of(folder: str) -> Iterator[str]:
    waiting = [""]
    while waiting:
        below = waiting.pop()
        with os.scandir(f"{folder}/{below}") as entries:
            for entry in entries:
                path = f"{below}/{entry.name}" if below else entry.name
                if entry.is_dir(follow_symlinks=False):
                    waiting.append(path)
                elif below or not (
                    entry.name.startswith(".stage") or entry.name == SUBSET or entry.name.endswith(".yaml")
                ):
                    yield path
