"""Validation: every sample counted exactly once, for any number of ranks and any batch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from stoker.errors import UserError
from stoker.training.metrics import Accumulator, Scores
from stoker.training.ranks import Ranks, any_rank
from stoker.training.step import Prepared
from stoker.training.stopping import LeaveValidation

if TYPE_CHECKING:
    from stoker.training.loop import Loader, Run

ASK_EVERY = 8
"""Batches between two times that several ranks ask each other whether to leave: they wait for each other there."""


@torch.no_grad()
def evaluate(model: nn.Module, loader: Loader, run: Run) -> dict[str, float]:
    """`val/loss`, `val/acc1` and `val/acc5` over all ranks' samples; raises LeaveValidation when asked to leave."""
    model = model.module if isinstance(model, DistributedDataParallel) else model
    share_buffers(model, run.ranks)
    was_training = model.training
    model.eval()
    sums = Accumulator(run.device)
    run.observer.validation_begins(loader.steps())
    most: int | None = None
    try:
        for number, batch in enumerate(loader.epoch(0)):
            # Fewer samples than ranks may be left at the end; then some ranks get an empty batch.
            if len(batch):
                most = _score(model, run.prepare_val(batch), run, sums, most)
            run.observer.validation_step()
            run.guard_memory(loader)
            # All ranks have the same number of batches, so they ask at the same ones.
            if (run.ranks.world == 1 or number % ASK_EVERY == 0) and any_rank(run.stop.wanted, run.ranks):
                raise LeaveValidation
    finally:
        model.train(was_training)
    return named_scores("val", sums.result())


def _score(model: nn.Module, batch: Prepared, run: Run, sums: Accumulator, most: int | None) -> int | None:
    """Adds a batch, in pieces of `most` samples; where memory runs out, in ever smaller ones, which are returned."""
    done = 0
    while done < len(batch.labels):
        piece = slice(done, None if most is None else done + most)
        out_of_memory = False
        try:
            with run.step.precision.autocast():
                logits = model(batch.inputs[piece])
                loss = run.val_loss(logits, batch.labels[piece])
            sums.add(logits, batch.labels[piece], loss)
            done += len(logits)
        except torch.OutOfMemoryError:
            out_of_memory = True  # only noted: in here the traceback still holds the tensors
        if out_of_memory:
            most = _smaller(most or len(batch.labels), run)
    return most


def _smaller(size: int, run: Run) -> int:
    if size == 1:
        raise UserError(
            "out-of-device-memory", "the device has no memory to validate one sample", hint="val_img_size= smaller"
        )
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    size = -(-size // 2)
    run.step.say(f"out of device memory: validation now passes in pieces of {size} samples")
    return size


def share_buffers(model: nn.Module, ranks: Ranks) -> None:
    """Gives every rank the first one's batch norm statistics: they must judge with the same model."""
    if ranks.world > 1:
        import torch.distributed as dist

        for buffer in model.buffers():
            dist.broadcast(buffer, src=0)


def named_scores(split: str, scores: Scores) -> dict[str, float]:
    """The scores under the names that everybody looks for; what was not measured is absent."""
    named = {"loss": scores.loss, "acc1": scores.acc1, "acc5": scores.acc5}
    return {f"{split}/{name}": value for name, value in named.items() if value is not None}
