"""A restored model at work: bytes of images in, logits out."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from stoker.augment.pipeline import EvalPrepare
from stoker.tasks.classify import colours_of
from stoker.training.from_checkpoint import Restored
from stoker.training.precision import Precision, set_matmul_precision


@dataclass(frozen=True)
class Judge:
    """A model on its device, judging as validation during training does."""

    model: nn.Module
    device: torch.device
    prepare: EvalPrepare
    precision: Precision

    @torch.inference_mode()
    def logits(self, images_nhwc: Tensor) -> Tensor:
        """The scores (images, outputs) in float32, on the device, of bytes (images, height, width, 3)."""
        inputs = self.prepare(images_nhwc.to(self.device, non_blocking=True))
        with self.precision.autocast():
            logits: Tensor = self.model(inputs)
        return logits.float()


def judge_of(restored: Restored, device: torch.device | None = None) -> Judge:
    """The restored model on the GPU where there is one, in the config's precision."""
    device = device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
    set_matmul_precision(restored.config.matmul_precision)
    mean, std = colours_of(restored.model)
    return Judge(
        restored.model.to(device), device, EvalPrepare(mean, std), Precision(restored.config.precision, device)
    )
