"""What the oracle does inside stoker's process: it notes every batch, stops the run at a step, and makes two networks
small. Nothing else of the oracle knows modules of ours; where they move, only this file changes."""

from __future__ import annotations

import hashlib
import os
import signal
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from timm.models import build_model_with_cfg, register_model
from timm.models.resnet import BasicBlock, ResNet

from stoker.tasks import training
from stoker.tasks.volumes import unets
from tests.support.changed_task import changing_runs

LEDGER = "STOKER_ORACLE_LEDGER"
"""File that gets a line for each batch."""
STOP = "STOKER_ORACLE_STOP"
"""`SIGTERM 4`: the first rank sends itself this signal during the fourth step."""


def install() -> None:
    """Called in the process, before the command."""
    training.task_for = changing_runs(_watch)


def install_small() -> None:
    """The same, with networks of a few thousand weights: others' checkpoints would be too large for a repository."""
    install()
    build_unet = unets.residual_unet
    unets.residual_unet = lambda *arguments, **keys: build_unet(*arguments, **keys | {"base": 2})
    register_model(oracle_net)


def oracle_net(pretrained: bool = False, **keys: Any) -> Any:
    """A ResNet with 6,000 weights; `model: oracle_net` in a config."""
    small = {"block": BasicBlock, "layers": (1, 1, 1, 1), "channels": (8,) * 4, "stem_type": "deep", "stem_width": 4}
    return build_model_with_cfg(ResNet, "oracle_net", pretrained, **small | keys | {"pretrained_cfg": {}})


def _watch(run: Any) -> Any:
    prepare = run.input.prepare
    ledger, rank = Path(os.environ[LEDGER]), os.environ.get("RANK", "0")
    name, _, stop_at = os.environ.get(STOP, "").partition(" ")

    def watched(batch: Any, epoch: int, step: int, number: int) -> Any:
        with ledger.open("a") as stream:
            words = " ".join(f"{kind}={_hash(arrays)}" for kind, arrays in _content(batch).items())
            stream.write(f"batch step={step:03d} rank={rank} part={number} epoch={epoch} {words}\n")
        if name and step + 1 == int(stop_at) and rank == "0" and number == 0:
            os.kill(os.getpid(), getattr(signal, name))
        return prepare(batch, epoch, step, number)

    return replace(run, input=replace(run.input, prepare=watched))


def _content(batch: Any) -> dict[str, Iterable[Any]]:
    drawn = {"samples": [batch.indices], "keys": [batch.keys]}
    if hasattr(batch, "labels"):
        return drawn | {"flips": [batch.flips], "labels": [batch.labels], "pixels": [batch.images]}
    # Rounded: sine and cosine differ in the last bit between processors.
    turned = [np.round(array, 6) for array in (batch.matrices, batch.offsets, batch.elastic)]
    images, labels = zip(*(batch.region(slot) for slot in range(len(batch))), strict=True)
    return drawn | {
        "crops": [batch.starts, batch.shapes, batch.orders, batch.flips, *turned], "labels": labels, "pixels": images,
    }  # fmt: skip


def _hash(arrays: Iterable[Any]) -> str:
    digest = hashlib.blake2s(digest_size=4)
    for array in map(np.ascontiguousarray, arrays):
        digest.update(f"{array.dtype.kind} {array.shape}".encode() + array.tobytes())
    return digest.hexdigest()
