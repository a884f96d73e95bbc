"""Which GPU a process takes, whoever started it; more processes than GPUs are refused where that can be told.

The last test is about how that GPU is set up.
"""

from __future__ import annotations

import pytest
import torch

from stoker.config import load_config
from stoker.core.errors import UserError
from stoker.profile.host import Machine, fit_to_machine
from stoker.train.compute import choose_fastest_kernels
from stoker.train.ranks import check_devices, device_index

SRUN = {"SLURM_PROCID": "3", "SLURM_LOCALID": "3", "SLURM_NTASKS": "4", "SLURM_STEP_ID": "0"}


def test_a_process_takes_the_gpu_of_its_number_on_the_node() -> None:
    assert [device_index(rank, 4, {}) for rank in range(4)] == [0, 1, 2, 3]
    assert device_index(1, 4, {"CUDA_VISIBLE_DEVICES": "4,5,6,7"}) == 1


@pytest.mark.parametrize(
    "environment",
    [
        {"CUDA_VISIBLE_DEVICES": "MIG-GPU-8932f937/1/0"},
        {"ROCR_VISIBLE_DEVICES": "3"},
        {"SLURM_STEP_GPUS": "3"},
        {"SLURM_GPUS_PER_TASK": "a100:1"},
        {"SLURM_TRES_PER_TASK": "cpu=8,gres/gpu=1"},
        {"SLURM_TRES_PER_TASK": "gres/gpu:a100:1"},
    ],
)
def test_a_process_to_which_srun_shows_one_gpu_takes_that(environment: dict[str, str]) -> None:
    assert device_index(3, 1, SRUN | environment) == 0


@pytest.mark.parametrize(
    ("rank", "visible", "environment"),
    [
        (1, 1, {}),
        (3, 1, SRUN),
        (3, 1, SRUN | {"SLURM_GPUS_PER_TASK": "11"}),
        (3, 1, SRUN | {"SLURM_TRES_PER_TASK": "cpu=1,gres/gpu=2"}),
        (3, 1, SRUN | {"SLURM_STEP_GPUS": "0,1"}),
        (1, 0, {"CUDA_VISIBLE_DEVICES": ""}),
        # One environment for all processes of the node: they would share that GPU.
        (1, 1, {"CUDA_VISIBLE_DEVICES": "0", "TORCHELASTIC_RUN_ID": "none"}),
        (1, 1, {"CUDA_VISIBLE_DEVICES": "0", "STOKER_LAUNCHED": "1"}),
    ],
)
def test_more_processes_than_gpus_are_refused(rank: int, visible: int, environment: dict[str, str]) -> None:
    with pytest.raises(UserError) as caught:
        device_index(rank, visible, environment)
    assert caught.value.name == "devices-missing"
    assert f"process {rank + 1}" in caught.value.seen


def test_a_config_for_several_devices_is_accepted_where_each_process_sees_one() -> None:
    machine = Machine(cpus=8, accelerators=1)
    config, _ = fit_to_machine(load_config(None, ["devices=4"]).config, machine)
    check_devices(config, machine, SRUN | {"CUDA_VISIBLE_DEVICES": "0", "SLURM_GPUS_PER_TASK": "1"})
    for environment in ({}, {"CUDA_VISIBLE_DEVICES": "0"}):  # nobody has started the other processes yet
        with pytest.raises(UserError, match="this machine has 1"):
            check_devices(config, machine, environment)


def test_cudnn_times_its_algorithms_on_a_gpu_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)
    choose_fastest_kernels(torch.device("cpu"))
    assert torch.backends.cudnn.benchmark is False
    choose_fastest_kernels(torch.device("cuda", 0))
    assert torch.backends.cudnn.benchmark is True
