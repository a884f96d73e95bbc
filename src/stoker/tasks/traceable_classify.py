"""A classification step described for a plan: the real one, without data."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from stoker.augment.pipeline import build_train_augment
from stoker.config import Config
from stoker.tasks.classify import build_classifier
from stoker.training.losses import build_loss
from stoker.training.optimizers import build_optimizer
from stoker.training.ranks import Ranks
from stoker.training.step import Prepared
from stoker.training.traceable import TraceableStep


def traceable_step(config: Config, num_classes: int) -> TraceableStep:
    """The step that `build_run` would train with, described for a plan; nothing of the data is opened.

    The heaviest batch stands for all: where mixup is on, every one is mixed. Policies and erasing are left out: they
    work on bytes, or on a few samples, and are over before the model's activations begin.
    """
    fresh = config.model_copy(update={"weights": None})  # what the weights are does not change their size

    def build() -> nn.Module:
        # The default device is meta while a step is traced: nothing is allocated.
        return build_classifier(fresh, num_classes, torch.get_default_device(), Ranks(), lambda _text: None)

    always = {"mix_probability": 1.0, "mix_switch_probability": 0.0 if config.mixup_alpha > 0 else 1.0}
    plain = {"auto_augment": "none", "random_erasing": 0.0}
    augment = build_train_augment(config.model_copy(update=always | plain), num_classes)
    # Kept by `to_float` for the life of the process: made here, so that no fake tensor is.
    augment(torch.zeros(2, 2, 2, 3, dtype=torch.uint8), np.zeros(2, np.int64), *_no_draws(2), 0, 0)

    def make_batch(batch: int) -> Prepared:
        images = torch.empty(batch, config.img_size, config.img_size, 3, dtype=torch.uint8)
        labels = torch.empty(batch, dtype=torch.int64)
        mixed = augment(images, labels, *_no_draws(batch), 0, 0)
        return Prepared(mixed.images, mixed.targets, labels, mixed.mixed)

    checkpointing = config.model_copy(update={"gradient_checkpointing": True})
    return TraceableStep(
        build_model=build,
        build_optimizer=partial(
            build_optimizer, name=config.optimizer, lr=config.lr, momentum=config.momentum, nesterov=config.nesterov,
            betas=config.betas, weight_decay=config.weight_decay, decay_bias_and_norm=config.decay_bias_and_norm,
        ),
        loss=build_loss(config),
        make_batch=make_batch,
        batch_size=config.batch_size,
        precision=config.precision,
        ema_decay=config.ema_decay,
        accumulation=config.gradient_accumulation,
        clip_grad_norm=config.clip_grad_norm,
        checkpointed=None if config.gradient_checkpointing else traceable_step(checkpointing, num_classes),
    )  # fmt: skip


def _no_draws(batch: int) -> tuple[Any, Any]:
    """Flips and keys of a batch whose contents do not matter."""
    return np.zeros(batch, np.bool_), np.zeros(batch, np.uint64)
