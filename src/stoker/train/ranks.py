"""The ranks: which one this process is, whoever started it, its device, and how they exchange small values.

torchrun sets RANK, LOCAL_RANK and WORLD_SIZE; SLURM sets SLURM_PROCID, SLURM_LOCALID and SLURM_NTASKS; without them
this process is the only one, or the one that starts the others (stoker.train.launch).
"""

from __future__ import annotations

import datetime
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeVar

from stoker.core.errors import StokerError, UserError

if TYPE_CHECKING:
    import torch

    from stoker.profile.host import HostConfig, Machine

T = TypeVar("T")
_TORCHRUN = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
_SLURM = ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS")
LAUNCHED = "STOKER_LAUNCHED"
"""Set by our own launcher."""


@dataclass(frozen=True)
class Ranks:
    """This process among those that train together."""

    rank: int = 0
    local_rank: int = 0
    world: int = 1
    local_world: int | None = None
    """Processes on this node, if the launcher says."""
    control: Any = field(default=None, compare=False)
    """The group for small messages; None for a single process, and before the ranks are connected."""

    @property
    def is_first(self) -> bool:
        """Whether this process prints and writes for all."""
        return self.rank == 0


def ranks_from_environment(environment: Mapping[str, str] = os.environ) -> Ranks | None:
    """The rank that a launcher gave this process; None without a launcher.

    WORLD_SIZE alone means nothing: some people export it as the number of nodes, and only a launcher also sets
    LOCAL_RANK.
    """
    if all(name in environment for name in _TORCHRUN):
        local = environment.get("LOCAL_WORLD_SIZE", "")
        return replace(_read(environment, _TORCHRUN), local_world=int(local) if local.isdigit() else None)
    # Inside `sbatch` or `salloc`, but without srun, there is no job step: one process.
    if "SLURM_STEP_ID" in environment and all(name in environment for name in _SLURM):
        return _read(environment, _SLURM)
    return None


def _read(environment: Mapping[str, str], names: tuple[str, str, str]) -> Ranks:
    try:
        rank, local, world = (int(environment[name]) for name in names)
    except ValueError:
        seen = ", ".join(f"{name}={environment[name]}" for name in names)
        raise UserError("bad-rank", f"{seen} are not whole numbers", hint="let torchrun or srun set them") from None
    if not 0 <= rank < world:
        raise UserError("bad-rank", f"{names[0]}={rank} is not below {names[2]}={world}")
    return Ranks(rank, local, world)


@contextmanager
def process_group(ranks: Ranks, backend: str, timeout_s: float) -> Iterator[Ranks]:
    """Connects the ranks inside the block, if there are several.

    Gradients travel over `backend`, everything else over a gloo group beside it: a flag that went through NCCL would
    have to be copied to the device, and reading it would wait for everything queued there.
    """
    if ranks.world == 1:
        yield ranks
        return
    import torch.distributed as dist

    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "12355")
    timeout = datetime.timedelta(seconds=timeout_s)
    try:
        dist.init_process_group(backend, rank=ranks.rank, world_size=ranks.world, timeout=timeout)
        control = dist.new_group(backend="gloo", timeout=timeout)
    except (RuntimeError, ValueError) as error:
        address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        raise UserError(
            "ranks-do-not-meet",
            f"rank {ranks.rank} of {ranks.world} could not join the others at {address}: {str(error).splitlines()[0]}",
            why="every rank has to be started, and has to reach MASTER_ADDR:MASTER_PORT",
            hint="check MASTER_ADDR, MASTER_PORT, NODE_RANK and num_nodes on every node",
        ) from None
    try:
        yield replace(ranks, control=control)
    except RuntimeError as error:
        if isinstance(error, dist.DistError) or "gloo" in str(error).lower() or "by peer" in str(error):
            raise UserError(
                "rank-lost",
                f"rank {ranks.rank} lost the others: {str(error).splitlines()[0]}",
                why="a rank that dies ends the run: the others would wait for its gradients",
                hint="see the message of the rank that ended first; the same command resumes from the last checkpoint",
            ) from None
        raise
    finally:
        dist.destroy_process_group()


def from_first(make: Callable[[], T], ranks: Ranks) -> T:
    """What `make` returns or raises on the first rank, on every rank. Only for plain values and CPU tensors."""
    if ranks.world == 1:
        return make()
    import torch.distributed as dist

    made: list[Any] = [None]
    if ranks.is_first:
        try:
            made = [(make(), None)]
        except StokerError as error:
            made = [(None, error)]
    dist.broadcast_object_list(made, group=ranks.control)
    value, problem = made[0]
    if problem is not None:
        raise problem
    result: T = value
    return result


def gather(value: T, ranks: Ranks) -> list[T]:
    """The values of all ranks in order, on every rank. Slow: only for rare events."""
    if ranks.world == 1:
        return [value]
    import torch.distributed as dist

    values: list[Any] = [None] * ranks.world
    dist.all_gather_object(values, value, group=ranks.control)
    return values


def any_rank(flag: bool, ranks: Ranks) -> bool:
    """Whether the flag is set on any rank. The ranks wait for each other here."""
    return agree((flag,), ranks)[0]


def agree(flags: tuple[bool, ...], ranks: Ranks) -> tuple[bool, ...]:
    """For each flag, whether it is set on any rank; one message for all. The ranks wait for each other here."""
    return flags if ranks.world == 1 else _Message(flags, ranks).read()


class Agreement:
    """Flags that any rank raises at a step, and that all ranks act on together, without waiting for each other.

    One small message a step, sent at its end and read at the end of the next, when it has long arrived. A single
    process has nothing to agree on: its flags count at once.
    """

    def __init__(self, ranks: Ranks, ask: Callable[[], tuple[bool, ...]]) -> None:
        self._ranks = ranks
        self._ask = ask
        self._sent: _Message | None = None

    def flags(self) -> tuple[bool, ...]:
        """The flags that any rank raised at the step before."""
        if self._ranks.world == 1:
            return self._ask()
        sent, self._sent = self._sent, None
        return tuple(False for _ in self._ask()) if sent is None else sent.read()

    def send(self) -> None:
        """Sends this rank's flags to the others; call it when the flags of the step before have been acted on."""
        if self._ranks.world > 1:
            self._sent = _Message(self._ask(), self._ranks)


class _Message:
    """Flags on their way to all ranks."""

    def __init__(self, flags: tuple[bool, ...], ranks: Ranks) -> None:
        import torch
        import torch.distributed as dist

        self._raised = torch.tensor([int(flag) for flag in flags])
        self._work: Any = dist.all_reduce(self._raised, dist.ReduceOp.MAX, group=ranks.control, async_op=True)

    def read(self) -> tuple[bool, ...]:
        self._work.wait()
        return tuple(bool(value) for value in self._raised.tolist())


ONE_DEVICE = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "SLURM_STEP_GPUS")
"""Variables that list the GPUs of a process; a launcher that names one has given it that one."""


def check_devices(config: HostConfig, machine: Machine, environment: Mapping[str, str] = os.environ) -> None:
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
    import torch

    if not torch.cuda.is_available():
        return torch.device("cpu")
    index = device_index(ranks.local_rank, torch.cuda.device_count())
    torch.cuda.set_device(index)
    return torch.device("cuda", index)
