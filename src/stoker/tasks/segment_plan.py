"""What a plan needs to know about a run over volumes: its step, to be traced, and its data."""

from __future__ import annotations

from functools import partial

import torch
from torch import nn

from stoker.config import Config
from stoker.data.volumes.volume import Shape
from stoker.models.volumes import build_volume_model
from stoker.tasks.classify import optimizer_for
from stoker.train.compute import compute_dtype
from stoker.train.step import TraceableStep, plain_batch
from stoker.train.volume_losses import build_volume_loss


def traceable_volume_step(config: Config, channels: int, classes: int) -> TraceableStep:
    """The step that the config trains with, for a plan to trace; does not open the data.

    The augmentation is left out: it works on a batch before the model's activations begin.
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
    return TraceableStep(
        build_model=build,
        build_optimizer=partial(optimizer_for, config, lr=config.lr),
        # Which label is ignored does not change what is computed.
        loss=build_volume_loss(config.volume_loss, classes, ignore=classes),
        # A plan is for a GPU, wherever it is made.
        make_batch=plain_batch((channels, *patch), target=patch, dtype=compute_dtype(config.precision)),
        batch_size=config.batch_size,
        precision=config.precision,
        ema_decay=config.ema_decay,
        accumulation=config.gradient_accumulation,
        clip_grad_norm=config.clip_grad_norm,
        checkpointed=None
        if config.gradient_checkpointing
        else traceable_volume_step(checkpointing, channels, classes),
    )


def patch_of(config: Config) -> Shape:
    assert config.patch_size is not None  # a rule of the config
    return config.patch_size
