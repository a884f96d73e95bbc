"""Model FLOPs utilisation: what share of the accelerator's peak a run turns into training."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from stoker.config import Config
from stoker.probe.datasheets import Datasheet, datasheet_for_device, load_datasheet
from stoker.probe.model_flops import training_flops_per_image
from stoker.training.sizes import all_sizes, default_resize_epochs, image_size

Utilisation = Callable[[float, int], float | None]
"""(images a second over all ranks, epoch) to a share between 0 and 1; None where it is not known."""


def accelerator_of(config: Config, device: torch.device | None = None) -> Datasheet | None:
    """The datasheet that the config names, or the device's own; None where neither is known. Raises UsageError."""
    if config.accelerator is not None:
        return load_datasheet(config.accelerator)
    if device is None or device.type != "cuda":
        return None
    return datasheet_for_device(torch.cuda.get_device_name(device))


def utilisation_of(config: Config, model: nn.Module, device: torch.device, world: int) -> Utilisation | None:
    """Counts the model's FLOPs once for each image size of the run; then asking costs a multiplication.

    None where no peak is known for the device and the config's precision, or the FLOPs cannot be counted.
    """
    sheet = accelerator_of(config, device)
    peak = None if sheet is None else sheet.peak(config.precision, config.matmul_precision)
    if peak is None:
        return None
    until = config.resize_epochs or default_resize_epochs(config.epochs)
    sizes = all_sizes(config.start_img_size, config.img_size, until)
    # Beforehand, for all of them: in the middle of an epoch it would cost a step half a second.
    flops = {size: training_flops_per_image(model, size) for size in sizes}
    if all(count is None for count in flops.values()):
        return None

    def share(images_per_second: float, epoch: int) -> float | None:
        count = flops[image_size(epoch, config.start_img_size, config.img_size, until)]
        return None if count is None else images_per_second * count / (peak * world)

    return share
