"""`stoker eval`: classifies every image of a split once; also by ImageNet's other labels (ImageNet-V2, ReaL)."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.functional import cross_entropy

from stoker.config import Config
from stoker.core.console import Advance, Answer, Say, progress_bar, say, shown, some
from stoker.core.errors import ConfigError, UsageError, UserError, did_you_mean
from stoker.core.files import read_json
from stoker.core.units import count
from stoker.io.stores import is_url
from stoker.tasks.images.data import Split, choose_decoding, open_loader, open_split, validation_plan
from stoker.tasks.images.image_loader import ImageLoader
from stoker.tasks.images.layouts.listing import split_place
from stoker.tasks.images.layouts.sample_index import SampleIndex, SampleSet
from stoker.tasks.images.layouts.splits import find_split
from stoker.tasks.images.layouts.subset import choose_subset
from stoker.tasks.images.prediction import classifier_of
from stoker.tasks.images.results import (
    Evaluation,
    RealScore,
    evaluation_text,
    finite_or_none,
    percent,
    plot_confusion,
)
from stoker.train.checkpoint.restore import Restored
from stoker.train.checkpoint.sources import open_model
from stoker.train.step import TOP

CLASSES = 1000
LARGEST_LABELS_BYTES = 64 << 20
"""real.json has 0.5 MB."""
_WORDNET_ID = re.compile(r"n\d{8}")
_VAL_NAME = re.compile(r"ILSVRC2012_val_(\d{8})")


def evaluate(
    checkpoint: Path,
    _data_root: str | None,
    settings: Sequence[str],
    *,
    split: Literal["val", "train", "all"] | None,
    raw: bool,
    per_class: bool,
    real_labels: Path | None,
    plot: Path | None,
) -> Answer:
    """The accuracy of a checkpoint, class by class."""
    if split == "all":
        raise UsageError("usage", f"--split all is for volumes; {checkpoint} was trained on images")
    restored = open_model(checkpoint, settings, raw=raw, say=say)
    with progress_bar("listing", None) as advance:
        samples = open_labelled(restored, split or "val", say, advance)
    with progress_bar("evaluating", len(samples), unit="images") as advance:
        found = evaluate_checkpoint(restored, samples, real_labels=real_labels, progress=advance)
    complete = True
    if plot is not None:
        try:
            plot_confusion(found, plot)
            say(f"picture: {plot}")
        except OSError as error:
            # The scores may have taken an hour: print them anyway.
            say(f"warning: {plot} could not be written: {error.strerror or error}")
            complete = False
    return Answer(evaluation_text(found, all_classes=per_class), found.as_dict(), complete)


def is_imagenet(classes: Sequence[str]) -> bool:
    """Whether a model's outputs are ImageNet's 1,000 classes in their usual, sorted order."""
    return len(classes) == CLASSES and list(classes) == sorted(classes) and all(map(_WORDNET_ID.fullmatch, classes))


def are_class_numbers(folders: Sequence[str]) -> bool:
    """Whether class folders are named by number, as ImageNet-V2's are: 0 to 999, which do not sort as numbers."""
    return all(name.isascii() and name.isdigit() and name == str(int(name)) for name in folders) and all(
        int(name) < CLASSES for name in folders
    )


def read_real_labels(path: Path, classes: Sequence[str]) -> list[list[int]]:
    """The ReaL classes of each validation image, in order; an empty list for an image without any."""
    if not is_imagenet(classes):
        raise UserError(
            "real-labels-need-imagenet",
            f"{path} numbers ImageNet's {CLASSES} classes, but the checkpoint has {len(classes)} others",
            why="the results would be attributed to the wrong classes",
        )
    try:
        labels = read_json(path, LARGEST_LABELS_BYTES)
    except OSError as error:
        raise UserError("real-labels-unreadable", f"{path}: {error.strerror}", hint="--real-labels real.json") from None
    except ValueError:
        raise _not_real(path, "it is not JSON") from None
    if not isinstance(labels, list) or not labels:
        raise _not_real(path, "it is not a list")
    for number, entry in enumerate(labels, 1):
        if not isinstance(entry, list) or not all(type(label) is int and 0 <= label < CLASSES for label in entry):
            raise _not_real(path, f"entry {number} is {str(entry)[:60]}")
    return labels


def image_numbers(index: SampleIndex, samples: NDArray[np.int64], labels: Sequence[Any], path: Path) -> list[int]:
    """The position of each sample's ReaL labels in the list, by the number in its name."""
    numbers = []
    for sample in samples.tolist():
        name = index.name(sample)
        match = _VAL_NAME.search(name)
        number = int(match[1]) if match else 0
        if not 1 <= number <= len(labels):
            seen = f"{path} has entries 1 to {len(labels):,}" if match else "its name has no image number"
            raise UserError(
                "real-labels-other-images",
                f"{name} has no ReaL label: {seen}",
                why="ReaL labels belong to ImageNet's validation images, by the numbers in their names",
                hint="file names like ILSVRC2012_val_00000293.JPEG",
            )
        numbers.append(number - 1)
    return numbers


def real_score(best: NDArray[np.int64], entries: Sequence[Sequence[int]]) -> RealScore:
    """How often the best class is among the image's labels; images without labels do not count."""
    judged = [guess in labels for guess, labels in zip(best[:, 0].tolist(), entries, strict=True) if labels]
    return RealScore(percent(np.array(judged, bool)), len(judged), len(entries) - len(judged))


def _not_real(path: Path, what: str) -> UserError:
    return UserError(
        "real-labels-wrong",
        f"{path} does not hold ReaL labels: {what}",
        why=f"the file must be a JSON list with a list of classes (0 to {CLASSES - 1}) for each validation image",
        hint="real.json from github.com/google-research/reassessed-imagenet",
    )


def open_labelled(restored: Restored, split: Split, say: Say, progress: Advance | None = None) -> SampleSet:
    """The images of a split, labelled with the checkpoint's classes, which are matched by name."""
    config, classes = restored.config, restored.classes
    if config.data_root is None:
        raise ConfigError("the checkpoint has no data_root", name="no-data", hint="stoker eval CKPT DATA_ROOT")
    index, among = open_split(config, _folder_of(config, split), progress=progress, say=say)
    numbers = _class_numbers(index, classes, config, say)
    per_class = config.subset_val_per_class if split == "val" else config.subset_train_per_class
    chosen = choose_subset(index, classes=None, per_class=per_class, seed=config.subset_seed, among=among)
    labels = numbers[chosen.labels]
    known = labels >= 0
    return SampleSet(index, classes, chosen.indices[known], labels[known])


def evaluate_checkpoint(
    restored: Restored,
    samples: SampleSet,
    *,
    real_labels: Path | None = None,
    progress: Advance | None = None,
) -> Evaluation:
    """Classifies every image; unreadable ones are left out and listed."""
    config = restored.config
    # Before the long work: a typo in the file's name must not cost an hour.
    real = None if real_labels is None else read_real_labels(real_labels, restored.classes)
    everyone = samples.indices(np.arange(len(samples)))
    if real is not None and real_labels is not None:
        image_numbers(samples.index, everyone, real, real_labels)
    decoding, _ = choose_decoding(config, samples.index)
    loader = open_loader(config, validation_plan(config, samples, decoding), workers=config.num_workers)
    try:
        labels, best, losses, classified = _classify_all(restored, loader, len(samples), progress)
    finally:
        loader.close()
    score = None
    if real is not None and real_labels is not None:
        entries = [real[number] for number in image_numbers(samples.index, classified, real, real_labels)]
        score = real_score(best, entries)
    return Evaluation(
        checkpoint=str(restored.path),
        model=config.model,
        averaged=restored.averaged,
        epoch=restored.epoch,
        step=restored.step,
        place=samples.index.root,
        classes=tuple(map(shown, restored.classes)),
        labels=labels,
        best=best,
        loss=finite_or_none(float(losses.mean())) if len(losses) else None,
        unreadable=tuple((shown(bad.name), bad.reason) for bad in loader.quarantine.bad),
        real=score,
    )


def _classify_all(
    restored: Restored, loader: ImageLoader, total: int, progress: Advance | None
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Labels, best classes, losses and sample indices of all readable images."""
    classifier = classifier_of(restored)
    top = min(TOP, len(restored.classes))
    # Without samples there is no batch, but there is still a result.
    none = np.zeros(0, np.int64)
    labels, best, losses, classified = [none], [none.reshape(0, top)], [np.zeros(0)], [none]
    done = 0
    for batch in loader.epoch(0):
        # A bad image is replaced by another one, which must not count twice.
        whole = ~np.isin(batch.indices, [bad.index for bad in batch.bad])
        logits = classifier.logits(batch.images)
        loss = cross_entropy(logits, torch.from_numpy(batch.labels).to(classifier.device), reduction="none")
        # Waits for the device; the workers continue meanwhile.
        best.append(logits.topk(top, dim=1).indices.cpu().numpy()[whole])
        losses.append(loss.double().cpu().numpy()[whole])
        labels.append(batch.labels[whole])
        classified.append(batch.indices[whole])
        done += len(batch)
        if progress is not None:
            progress(done, total)
    return np.concatenate(labels), np.concatenate(best), np.concatenate(losses), np.concatenate(classified)


def _folder_of(config: Config, split: Split) -> str:
    """The split, or "" for the root itself if that has neither train nor val in it."""
    root = config.data_root
    listed = (config.samples_csv, config.train_csv, config.val_csv, config.val_fraction)
    if root is None or is_url(root) or any(key is not None for key in listed):
        return split
    here = Path(split_place(root, ""))
    return "" if here.is_dir() and not any(find_split(root, name) for name in ("train", "val")) else split


def _class_numbers(index: SampleIndex, classes: tuple[str, ...], config: Config, say: Say) -> np.ndarray:
    """The checkpoint's class number for each class of the data; -1 for one that is left out."""
    number_of = {name: number for number, name in enumerate(classes)}
    if is_imagenet(classes) and are_class_numbers(index.classes):
        say("class folders are numbered, as in ImageNet-V2: read as positions in the sorted list of ImageNet classes")
        number_of = {str(number): number for number in range(len(classes))}
    unknown = [name for name in index.classes if name not in number_of]
    if len(unknown) == len(index.classes) or (unknown and config.subset_classes is None):
        raise UserError(
            "classes-differ",
            f"{shown(index.root)} has {count(len(unknown), 'class', 'classes')} "
            f"that the checkpoint was not trained on: {some(unknown)}",
            why=f"it knows {count(len(classes), 'class', 'classes')}: {some(list(classes))}",
            hint=did_you_mean(unknown[0], classes)
            or (None if len(unknown) == len(index.classes) else f"subset_classes={len(classes)} leaves them out"),
        )
    if unknown:
        say(f"{count(len(unknown), 'class', 'classes')} that the checkpoint was not trained on: left out")
    return np.array([number_of.get(name, -1) for name in index.classes], np.int32)
