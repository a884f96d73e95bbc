"""Faults that occur on a single rank; a test names one for its process to install first."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import torch

from stoker.tasks import training
from stoker.tasks.classify import build_run
from stoker.train.step import Prepared

MOST = 4
"""Samples that fit into the memory of the rank that is short of it."""
BAD_STEPS = range(3, 6)


def _instrument(change: Any) -> None:
    def build(*arguments: Any, **keys: Any) -> Any:
        run = build_run(*arguments, **keys)
        return change(run)

    training.build_run = build  # type: ignore[assignment]


def little_memory_on_the_second_rank() -> None:
    """More than MOST samples at a time run out of memory on that rank."""

    def change(run: Any) -> Any:
        def check(_module: Any, inputs: tuple[torch.Tensor, ...]) -> None:
            if os.environ["RANK"] == "1" and len(inputs[0]) > MOST:
                raise torch.OutOfMemoryError("planted")

        run.model.register_forward_pre_hook(check)
        return run

    _instrument(change)


def bad_images_on_the_second_rank() -> None:
    """The images of steps BAD_STEPS are NaN on that rank."""

    def change(run: Any) -> Any:
        prepare = run.prepare

        def spoiled(batch: Any, epoch: int, step: int) -> Prepared:
            prepared: Prepared = prepare(batch, epoch, step)
            bad = os.environ["RANK"] == "1" and step in BAD_STEPS
            return prepared._replace(inputs=prepared.inputs * float("nan")) if bad else prepared

        return replace(run, prepare=spoiled)

    _instrument(change)
