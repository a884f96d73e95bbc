"""What a run needs on a host: memory by part, /dev/shm, open files; and what torch's own loader would need.

Batches are uint8 until they are on the device. What each process needs counts once per accelerator of the host.
"""

from __future__ import annotations

import resource
from dataclasses import dataclass, replace
from typing import Literal

from stoker.loader.loader_memory import STATED, LoaderMemory, batches_held
from stoker.plan.records import Budget, RamBudget

# Our index of the data set (results/index).
INDEX_BYTES_PER_SAMPLE = 42
# The first use of CUDA takes 1,203 MiB of host memory per process (github.com/pytorch/pytorch/issues/106511).
CUDA_HOST_BYTES = 1_300_000_000
# 'OS + base ~3 GB' in users' own budgets for 62 GB; small hosts have less running.
OS_BYTES = 3_000_000_000
OS_SHARE = 0.1
# Threads that read from a local folder (stoker.io.prefetch), and connections to an object store.
READ_AT_ONCE, CONNECTIONS = 16, 64
# Pipes and sentinel of a worker process, the descriptor of a slot: counted in /proc/self/fd (results/loader_memory).
FILES_PER_WORKER, FILES_PER_SLOT = 4, 1
# Log, metrics, checkpoint, lease, sockets between ranks, Python's own files.
FILES_BESIDES = 64

# A float batch takes half as much again in torch's loader, as users report: 230 MB for one of 154,140,672 bytes.
TORCH_BATCH_OVERHEAD = 230_000_000 / 154_140_672
FLOAT_BYTES = 4
# From the same budgets: 'PyTorch overhead ~2 GB'.
TORCH_PROCESS_BYTES = 2_000_000_000
# A torch worker with PIL: of the 1,211 MB with two of them (results/memory), 567 are the process and 154 four float
# batches of 64.
TORCH_WORKER_BYTES = 245_000_000
# A validation loader takes the same again if workers persist, and the page cache needs as much to be of any use.
RISKY_TIMES = 3


Verdict = Literal["safe", "risky", "refused"]


@dataclass(frozen=True)
class LoaderSettings:
    """One loader of one process."""

    engine: Literal["process", "thread"]
    workers: int
    prefetch: int
    batch: int
    sample_bytes: int
    """What a batch reserves for a sample."""
    whole_files: bool = False
    """Whether a worker holds the files of all samples of the batch that it makes, as one of torch's does."""
    held: int = 1
    """Batches that the consumer holds when it asks for the next: with gradient accumulation, those of an update."""

    @property
    def batch_bytes(self) -> int:
        return self.batch * self.sample_bytes

    @property
    def batches(self) -> int:
        """The most batches in memory: in flight, plus those that the training loop holds."""
        return batches_held(self.engine, self.workers, self.prefetch, self.held)

    @property
    def shared_bytes(self) -> int:
        """The part of these batches that is in /dev/shm."""
        return self.batches * self.batch_bytes if self.engine == "process" else 0


@dataclass(frozen=True)
class HostShape:
    """What runs on one host."""

    loader: LoaderSettings
    """The training loader of each process."""
    validation: LoaderSettings | None = None
    """The validation loader; with persistent workers, its workers exist at the same time as those of training."""
    persistent_workers: bool = True
    processes: int = 1
    """One per accelerator of the host."""
    on_gpu: bool = False
    samples: int | None = None
    """Training and validation; None if the data is unknown."""
    lookahead_bytes: int = 0
    """Per process: the key `lookahead`."""
    remote: bool = False
    """Whether samples come from an object store."""
    model_bytes: int = 0
    """Parameters and buffers."""
    state_bytes: int = 0
    """What a checkpoint contains: model, optimizer, EMA."""
    step_bytes: int = 0
    """Without an accelerator: the peak of a step, which then uses host memory."""
    cache_bytes: int = 0
    """Decoded chunks of compressed volumes, for all processes together."""


def ram_budget(
    shape: HostShape, memory: LoaderMemory = STATED, *, limit_bytes: int | None = None, os_bytes: int | None = None
) -> RamBudget:
    """The host's memory by part, for all its accelerators.

    `os_bytes` is what other programs use (`machine.memory.used_by_others_bytes` on this machine); None assumes a
    figure.
    """
    loader = loader_parts(shape.loader, memory)
    if shape.validation is not None:
        # It uses the process and the fork server of training.
        beside = loader_parts(shape.validation, memory)
        loader["batches in flight"] += beside["batches in flight"]
        if shape.persistent_workers:
            loader["workers"] += beside["workers"]
    loader |= {"fetched ahead": shape.lookahead_bytes}
    process = loader.pop("process")
    each = {"training process": process, **loader}
    if shape.on_gpu:
        # The model is built on the host before it moves, and malloc may keep the memory.
        each |= {"model on the host": shape.model_bytes, "CUDA": CUDA_HOST_BYTES}
    else:
        each |= {"training step": shape.step_bytes}
    parts = {name: shape.processes * size for name, size in each.items()}
    parts["index"] = INDEX_BYTES_PER_SAMPLE * (shape.samples or 0)  # mapped from one file: once
    parts["volume cache"] = shape.cache_bytes
    parts["checkpoint copy"] = shape.state_bytes
    if os_bytes is None:
        os_bytes = OS_BYTES if limit_bytes is None else min(OS_BYTES, int(OS_SHARE * limit_bytes))
    parts["system"] = os_bytes
    parts = {name: size for name, size in parts.items() if size}
    train = shape.loader
    budget = RamBudget(
        total_bytes=sum(parts.values()),
        loader_bytes=shape.processes * sum(loader.values()),
        parts=parts,
        limit_bytes=limit_bytes,
        measured=memory.measured,
    )
    if not train.whole_files:
        return budget  # how others' loaders of such samples use memory is not known
    wanted = (shape.processes * train.workers, train.prefetch, train.batch, train.sample_bytes)
    return replace(
        budget,
        torch_loader_bytes=torch_loader_bytes(*wanted),
        torch_loader_verdict=None if limit_bytes is None else torch_loader_verdict(*wanted, limit_bytes),
    )


def loader_parts(loader: LoaderSettings, memory: LoaderMemory) -> dict[str, int]:
    """One process with one loader, without the bytes fetched ahead."""
    held = loader.batch * memory.image_bytes if loader.whole_files else 0
    each = memory.worker if loader.engine == "process" else memory.thread
    server = memory.fork_server if loader.engine == "process" and loader.workers else 0
    return {
        "process": memory.process + (0 if loader.workers else held),
        "fork server": server,
        "workers": loader.workers * (each + held),
        "batches in flight": loader.batches * loader.batch_bytes,
    }


def shm_budget(shape: HostShape, limit_bytes: int | None) -> Budget:
    """Shared memory of the host, in which worker processes hand over batches; threads need none."""
    parts = {"training batches": shape.processes * shape.loader.shared_bytes}
    if shape.validation is not None:
        parts["validation batches"] = shape.processes * shape.validation.shared_bytes
    parts = {name: size for name, size in parts.items() if size}
    return Budget(sum(parts.values()), limit_bytes, parts)


def open_files_budget(shape: HostShape) -> Budget:
    """The most files that one process has open, and its soft limit.

    The limit is per process, so this counts the training process or one of its workers, whichever needs more.
    """
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    limit = None if soft == resource.RLIM_INFINITY else soft
    reader = {"reads under way": CONNECTIONS if shape.remote else READ_AT_ONCE}
    loaders = [loader for loader in (shape.loader, shape.validation) if loader is not None]
    forked = [loader for loader in loaders if loader.engine == "process" and loader.workers]
    training = {
        "others": FILES_BESIDES,
        "worker processes": sum(FILES_PER_WORKER * loader.workers for loader in forked),
        "slots of shared memory": sum(FILES_PER_SLOT * loader.batches for loader in forked),
        **(reader if len(forked) < len(loaders) else {}),
    }
    worker = {
        "others": FILES_BESIDES,
        "slots of shared memory": max((FILES_PER_SLOT * loader.batches for loader in forked), default=0),
        **reader,
    }
    parts = max([training, worker] if forked else [training], key=lambda parts: sum(parts.values()))
    parts = {name: count for name, count in parts.items() if count}
    return Budget(sum(parts.values()), limit, parts)


def torch_loader_bytes(workers: int, prefetch: int, batch: int, sample_bytes: int) -> int:
    """Memory of the batches in flight in torch's own loader, which returns a float32 for each of our bytes."""
    return round(workers * prefetch * batch * sample_bytes * FLOAT_BYTES * TORCH_BATCH_OVERHEAD)


def torch_loader_verdict(workers: int, prefetch: int, batch: int, sample_bytes: int, ram_bytes: int) -> Verdict:
    """Whether torch's own loader would fit in addition to everything else: `refused` if not, `risky` if it leaves no
    room for a validation loader and as much page cache."""
    needed = torch_loader_bytes(workers, prefetch, batch, sample_bytes)
    needed += OS_BYTES + TORCH_PROCESS_BYTES + workers * TORCH_WORKER_BYTES
    if needed > ram_bytes:
        return "refused"
    return "risky" if RISKY_TIMES * needed > ram_bytes else "safe"
