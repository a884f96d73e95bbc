"""Segmentation of volumes: from a config to a run that the loop can train, and from a checkpoint to its network."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import nn

from stoker.console import Say
from stoker.data.volumes.labels import LabelRules
from stoker.errors import UserError
from stoker.machine.host import HostConfig
from stoker.models.volumes import build_volume_model
from stoker.train.checkpoint.restore import open_state


@dataclass(frozen=True)
class TrainedVolumeModel:
    """A trained network, ready to segment volumes, and what is known about it."""

    path: Path
    model: nn.Module
    """On the CPU, in evaluation mode, float32."""
    config: HostConfig
    """As it was trained, with the overrides of this command, resolved for this machine. `normalize` says how voxels
    become inputs: stoker.data.volumes.statistics has what it needs."""
    rules: LabelRules
    channels: int
    """Images of a case that the network takes together."""
    averaged: bool
    """Whether its weights are the moving average."""
    epoch: int
    step: int

    @property
    def classes(self) -> int:
        """The network's outputs."""
        return self.rules.classes


def open_trained(
    path: Path, say: Say = lambda _text: None, overrides: Sequence[str] = (), *, raw: bool = False
) -> TrainedVolumeModel:
    """The network of a checkpoint, or of a run folder's best one: its moving average if it has one, unless `raw`."""
    trained = open_state(path, overrides, raw=raw, say=say)
    state, config, facts = trained.state, trained.config, trained.state.get("data") or {}
    if config.task != "segment3d" or config.patch_size is None or "channels" not in facts:
        raise UserError(
            "checkpoint-of-images",
            f"{trained.path} was trained with task: {config.task}",
            why="it classifies images, and has no classes for voxels",
            hint="a checkpoint of a run with task: segment3d",
        )
    rules = LabelRules(int(facts["classes"]), facts["ignore"])
    model = build_volume_model(
        config.model, channels=int(facts["channels"]), classes=rules.classes, patch=config.patch_size,
        # Its heads have weights too.
        deep_supervision=bool(state["config"]["deep_supervision"]), indivisible=config.indivisible_patch,
        channels_last=config.channels_last,
    )  # fmt: skip
    return TrainedVolumeModel(
        path=trained.path, model=trained.load_into(model), config=config, rules=rules,
        channels=int(facts["channels"]), averaged=trained.averaged, epoch=int(state["progress"]["epoch"]),
        step=int(state["progress"]["step"]),
    )  # fmt: skip
