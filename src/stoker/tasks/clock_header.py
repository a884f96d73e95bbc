"""What a run writes at the head of its clock's file: how its loader, device and storage are set up."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from stoker.config import Config
from stoker.data.index.samples import SampleSet
from stoker.facts.observed import AcceleratorFacts
from stoker.output.clock_file import clock_header
from stoker.probe.storage_speed import describe_storage
from stoker.tasks.loader_shape import loader_shape

if TYPE_CHECKING:
    from stoker.training.loop import Run


def run_header(config: Config, samples: SampleSet, run: Run, *, workers: int, cpus: int) -> dict[str, Any]:
    """The header of a run that is about to train."""
    return clock_header(
        loader_shape(config, len(samples), workers, run.ranks.world),
        cpus=cpus,
        world=run.ranks.world,
        torch_version=torch.__version__,
        device=run.device.type,
        accelerator=name_accelerator(run.device),
        storage=describe_storage(samples),
        convolves_3d=convolves_3d(run.model),
    )


def convolves_3d(model: nn.Module) -> bool:
    """Whether the network convolves volumes."""
    return any(isinstance(module, nn.Conv3d) for module in model.modules())


def name_accelerator(device: torch.device) -> AcceleratorFacts | None:
    """What the device calls itself; None on a CPU."""
    if device.type != "cuda":
        return None
    return AcceleratorFacts(name=torch.cuda.get_device_name(device), count=torch.cuda.device_count())
