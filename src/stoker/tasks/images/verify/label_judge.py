"""A trained network as a judge of labels: from a checkpoint or a weights file to the classes that it sees in images."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from stoker.core.errors import UserError
from stoker.profile.host import HostConfig
from stoker.tasks.checks import Subject
from stoker.tasks.images.classify import colours_of, eval_prepare
from stoker.tasks.images.data import choose_decoding, open_loader, validation_plan
from stoker.tasks.images.layouts.imagenet import synsets
from stoker.tasks.images.layouts.sample_index import SampleSet
from stoker.tasks.images.models import build_model
from stoker.tasks.images.prediction import Classifier, classifier_of
from stoker.tasks.images.verify.file_checks import in_turns
from stoker.train.checkpoint.restore import restore_model
from stoker.train.checkpoint.weights import load_weights
from stoker.train.compute import Precision

BATCH = 32


@dataclass(frozen=True)
class Judge:
    """A network, and the classes of its outputs."""

    classifier: Classifier
    config: HostConfig
    names: tuple[str, ...]
    """Classes of its outputs, in order."""

    @property
    def outputs(self) -> dict[str, int]:
        return {name: number for number, name in enumerate(self.names)}


def open_judge(subject: Subject, classes: tuple[str, ...]) -> Judge:
    """The network in `subject.weights`: a checkpoint or run folder of ours, or weights of the config's model whose
    outputs are the data's classes, or ImageNet's."""
    assert subject.weights is not None
    try:
        restored = restore_model(subject.weights, say=subject.say)
    except UserError as not_ours:
        if subject.weights.is_dir():
            raise
        return _from_weights(subject, classes, not_ours)
    return Judge(classifier_of(restored), restored.config, restored.classes)


def _from_weights(subject: Subject, classes: tuple[str, ...], not_ours: UserError) -> Judge:
    assert subject.weights is not None
    config = subject.config
    candidates: list[Sequence[str]] = [classes]
    if set(classes) <= set(synsets()) and len(classes) < len(synsets()):
        candidates.append(synsets())
    for names in candidates:
        model = build_model(
            config.model, len(names), img_size=config.img_size,
            other_sizes=[config.val_img_size] if config.val_img_size else [], channels_last=config.channels_last,
        )  # fmt: skip
        # A classifier of another size is skipped: then these are not the names of its outputs.
        if not load_weights(model, subject.weights).skipped:
            device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
            model = model.eval().requires_grad_(False).to(device)
            precision = Precision(config.precision, device)
            return Judge(
                Classifier(model, device, eval_prepare(config, colours_of(model), device), precision),
                config,
                tuple(names),
            )
    raise UserError(
        "weights-other-classes",
        f"{subject.weights} has a classifier for another number of classes than the data's {len(classes)}",
        why="without the names of its outputs it cannot tell which class an image is of",
        hint="--weights with a checkpoint of ours, which has the names",
    ) from not_ours


def confusion_by(judge: Judge, samples: SampleSet, per_class: int, until_s: float) -> NDArray[np.int64]:
    """Counts (class, output) over up to `per_class` images of each class, as many as time allows: all classes first
    get one image each, then a second one, and so on."""
    members = in_turns(samples, per_class)
    indices, labels = samples.indices(members), samples.labels(members).astype(np.int32)
    chosen = SampleSet(samples.index, samples.classes, indices, labels)
    config = judge.config.model_copy(update={"val_batch_size": BATCH})
    counts = np.zeros((len(samples.classes), len(judge.names)), np.int64)
    decoding, _ = choose_decoding(config, samples.index)
    loader = open_loader(config, validation_plan(config, chosen, decoding), workers=config.num_workers)
    try:
        for batch in loader.epoch(0):
            whole = ~np.isin(batch.indices, [bad.index for bad in batch.bad])
            guesses = judge.classifier.logits(batch.images).argmax(1).cpu().numpy()
            np.add.at(counts, (batch.labels[whole], guesses[whole]), 1)
            if time.monotonic() > until_s:
                break
    finally:
        loader.close()
    return counts
