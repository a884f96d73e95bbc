"""Which device a process of a run computes on."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

import torch

from stoker.core.errors import UserError
from stoker.profile.host import HostConfig, Machine
from stoker.train.launch import LAUNCHED
from stoker.train.ranks import Ranks, ranks_from_environment

ONE_DEVICE = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "SLURM_STEP_GPUS")
"""Variables that list the GPUs of a process; a launcher that names one has given it that one."""


def check_devices(config: HostConfig, machine: Machine, environment: Mapping[str, str] = os.environ) -> None:
    """Refuses a config that asks for more devices than this machine has."""
    present = machine.accelerators
    if present == 1 and sees_own_device(environment):
        return  # the other processes have the other devices
    if present and config.devices > present:
        raise UserError(
            "devices-missing", f"devices: {config.devices}, but this machine has {present}", hint=f"devices={present}"
        )


def device_index(local_rank: int, visible: int, environment: Mapping[str, str] = os.environ) -> int:
    """The GPU of this process, among the `visible` ones: the one with its local rank, or the only one that srun shows
    it (`--gpus-per-task=1`). Raises UserError if there are more processes than GPUs."""
    if local_rank < visible:
        return local_rank
    if visible == 1 and sees_own_device(environment):
        return 0
    raise UserError(
        "devices-missing",
        f"this is process {local_rank + 1} of this node, and it sees {visible} GPU{'s' * (visible != 1)}",
        why="two processes on one GPU would each get half of it, and NCCL refuses them",
        hint="start one process per GPU (torchrun --nproc_per_node, srun --ntasks-per-node)",
    )


def sees_own_device(environment: Mapping[str, str]) -> bool:
    """Whether the launcher gave this process a GPU to itself, and each other process another one.

    torchrun and our own launcher give all processes of a node the same environment: one visible GPU would be shared.
    """
    if ranks_from_environment(environment) is None or "TORCHELASTIC_RUN_ID" in environment or LAUNCHED in environment:
        return False
    if any(len(_listed(environment.get(name, ""))) == 1 for name in ONE_DEVICE):
        return True
    # `1`, or with the kind of GPU, `a100:1`; newer versions of Slurm list it among others: `cpu=8,gres/gpu=1`.
    per_task, resources = environment.get("SLURM_GPUS_PER_TASK", ""), environment.get("SLURM_TRES_PER_TASK", "")
    return bool(
        re.fullmatch(r"([\w.-]+:)?1", per_task) or re.search(r"(^|,)gres/gpu[:=]([\w.-]+[:=])?1(,|$)", resources)
    )


def _listed(devices: str) -> list[str]:
    return [name for name in devices.split(",") if name.strip() not in ("", "-1", "NoDevFiles")]


def device_of(ranks: Ranks) -> torch.device:
    """The device of this process; from now on torch's default."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    index = device_index(ranks.local_rank, torch.cuda.device_count())
    torch.cuda.set_device(index)
    return torch.device("cuda", index)
