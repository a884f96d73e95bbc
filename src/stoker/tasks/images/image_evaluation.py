"""`stoker eval`: classifies every image of a split once, also by ImageNet's other labels (ImageNet-V2, ReaL).

The result is a record, a text, and a picture of the confusion matrix.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.functional import cross_entropy

from stoker.config import Config
from stoker.core.console import Advance, Answer, Say, format_table, progress_bar, say, shown, some
from stoker.core.errors import ConfigError, UsageError, UserError, did_you_mean
from stoker.core.files import read_json
from stoker.core.units import count
from stoker.io.stores import is_url
from stoker.loader.batch import BadSample
from stoker.tasks.images.data import Split, open_split
from stoker.tasks.images.image_prediction import classified
from stoker.tasks.images.layouts.imagenet import CLASSES, IMAGE_NUMBER, are_class_numbers, is_imagenet
from stoker.tasks.images.layouts.sample_index import SampleIndex, SampleSet
from stoker.tasks.images.layouts.splits import find_split, split_place
from stoker.tasks.images.layouts.subset import choose_subset
from stoker.tasks.images.models import TrainedImageModel, open_model
from stoker.train.step import TOP

LARGEST_LABELS_BYTES = 64 << 20
"""real.json has 0.5 MB."""
MOST_CONFUSED = 10
MOST_WORST_CLASSES = 10
MOST_UNREADABLE = 20
# With more classes their names would overlap in the picture.
MOST_NAMED_CLASSES = 60


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


def read_real_labels(path: Path, classes: Sequence[str], samples: SampleSet) -> dict[int, list[int]]:
    """The ReaL classes of each validation image, by its index; an empty list for an image without any."""
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
    found = {}
    for sample in samples.indices(np.arange(len(samples))).tolist():
        name = samples.index.name(sample)
        match = IMAGE_NUMBER.search(name)
        number = int(match[1]) if match else 0
        if not 1 <= number <= len(labels):
            seen = f"{path} has entries 1 to {len(labels):,}" if match else "its name has no image number"
            raise UserError(
                "real-labels-other-images",
                f"{name} has no ReaL label: {seen}",
                why="ReaL labels belong to ImageNet's validation images, by the numbers in their names",
                hint="file names like ILSVRC2012_val_00000293.JPEG",
            )
        found[sample] = labels[number - 1]
    return found


def _not_real(path: Path, what: str) -> UserError:
    return UserError(
        "real-labels-wrong",
        f"{path} does not hold ReaL labels: {what}",
        why=f"the file must be a JSON list with a list of classes (0 to {CLASSES - 1}) for each validation image",
        hint="real.json from github.com/google-research/reassessed-imagenet",
    )


def open_labelled(restored: TrainedImageModel, split: Split, say: Say, progress: Advance | None = None) -> SampleSet:
    """The images of a split, labelled with the checkpoint's classes, which are matched by name."""
    config, classes = restored.config, restored.classes
    if config.data_root is None:
        raise ConfigError("the checkpoint has no data_root", name="no-data", hint="stoker eval CKPT DATA_ROOT")
    index, among = open_split(config, _folder_of(config, split), progress=progress, say=say)
    numbers = _class_numbers(index, classes, config, say)
    per_class = config.subset_val_per_class if split == "val" else config.subset_train_per_class
    chosen = choose_subset(index, classes=None, per_class=per_class, seed=config.subset_seed, among=among)
    members = np.arange(len(chosen))
    labels = numbers[chosen.labels(members)]
    known = labels >= 0
    return SampleSet(index, classes, chosen.indices(members)[known], labels[known])


def evaluate_checkpoint(
    restored: TrainedImageModel, samples: SampleSet, *, real_labels: Path | None = None, progress: Advance | None = None
) -> Evaluation:
    """Classifies every image; unreadable ones are left out and listed."""
    config = restored.config
    # Before the long work: a typo in the file's name must not cost an hour.
    real = None if real_labels is None else read_real_labels(real_labels, restored.classes, samples)
    top = min(TOP, len(restored.classes))
    # Without samples there is no batch, but there is still a result.
    none = np.zeros(0, np.int64)
    all_labels, all_best, all_losses, all_indices = [none], [none.reshape(0, top)], [np.zeros(0)], [none]
    done, bad = 0, dict[int, BadSample]()
    for batch, whole, logits in classified(restored, samples):
        losses = cross_entropy(logits, torch.from_numpy(batch.labels).to(logits.device), reduction="none")
        # Waits for the device; the workers continue meanwhile.
        all_best.append(logits.topk(top, dim=1).indices.cpu().numpy()[whole])
        all_losses.append(losses.double().cpu().numpy()[whole])
        all_labels.append(batch.labels[whole])
        all_indices.append(batch.indices[whole])
        done += len(batch)
        for one in batch.bad:
            bad.setdefault(one.index, one)
        if progress is not None:
            progress(done, len(samples))
    best, loss = np.concatenate(all_best), np.concatenate(all_losses)
    score = None
    if real is not None:
        entries = [real[index] for index in np.concatenate(all_indices).tolist()]
        judged = [guess in known for guess, known in zip(best[:, 0].tolist(), entries, strict=True) if known]
        score = RealScore(percent(np.array(judged, bool)), len(judged), len(entries) - len(judged))
    mean = float(loss.mean()) if len(loss) else math.nan
    return Evaluation(
        checkpoint=str(restored.path),
        model=config.model,
        averaged=restored.averaged,
        epoch=restored.epoch,
        step=restored.step,
        place=samples.index.root,
        classes=tuple(map(shown, restored.classes)),
        labels=np.concatenate(all_labels),
        best=best,
        loss=mean if math.isfinite(mean) else None,
        unreadable=tuple((shown(bad.name), bad.reason) for bad in bad.values()),
        real=score,
    )


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


class ClassScore(NamedTuple):
    name: str
    images: int
    acc1: float
    """Percent."""
    acc5: float


class ConfusedPair(NamedTuple):
    """Images of one class that were classified as another."""

    name: str
    taken_for: str
    wrong: int
    images: int
    """All images of the class."""


@dataclass(frozen=True)
class RealScore:
    """Accuracy by the reassessed (ReaL) labels of ImageNet's validation images; an image may have several."""

    acc1: float | None
    images: int
    left_out: int
    """Images without a ReaL label."""


@dataclass(frozen=True)
class Evaluation:
    """How a checkpoint classified every image of a split, each counted once."""

    checkpoint: str
    model: str
    averaged: bool
    epoch: int
    step: int
    place: str
    """Folder or URL of the images."""
    classes: tuple[str, ...]
    labels: NDArray[np.int64]
    """The class of each image."""
    best: NDArray[np.int64]
    """(images, up to 5) classes with the highest scores, the highest first."""
    loss: float | None
    """Mean cross-entropy; None without images, or if it is NaN or infinite."""
    unreadable: tuple[tuple[str, str], ...] = ()
    """Name and reason of each image that was left out."""
    real: RealScore | None = None

    @property
    def images(self) -> int:
        return len(self.labels)

    @property
    def acc1(self) -> float | None:
        """Percent of the images whose class had the highest score."""
        return percent(self.best[:, 0] == self.labels)

    @property
    def acc5(self) -> float | None:
        """Percent of the images whose class was among the five highest; with fewer classes, among all."""
        return percent((self.best == self.labels[:, None]).any(axis=1))

    def per_class(self) -> list[ClassScore]:
        """The classes that have images, worst first; ties are ordered by size, largest first."""
        images = np.bincount(self.labels, minlength=len(self.classes))
        hits1 = np.bincount(self.labels[self.best[:, 0] == self.labels], minlength=len(self.classes))
        among = (self.best == self.labels[:, None]).any(axis=1)
        hits5 = np.bincount(self.labels[among], minlength=len(self.classes))
        scores = [
            ClassScore(self.classes[number], int(images[number]), 100 * hits1[number] / images[number].item(),
                       100 * hits5[number] / images[number].item())
            for number in np.flatnonzero(images)
        ]  # fmt: skip
        return sorted(scores, key=lambda score: (score.acc1, score.acc5, -score.images))

    def confused(self) -> list[ConfusedPair]:
        """The pairs of classes that were confused most often."""
        images = np.bincount(self.labels, minlength=len(self.classes))
        wrong = self.best[:, 0] != self.labels
        # One number for a pair: a matrix of 21,841 classes would take 4 GB.
        pairs, counts = np.unique(self.labels[wrong] * len(self.classes) + self.best[wrong, 0], return_counts=True)
        first = np.argsort(-counts, kind="stable")[:MOST_CONFUSED]
        return [
            ConfusedPair(self.classes[label], self.classes[guess], int(counts[number]), int(images[label]))
            for number in first
            for label, guess in [divmod(int(pairs[number]), len(self.classes))]
        ]

    def matrix(self) -> NDArray[np.int64]:
        """How many images of each class (row) were classified as each class (column)."""
        size = len(self.classes)
        return np.bincount(self.labels * size + self.best[:, 0], minlength=size * size).reshape(size, size)

    def as_dict(self) -> dict[str, Any]:
        return {
            "checkpoint": self.checkpoint,
            "model": self.model,
            "weights": "averaged" if self.averaged else "raw",
            "epoch": self.epoch,
            "step": self.step,
            "data": self.place,
            "images": self.images,
            "acc1": self.acc1,
            "acc5": self.acc5,
            "loss": self.loss,
            "real": None if self.real is None else asdict(self.real),
            "unreadable": [{"name": name, "reason": reason} for name, reason in self.unreadable],
            "per_class": [_renamed(score._asdict()) for score in self.per_class()],
            "confused": [_renamed(pair._asdict()) for pair in self.confused()],
            "confusion": {"classes": list(self.classes), "matrix": self.matrix().tolist()},
        }


def percent(hits: NDArray[np.bool_]) -> float | None:
    """Hits in percent; None without images."""
    return 100 * int(hits.sum()) / len(hits) if len(hits) else None


def _renamed(record: dict[str, Any]) -> dict[str, Any]:
    return {"class": record.pop("name"), **record}


def evaluation_text(found: Evaluation, *, all_classes: bool = False) -> str:
    """Scores, the worst classes or all of them, and the pairs that were confused most."""
    weights = "averaged weights" if found.averaged else "raw weights"
    parts = [
        f"{found.model} after {count(found.epoch, 'epoch')} ({count(found.step, 'step')}), {weights}\n"
        f"{found.place}: {count(found.images, 'image')}",
        f"top-1 {_percent(found.acc1)}   top-5 {_percent(found.acc5)}   "
        f"loss {'none' if found.loss is None else f'{found.loss:.4f}'}",
    ]
    if found.real is not None:
        parts.append(
            f"ReaL top-1 {_percent(found.real.acc1)} of {found.real.images:,} images; "
            f"{found.real.left_out:,} without a label were left out"
        )
    scores = found.per_class()
    shown = scores if all_classes else scores[:MOST_WORST_CLASSES]
    title = f"{len(shown)} worst of {len(scores)} classes" if len(shown) < len(scores) else "classes, worst first"
    rows = [(score.name, f"{score.images:,}", f"{score.acc1:.2f}", f"{score.acc5:.2f}") for score in shown]
    parts.append(f"{title}\n{format_table(rows, ('class', 'images', 'top-1 %', 'top-5 %'))}")
    pairs = [
        (pair.name, pair.taken_for, f"{pair.wrong:,} of {pair.images:,}", f"{100 * pair.wrong / pair.images:.1f}")
        for pair in found.confused()
    ]
    if pairs:
        parts.append(f"most confused\n{format_table(pairs, ('class', 'predicted as', 'images', '%'))}")
    if found.unreadable:
        lines = [f"  {name}: {reason}" for name, reason in found.unreadable[:MOST_UNREADABLE]]
        more = len(found.unreadable) - len(lines)
        lines += [f"  and {more:,} more"] if more > 0 else []
        parts.append("\n".join([f"{len(found.unreadable):,} unreadable images were left out:", *lines]))
    return "\n\n".join(parts)


def plot_confusion(found: Evaluation, path: Path) -> None:
    """Draws the confusion matrix into a PNG file; each row is a class, and its shares add up to one."""
    import matplotlib

    matplotlib.use("Agg")  # needs no screen
    from matplotlib import pyplot

    matrix = found.matrix()
    images = matrix.sum(axis=1, keepdims=True)
    shares = matrix / images.clip(min=1)
    side = min(14.0, max(5.0, 0.35 * len(found.classes)))
    figure, axes = pyplot.subplots(figsize=(side + 1, side), dpi=120)
    drawn = axes.imshow(shares, cmap="Blues", vmin=0, vmax=1, interpolation="nearest")
    axes.set_xlabel("predicted class")
    axes.set_ylabel("true class")
    axes.set_title(f"{found.model}: top-1 {_percent(found.acc1)} of {found.images:,} images")
    if len(found.classes) <= MOST_NAMED_CLASSES:
        axes.set_xticks(range(len(found.classes)), found.classes, rotation=90)
        axes.set_yticks(range(len(found.classes)), found.classes)
    figure.colorbar(drawn, label="share of the class")
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="png")
    pyplot.close(figure)


def _percent(value: float | None) -> str:
    return "none" if value is None else f"{value:.2f} %"
