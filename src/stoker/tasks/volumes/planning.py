"""What a plan needs to know about a run over volumes: its step, to be traced, and its data."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from torch import nn

from stoker.config import Config
from stoker.core.console import Advance
from stoker.core.errors import StokerError
from stoker.core.units import count
from stoker.loader.rng import sample_keys
from stoker.tasks import building
from stoker.tasks.plan_facts import DataFacts
from stoker.tasks.volumes.augment import memory_format_of, transform_range
from stoker.tasks.volumes.cases.cases import Case
from stoker.tasks.volumes.data import label_rules, list_cases, reading_options, survey_cases
from stoker.tasks.volumes.formats.opening import OpenVolumes
from stoker.tasks.volumes.formats.volume import Shape
from stoker.tasks.volumes.losses import build_volume_loss
from stoker.tasks.volumes.networks import build_volume_model
from stoker.tasks.volumes.patches.labels import LabelRules
from stoker.tasks.volumes.patches.patch_collate import RowLayout
from stoker.tasks.volumes.patches.patches import draw_transforms
from stoker.train.compute import compute_dtype
from stoker.train.step import TraceableStep, plain_batch

ASSUMED_CLASSES = 2
ASSUMED_VOLUME: Shape = (320, 320, 320)
"""Size of a volume of the Vesuvius surface competition."""
DRAWN = 500
"""Transforms over which the bytes that a patch reads are averaged."""


@dataclass(frozen=True, kw_only=True)
class VolumeFacts(DataFacts):
    """Facts about volumes, and patches of them."""

    channels: int
    rules: LabelRules
    cases: int | None
    largest: Shape
    """The volume that a prediction is planned for."""
    decoded_bytes: int | None = None
    """Bytes of all volumes that have to be decoded, with their labels; None if nothing was opened."""


def volume_facts(config: Config, _samples: int | None = None, progress: Advance | None = None) -> VolumeFacts:
    """Opens the config's volumes if they can be reached from here; otherwise says what was assumed. Patches have no
    number: they are drawn at random."""
    try:
        if config.data_root is None:
            return _assumed(config, "no data_root")
        listed = list_cases(config, lambda _line: None)
        volumes = OpenVolumes(reading_options(config))
        surveyed = survey_cases(config, listed, volumes, lambda _line: None, progress)
        rules = label_rules(config, listed)
    except StokerError as error:
        return _assumed(config, error.seen.splitlines()[0])
    channels = len(surveyed.cases[0].images)
    dtype = surveyed.image_dtype(surveyed.cases)
    voxels = {name: shape[0] * shape[1] * shape[2] for name, shape in surveyed.shapes.items()}
    decoded = sum(voxels[case.id] for case in surveyed.cases if not _is_mapped(case))
    return VolumeFacts(
        **_sizes(config, channels, dtype, rules), channels=channels, rules=rules, cases=len(surveyed.cases),
        largest=surveyed.shapes[max(voxels, key=lambda name: voxels[name])],
        decoded_bytes=decoded * (channels * dtype.itemsize + rules.dtype.itemsize),
    )  # fmt: skip


def _is_mapped(case: Case) -> bool:
    """Whether its voxels are read from mapped files as they are: nothing is decoded, so there is nothing to keep."""
    return all(ref.packed is not None and ref.packed.kind != "zarr" for ref in case.images)


def _assumed(config: Config, reason: str) -> VolumeFacts:
    rules = LabelRules(config.num_classes or ASSUMED_CLASSES, config.ignore_label)
    said = f"data: 1 channel of uint8 voxels, {count(rules.classes, 'class', 'classes')} ({reason})"
    shape = " x ".join(map(str, ASSUMED_VOLUME))
    return VolumeFacts(
        **_sizes(config, 1, np.dtype(np.uint8), rules), channels=1, rules=rules, cases=None, largest=ASSUMED_VOLUME,
        assumptions=(said, f"prediction: of a volume of {shape} voxels, as in Vesuvius"),
    )  # fmt: skip


def _sizes(config: Config, channels: int, dtype: np.dtype[Any], rules: LabelRules) -> dict[str, Any]:
    """What a batch reserves for a patch with its label, and what is read for it on average: a rotated or enlarged one
    needs its surroundings."""
    patch, bounds = patch_of(config), transform_range(config)
    val = RowLayout(channels, dtype.name, rules.dtype.name, patch[0] * patch[1] * patch[2])
    keys = sample_keys(0, 0, np.arange(DRAWN), np.zeros(DRAWN, np.int64))
    voxels = [float(np.prod(one.region(patch, (0, 0, 0)).shape)) for one in draw_transforms(keys, bounds, patch)]
    return {
        "row_bytes": replace(val, most_voxels=bounds.most_voxels(patch)).row_bytes, "val_row_bytes": val.row_bytes,
        "sample_bytes": float(np.mean(voxels)) * (channels * dtype.itemsize + rules.dtype.itemsize),
    }  # fmt: skip


def traceable_step(config: Config, channels: int, classes: int) -> TraceableStep:
    """The step that `segment.build_run` would train with, for a plan to trace; does not open the data.

    The augmentation is left out: it works on bytes, and is done before the model's activations begin.
    """
    patch = patch_of(config)

    def build() -> nn.Module:
        # While a step is traced, the default device is meta: nothing is allocated.
        return build_volume_model(
            config.model, channels=channels, classes=classes, patch=patch, deep_supervision=config.deep_supervision,
            gradient_checkpointing=config.gradient_checkpointing, indivisible=config.indivisible_patch,
            channels_last=config.channels_last, dropout=config.dropout, seed=config.seed,
        )  # fmt: skip

    checkpointing = config.model_copy(update={"gradient_checkpointing": True})
    # Which label is ignored does not change what is computed.
    loss = build_volume_loss(config.volume_loss, classes, ignore=classes)
    # A plan is for a GPU, wherever it is made.
    dtype = compute_dtype(config.precision)
    return building.traceable_step(
        config, build, loss,
        plain_batch((channels, *patch), target=patch, dtype=dtype, memory_format=memory_format_of(config)),
        checkpointed=None if config.gradient_checkpointing else traceable_step(checkpointing, channels, classes),
    )  # fmt: skip


def step_for(config: Config, facts: VolumeFacts | None = None) -> TraceableStep:
    """The same for volumes as these; without facts, for assumed ones: another channel hardly changes what a network
    keeps."""
    facts = facts or volume_facts(config.model_copy(update={"data_root": None}))
    return traceable_step(config, facts.channels, facts.rules.classes)


def patch_of(config: Config) -> Shape:
    assert config.patch_size is not None, "the config was checked"
    return config.patch_size
