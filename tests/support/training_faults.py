"""Faults that occur on a single rank; a test names one for its process to install first."""

from __future__ import annotations

import json
import os
import resource
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from stoker.tasks import training
from stoker.train.step import Prepared
from tests.support.changed_task import changing_runs

MOST = 4
"""Samples that fit into the memory of the rank that is short of it."""
SMALL = 32
"""Side of the images for which that rank's memory is enough."""
BAD_STEPS = range(3, 6)


def _instrument(change: Any) -> None:
    training.task_for = changing_runs(change)


def little_memory_on_the_second_rank() -> None:
    """More than MOST samples at a time run out of memory on that rank."""

    def change(run: Any) -> Any:
        def check(_module: Any, inputs: tuple[torch.Tensor, ...]) -> None:
            if os.environ["RANK"] == "1" and len(inputs[0]) > MOST:
                raise torch.OutOfMemoryError("planted")

        run.model.register_forward_pre_hook(check)
        return run

    _instrument(change)


def little_memory_for_large_images_on_the_second_rank() -> None:
    """More than MOST samples at a time run out of memory on that rank, once images are larger than SMALL."""

    def change(run: Any) -> Any:
        def check(_module: Any, inputs: tuple[torch.Tensor, ...]) -> None:
            if os.environ["RANK"] == "1" and inputs[0].shape[-1] > SMALL and len(inputs[0]) > MOST:
                raise torch.OutOfMemoryError("planted")

        run.model.register_forward_pre_hook(check)
        return run

    _instrument(change)


def counted_messages() -> None:
    """Writes, for each step, how many messages the ranks exchanged: those of gradients, and all others."""
    counts = {"gradients": 0, "others": 0}

    def counting(function: Any) -> Any:
        def counted(*arguments: Any, **keys: Any) -> Any:
            counts["others"] += 1
            return function(*arguments, **keys)

        return counted

    def average(_state: Any, bucket: Any) -> Any:
        counts["gradients"] += 1
        counts["others"] -= 1  # the hook itself calls what is counted
        return default_hooks.allreduce_hook(dist.group.WORLD, bucket)

    # torch checks the hook's annotations, which here are text.
    average.__annotations__ = {"bucket": dist.GradBucket, "return": torch.futures.Future[torch.Tensor]}

    def change(run: Any) -> Any:
        for name in ("all_reduce", "broadcast", "all_gather_object", "broadcast_object_list", "all_gather", "barrier"):
            setattr(dist, name, counting(getattr(dist, name)))
        run.step.model.register_comm_hook(None, average)
        step, file = run.step, Path(f"messages-{os.environ['RANK']}.jsonl")

        def stepped(*arguments: Any, **keys: Any) -> Any:
            with file.open("a") as lines:
                lines.write(json.dumps(counts) + "\n")
            return type(step).__call__(step, *arguments, **keys)

        return replace(run, step=_Watched(step, stepped))

    _instrument(change)


class _Watched:
    """A step whose calls go through another function."""

    def __init__(self, step: Any, call: Any) -> None:
        self._step, self._call = step, call

    def __call__(self, *arguments: Any, **keys: Any) -> Any:
        return self._call(*arguments, **keys)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._step, name)


def bad_images_on_the_second_rank() -> None:
    """The images of steps BAD_STEPS are NaN on that rank."""

    def change(run: Any) -> Any:
        prepare = run.input.prepare

        def spoiled(batch: Any, epoch: int, step: int, number: int) -> Prepared:
            prepared: Prepared = prepare(batch, epoch, step, number)
            bad = os.environ["RANK"] == "1" and step in BAD_STEPS
            return prepared._replace(inputs=prepared.inputs * float("nan")) if bad else prepared

        return replace(run, input=replace(run.input, prepare=spoiled))

    _instrument(change)


def small_files() -> None:
    """Lets this process write files of 20 kB at most: a larger one fails as on a full disk."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
