"""Checks of volumes: they can be opened, divided and indexed, and the labels are what the config says."""

from __future__ import annotations

import math

from stoker.config import Config
from stoker.core.errors import UserError
from stoker.core.finding import Finding
from stoker.core.units import count
from stoker.tasks.checks import Check, StepInput, Subject, failed, passed, unknown
from stoker.tasks.volumes.patches.patches import RandomPatches

# Drawing patches around foreground does not help below this share.
LEAST_FOREGROUND = 0.0001
# Per voxel of a patch, in float32: the case study's network keeps 1,900, with its padding 3,000.
MOST_ACTIVATIONS_PER_VOXEL = 4000


def check_volumes(subject: Subject) -> Finding:
    """Volumes can be listed and opened, and images and labels fit together."""
    try:
        data = subject.data
    except UserError as error:
        why = f" ({error.why})" if error.why else ""
        return failed(f"{error.seen}{why}", error.hint or "data_root=FOLDER", reason=error.name)
    train = data.train
    return passed(
        f"{count(len(train.cases), 'training volume')} of {train.layout.image}, "
        f"{count(data.channels, 'channel')}, {count(data.rules.classes, 'class', 'classes')}",
        train=len(train.cases), channels=data.channels, classes=data.rules.classes, ignore=data.rules.ignore,
    )  # fmt: skip


def check_split(subject: Subject) -> Finding:
    """There are volumes to validate on, and none of their groups is trained on."""
    config, data = subject.config, subject.data
    if data.val is None:
        return unknown(
            "no validation: no best checkpoint, and no early stopping",
            "fold=0, for one of the folds" if config.fold == "all" else "limit_val_batches=null",
        )
    groups = {case.group for case in data.train.cases} & {case.group for case in data.val.cases}
    seen = (
        f"{count(len(data.val.cases), 'validation volume')}, fold {config.fold} of {config.folds} by {config.split_by}"
    )
    if groups and config.split_by == "volume":
        return failed(
            f"{seen}: {count(len(groups), 'group is', 'groups are')} on both sides, so validation is too good",
            "split_by=group",
            groups=sorted(groups)[:20],
        )
    return passed(seen, val=len(data.val.cases))


def check_labelled(subject: Subject) -> Finding:
    """How much is labelled, and how much of that is foreground."""
    data = subject.data
    patches = data.train.patches
    assert isinstance(patches, RandomPatches), "training patches are random"
    counts = patches.labels.counts.sum(axis=0)
    voxels = sum(z * y * x for z, y, x in patches.shapes)
    labelled = int(counts.sum())
    shares = [f"label {number} {share:.2%}" for number, share in enumerate(counts / labelled)]
    facts = {"voxels": voxels, "labelled": labelled, "counts": counts.tolist()}
    seen = f"{labelled / voxels:.0%} of the voxels are labelled: {', '.join(shares[:8])}"
    absent = [str(number) for number, found in enumerate(counts.tolist()) if not found]
    if absent:
        return failed(
            f"{seen}; no voxel has label {', '.join(absent)}",
            f"num_classes={int(counts.nonzero()[0].max()) + 1}",
            **facts,
        )
    if data.rules.classes > 1 and counts[1:].sum() < LEAST_FOREGROUND * labelled:
        return failed(
            f"{seen}; almost everything is background", "check that the labels are those of these images", **facts
        )
    return passed(seen, **facts)


def checks() -> tuple[Check, ...]:
    return (
        Check("volumes", "data", "volumes can be opened, and fit their labels", check_volumes),
        Check("volume-split", "data", "volumes to validate on", check_split, cheap=True),
        Check("labelled-voxels", "data", "how much is labelled", check_labelled, cheap=True),
    )


def step_input(config: Config) -> StepInput:
    """What the network of a config takes in a step."""
    return StepInput(
        size=f"patches of {config.patch_size}",
        fix="another patch_size= or model=",
        values=math.prod(config.patch_size or ()),
        activations=MOST_ACTIVATIONS_PER_VOXEL,
        # A patch has as many voxels as tens of images have pixels, and its networks do not normalise over a batch.
        trial_samples=1,
    )
