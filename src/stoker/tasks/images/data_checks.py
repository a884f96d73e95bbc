"""Is the data there, whole, and the same classes in training and validation? Do files decode, are they on the disk or
still to be fetched, and are some in both splits?"""

from __future__ import annotations

import os
import shlex
import shutil
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, TypeVar

import numpy as np
import xxhash
from numpy.typing import NDArray

from stoker.core.console import shown, some
from stoker.core.errors import UserError
from stoker.core.finding import Finding
from stoker.core.units import count
from stoker.io.storage_speed import LOCAL_READERS
from stoker.io.stores import ReadFailure, Store, is_url, open_store
from stoker.profile.mounts import mount_of
from stoker.tasks.checks import Check, Subject, failed, first_lines, passed, unknown
from stoker.tasks.images.data import decoding_with, read_sample, validation_view
from stoker.tasks.images.decode.headers import BadImage
from stoker.tasks.images.layouts import imagenet
from stoker.tasks.images.layouts.class_folders import class_names
from stoker.tasks.images.layouts.parquet_files import is_parquet, open_sample_store
from stoker.tasks.images.layouts.sample_index import SampleIndex, SampleSet
from stoker.tasks.images.layouts.splits import split_place

LIKE_VALIDATION = ("val", "dev", "test", "eval", "holdout")
"""Prefixes of folder names that people use for validation."""
# A class with less than a tenth of the usual number of images was probably cut short, unless there are many of them:
# then the data has a long tail.
SMALL_SHARE = 0.1
RARE_SHARE = 0.05
USUAL_LEAST = 20
"""If the usual class has fewer images, a small one says nothing."""
CLOSE_SHARE = 0.001
"""ImageNet with this many images more or less, and every class in its range, is complete: people remove broken ones."""


def check_present(subject: Subject) -> Finding:
    """Training images can be listed, and there are several classes."""
    try:
        train, val = subject.data.train, subject.data.val
    except UserError as error:
        if error.name == "classes-differ":
            return passed(f"{shown(str(subject.config.data_root))} has train and val")  # another check's finding
        why = f" ({error.why})" if error.why else ""
        return failed(f"{error.seen}{why}", error.hint or "data_root=FOLDER", reason=error.name)
    validation = "no validation images" if val is None else f"{len(val):,} validation images"
    return passed(
        f"{len(train):,} training images in {len(train.classes):,} classes, {validation}",
        train=len(train),
        val=None if val is None else len(val),
        classes=len(train.classes),
    )


def check_validation_split(subject: Subject) -> Finding:
    """There is a validation split; if not, suggests a folder that may be meant."""
    train, val = subject.data.train, subject.data.val
    if val is not None:
        return passed(f"{len(val):,} images in {shown(val.index.root)}")
    root = str(subject.config.data_root)
    lost = "without one there is no val/acc1, and no best checkpoint"
    names = [] if is_url(root) else class_names(split_place(root, ""))
    for name in (name for name in names if name != "train" and name.lower().startswith(LIKE_VALIDATION)):
        folders = class_names(split_place(root, name))
        same = len(set(folders) & set(train.index.classes))
        if same:
            link = shlex.quote(f"{split_place(root, '')}/val")
            return failed(
                f"there is no val/, but {shown(name)}/ has {same:,} of the {len(train.classes):,} classes; {lost}",
                f"ln -s {shlex.quote(name)} {link}",
                found=name,
            )
    return unknown(f"no validation split; {lost}", "put validation images into val/CLASS/ beside train/")


def check_counts(subject: Subject) -> Finding:
    """Images per class: against ImageNet's own numbers, or among each other."""
    train, val = subject.data.train, subject.data.val
    counts = _counts(train.index, train.classes)
    facts: dict[str, Any] = {"images": int(counts.sum()), "fewest": int(counts.min()), "most": int(counts.max())}
    if imagenet.is_whole_imagenet(train.index.classes) and imagenet.is_whole_imagenet(train.classes):
        held = None if val is None else _counts(val.index, train.classes)
        return _judge_imagenet(counts, held, train.classes, facts)
    seen = f"{counts.sum():,} training images, {counts.min():,} to {counts.max():,} in a class"
    empty = [name for name, images in zip(train.classes, counts.tolist(), strict=True) if not images]
    if empty:
        return failed(
            f"{count(len(empty), 'class', 'classes')} without training images: {some(empty)}",
            f"copy their images to {shown(train.index.root)} again, unless that is meant",
            empty=empty,
            **facts,
        )
    usual = float(np.median(counts))
    small = np.flatnonzero(counts < SMALL_SHARE * usual)
    facts["median"] = usual
    if len(small) and usual >= USUAL_LEAST:
        names = [f"{shown(train.classes[at])} ({counts[at]:,})" for at in small]
        if len(small) <= max(1, RARE_SHARE * len(counts)):
            return failed(
                f"{seen}; strangely few in {some(names)}, where the usual class has {usual:,.0f}",
                f"copy these folders to {shown(train.index.root)} again, unless they are whole",
                small=[train.classes[at] for at in small],
                **facts,
            )
        return passed(f"{seen}: a long tail, {len(small):,} classes have less than a tenth of the usual", **facts)
    return passed(seen, **facts)


def _judge_imagenet(
    counts: NDArray[np.int64], held: NDArray[np.int64] | None, classes: tuple[str, ...], facts: dict[str, Any]
) -> Finding:
    low, high = imagenet.TRAIN_PER_CLASS
    odd = np.flatnonzero((counts < low) | (counts > high))
    wrong = [f"train/{classes[at]}: {counts[at]:,} ({low} to {high:,})" for at in odd]
    total = int(counts.sum())
    seen = f"ImageNet: {total:,} training images"
    whole = abs(total - imagenet.TRAIN_IMAGES) <= CLOSE_SHARE * imagenet.TRAIN_IMAGES
    if held is not None:
        each = imagenet.VAL_PER_CLASS
        wrong += [f"val/{classes[at]}: {held[at]:,} ({each})" for at in np.flatnonzero(held != each)]
        seen += f", {held.sum():,} for validation"
        facts["val_images"] = int(held.sum())
    expected = f"{imagenet.TRAIN_IMAGES:,} and {imagenet.VAL_IMAGES:,}"
    if wrong or not whole:
        return failed(
            f"{seen}, instead of {expected}; {count(len(wrong), 'class folder')} of another size than ImageNet's",
            "copy or unpack these folders again, unless you chose a part on purpose",
            *first_lines(wrong),
            **facts,
        )
    same = total == imagenet.TRAIN_IMAGES and (held is None or int(held.sum()) == imagenet.VAL_IMAGES)
    return passed(seen + (", as published" if same else f" (published: {expected})"), **facts)


def check_classes_agree(subject: Subject) -> Finding | None:
    """Training and validation have the same classes, and each of them images."""
    try:
        train, val = subject.data.train, subject.data.val
    except UserError as error:
        if error.name != "classes-differ":
            raise
        return failed(error.seen, error.hint or "the class folders of train and val must have the same names")
    if val is None:
        return None
    counts = _counts(val.index, train.classes)
    lacking = [name for name, images in zip(train.classes, counts.tolist(), strict=True) if not images]
    if lacking:
        return failed(
            f"{shown(val.index.root)} has no images of {len(lacking):,} of the {len(train.classes):,} classes: "
            f"{some(lacking)}; nothing would show how well they are learned",
            f"copy them to {shown(val.index.root)}/{shown(lacking[0])}/ and so on",
            lacking=lacking,
        )
    return passed(f"train and val have the same {len(train.classes):,} classes", classes=len(train.classes))


def _counts(index: SampleIndex, classes: tuple[str, ...]) -> NDArray[np.int64]:
    """Number of images of each of these classes, by name; 0 for one without a folder."""
    images = np.bincount(index.labels, minlength=len(index.classes))
    of_name = dict(zip(index.classes, images.tolist(), strict=True))
    return np.array([of_name.get(name, 0) for name in classes], np.int64)


T = TypeVar("T")
R = TypeVar("R")
SHOWN_FILES = 12

DECODED_PER_CLASS, DEEP_DECODED_PER_CLASS = 2, 32
DECODING_S, DEEP_DECODING_S = 25.0, 900.0

HSM_FILES = 200
FIRST_READS = 40
FIRST_READS_S = 8.0
# A hard disk needs about 10 ms to find a file, an object store 30 to 100 ms. On a file system that fetches files
# from a bucket when they are first read, a hundred files took 94 s.
SLOW_FIRST_READ_S = 0.1
LAZY_RATIO = 5.0
"""If a first read takes this many times as long as the second, the file came from somewhere else."""

COMPARED, DEEP_COMPARED = 1000, 1 << 62
COMPARING_S, DEEP_COMPARING_S = 15.0, 1800.0
STAT_AT_ONCE = 200
PROBE_BYTES = 4096
LEAK_SHARE = 0.005
"""Share of validation images in the training set above which it counts as a fault: large public sets have a handful
of such images."""


def splits_of(subject: Subject) -> list[SampleSet]:
    return [samples for samples in (subject.data.train, subject.data.val) if samples is not None]


def in_turns(samples: SampleSet, per_class: int) -> NDArray[np.int64]:
    """Members of every class in turns: one of each class, then a second one, …; spread over the files of a class, which
    are often sorted by where they come from."""
    members = np.arange(len(samples), dtype=np.int64)
    labels = samples.labels(members)
    order = np.argsort(labels, kind="stable")
    turns: list[tuple[int, int]] = []
    for part in np.split(order, np.flatnonzero(np.diff(labels[order])) + 1):
        if len(part):
            picks = np.unique(np.linspace(0, len(part) - 1, min(per_class, len(part))).astype(int))
            turns += [(turn, int(part[pick])) for turn, pick in enumerate(picks)]
    return np.array([member for _, member in sorted(turns)], np.int64)


def check_decoding(subject: Subject) -> Finding:
    """A few images of every class can be read and decoded."""
    config = subject.config
    view = validation_view(config, decoding_with(config))
    shape = (view.size, view.size, 3)
    per_class, seconds = (DEEP_DECODED_PER_CLASS, DEEP_DECODING_S) if subject.deep else (DECODED_PER_CLASS, DECODING_S)
    done, wanted, bad = 0, 0, list[str]()
    splits = splits_of(subject)
    for samples in splits:
        store = open_sample_store(samples.index, max_object_bytes=config.max_image_bytes)
        indices = samples.indices(in_turns(samples, per_class)).tolist()

        def problem(index: int, samples: SampleSet = samples, store: Store = store) -> str | None:
            try:
                view.decode(read_sample(store, samples.index, index), None, 0, np.empty(shape, np.uint8))
            except (BadImage, ReadFailure) as error:
                return f"{shown(samples.index.name(index))}: {error.reason}"
            return None

        found = list(until(problem, indices, time.monotonic() + seconds / len(splits), subject.machine.cpus))
        done, wanted = done + len(found), wanted + len(indices)
        bad += [text for text in found if text is not None]
    facts = {"decoded": done - len(bad), "bad": bad}
    if bad:
        return failed(
            f"{len(bad):,} of {done:,} images, up to {per_class} of each class, cannot be decoded",
            "copy these files again; --deep tries more of them",
            *first_lines(bad),
            **facts,
        )
    if not done:
        return unknown("no image could be decoded in time", "--deep takes the time that it needs", **facts)
    short = "" if done == wanted else f"; in {seconds:.0f} s not all of {wanted:,}, --deep takes longer"
    return passed(f"{done:,} images decode, up to {per_class} of each class{short}", **facts)


def until(function: Callable[[T], R], items: Sequence[T], end_s: float, threads: int) -> Iterator[R]:
    """The function's result for each item in order, in several threads, until the time is up."""
    with ThreadPoolExecutor(max(1, threads)) as pool:
        for start in range(0, len(items), 8 * threads):
            if time.monotonic() > end_s:
                return
            yield from pool.map(function, items[start : start + 8 * threads])


def check_storage(subject: Subject) -> Finding | None:
    """The files are on this file system, not only their names: none is released or fetched at the first read."""
    splits = splits_of(subject)
    if any(is_url(samples.index.root) or is_parquet(samples.index) for samples in splits):
        return None  # an object store has whatever it lists, and an image in a parquet file cannot be read alone
    for samples in splits:
        if (outcome := _check_released(samples)) is not None:
            return outcome
    reads = [pair for samples in splits for pair in time_reads(samples, subject.config.max_image_bytes)]
    first, second = ([pair[at] for pair in reads] for at in (0, 1))
    return judge_first_reads(first, second, sum(map(len, splits)), splits[0].index.root)


def _check_released(samples: SampleSet) -> Finding | None:
    """Lustre's report on a part of the files; None if it is not Lustre, or all of them are there."""
    index = samples.index
    mount, lfs = mount_of(index.root), shutil.which("lfs")
    if mount is None or mount.kind != "lustre" or lfs is None:
        return None
    indices = samples.indices(_some_members(samples, HSM_FILES)).tolist()
    files = sorted({f"{index.root}/{index.location(sample).path}" for sample in indices})
    try:
        done = subprocess.run([lfs, "hsm_state", *files], capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        return unknown(f"lfs hsm_state failed: {error}", f"lfs hsm_state {shown(files[0])}")
    # Lines like: /fsx/val/a.jpg: (0x0000000d) released exists archived, archive_id:1
    states = (line.rpartition(": (0x") for line in done.stdout.splitlines())
    released = [name for name, _, state in states if " released" in state]
    if not released:
        return None
    share = len(released) / len(files)
    return failed(
        f"{len(released):,} of {len(files):,} files below {shown(index.root)} are released: Lustre has only their "
        f"names, and each first read waits for the bucket",
        f"find {shown(index.root)} -type f -print0 | xargs -0 -n 100 -P 8 lfs hsm_restore",
        *[shown(name) for name in released[:SHOWN_FILES]],
        share=round(share, 4),
    )


def _some_members(samples: SampleSet, number: int) -> NDArray[np.int64]:
    # Different ones each time: a file that an earlier check has read is no longer a first read.
    return np.random.default_rng().choice(len(samples), min(number, len(samples)), replace=False).astype(np.int64)


def time_reads(samples: SampleSet, max_bytes: int) -> list[tuple[float, float]]:
    """Seconds of the first and the second read of some files; unreadable files are another check's job."""
    store = open_store(samples.index.root, max_object_bytes=max_bytes)
    end_s, found = time.monotonic() + FIRST_READS_S, list[tuple[float, float]]()
    for sample in samples.indices(_some_members(samples, FIRST_READS)).tolist():
        try:
            times = []
            for _ in range(2):
                began = time.perf_counter()
                read_sample(store, samples.index, sample)
                times.append(time.perf_counter() - began)
            found.append((times[0], times[1]))
        except ReadFailure:
            continue
        if time.monotonic() > end_s:
            break
    return found


def judge_first_reads(first_s: Sequence[float], second_s: Sequence[float], files: int, root: str) -> Finding:
    """Whether first reads are so slow, and second ones so fast, that the files are fetched when they are read."""
    if not first_s:
        return unknown("none of the files that we tried could be read", f"ls -l {shown(root)}")
    first, second = statistics.median(first_s), statistics.median(second_s)
    facts = {"first_read_ms": round(1e3 * first, 3), "second_read_ms": round(1e3 * second, 3), "files": len(first_s)}
    seen = f"the first read of a file takes {1e3 * first:,.2f} ms, the second {1e3 * second:,.2f} ms"
    if first < SLOW_FIRST_READ_S:
        return passed(f"{seen} ({len(first_s)} files)", **facts)
    hours = first * files / LOCAL_READERS / 3600
    if first < LAZY_RATIO * second:
        return passed(
            f"{seen}: slow, but the files are there", "stoker doctor CONFIG measures what that costs", **facts
        )
    return failed(
        f"{seen}: files load lazily; all {files:,} would take {hours:,.1f} h with {LOCAL_READERS} readers",
        f"read everything once, or copy it to a local disk: find {shown(root)} -type f -print0 | "
        f"xargs -0 -n 100 -P {LOCAL_READERS} cat > /dev/null",
        hours=round(hours, 2),
        **facts,
    )


def check_duplicates(subject: Subject) -> Finding | None:
    """No image is in both splits: by size, then by a few bytes, then by all."""
    train, val = subject.data.train, subject.data.val
    if val is None:
        return None
    if is_parquet(train.index) or is_parquet(val.index):
        return unknown("duplicates cannot be found: images in parquet files cannot be read alone")
    remote = is_url(train.index.root) or is_url(val.index.root)
    if remote and (train.index.sizes is None or val.index.sizes is None):
        return unknown("duplicates cannot be found: the index of this object store has no sizes")
    limit, seconds = (DEEP_COMPARED, DEEP_COMPARING_S) if subject.deep else (COMPARED, COMPARING_S)
    end_s = time.monotonic() + seconds
    wanted = val.indices(_some_members(val, min(limit, len(val)))).tolist()
    theirs = _sizes(val.index, wanted, end_s)
    others = train.indices(np.random.default_rng().permutation(len(train)).astype(np.int64)).tolist()
    # Half of the time for sizes: the rest is for reading files of equal size.
    ours = _sizes(train.index, others, (time.monotonic() + end_s) / 2)
    by_size: dict[int, list[int]] = {}
    sought = set(theirs.values())
    for sample, size in ours.items():
        if size in sought:
            by_size.setdefault(size, []).append(sample)
    training, validation = (_Split(split, subject.config.max_image_bytes) for split in (train, val))
    same, compared = list[tuple[str, str]](), 0
    for sample, size in theirs.items():
        if time.monotonic() > end_s:
            break
        compared += 1
        twin = _twin(validation, sample, size, training, by_size.get(size, ()))
        if twin is not None:
            same.append((val.index.name(sample), train.index.name(twin)))
    facts = {"val": compared, "train": len(ours), "same": [list(pair) for pair in same]}
    if not compared or not ours:
        return unknown("no file could be compared in time", "--deep takes the time that it needs", **facts)
    whole = compared == len(val) and len(ours) == len(train)
    seen = f"{compared:,} validation images compared with {len(ours):,} training images"
    if len(same) >= LEAK_SHARE * compared and same:
        return failed(
            f"{seen}: {count(len(same), 'image is', 'images are')} in both, so val/acc1 is too good",
            "train_csv= with a list of the training images without them (--json names them)",
            *[f"{shown(a)} is {shown(b)}" for a, b in same[:SHOWN_FILES]],
            **facts,
        )
    note = f", {len(same)} in both" if same else ", none in both"
    return passed(seen + note + ("" if whole else "; --deep compares all"), **facts)


def _sizes(index: SampleIndex, samples: Sequence[int], end_s: float) -> dict[int, int]:
    """Bytes of the samples, as far as time allows."""
    if index.sizes is not None:
        return dict(zip(samples, np.asarray(index.sizes)[list(samples)].tolist(), strict=True))

    def stat(part: Sequence[int]) -> list[tuple[int, int]]:
        found = []
        for sample in part:
            try:
                found.append((sample, os.stat(f"{index.root}/{index.name(sample)}").st_size))  # noqa: PTH116 - a million
            except OSError:
                continue
        return found

    parts = [samples[start : start + STAT_AT_ONCE] for start in range(0, len(samples), STAT_AT_ONCE)]
    return dict(pair for found in until(stat, parts, end_s, LOCAL_READERS) for pair in found)


class _Split:
    """The files of a split, to be compared by content."""

    def __init__(self, samples: SampleSet, max_bytes: int) -> None:
        self.index = samples.index
        self._store = open_store(samples.index.root, max_object_bytes=max_bytes)

    def probe(self, sample: int, size: int) -> bytes:
        """A few bytes from the middle, where no two pictures are the same."""
        place = self.index.location(sample)
        length = min(PROBE_BYTES, size)
        return bytes(self._store.read(place.path, place.offset + (size - length) // 2, length))

    def digest(self, sample: int) -> bytes:
        return xxhash.xxh3_128_digest(read_sample(self._store, self.index, sample))


def _twin(ours: _Split, sample: int, size: int, theirs: _Split, candidates: Sequence[int]) -> int | None:
    """The candidate with the same bytes; all have the same size."""
    if not candidates:
        return None
    with suppress(ReadFailure):  # unreadable files are another check's job
        probe = ours.probe(sample, size)
        for candidate in candidates:
            with suppress(ReadFailure):
                if theirs.probe(candidate, size) == probe and theirs.digest(candidate) == ours.digest(sample):
                    return candidate
    return None


DATA_CHECKS = (
    Check("data-present", "data", "training data can be listed", check_present),
    Check("validation-split", "data", "a validation split", check_validation_split),
    Check("class-counts", "data", "images in each class", check_counts, cheap=True),
    Check("classes-agree", "data", "the same classes in train and val", check_classes_agree, cheap=True),
    # Before the others that read files.
    Check("storage-ready", "data", "files are here, not fetched when they are read", check_storage),
    Check("images-decode", "data", "images of every class decode", check_decoding),
    Check("duplicates", "data", "no image in both train and val", check_duplicates),
)
