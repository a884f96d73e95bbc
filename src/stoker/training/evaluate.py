"""Validation: every sample counted exactly once, for any number of ranks and any batch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from stoker.training.metrics import Accumulator, Scores
from stoker.training.ranks import Ranks

if TYPE_CHECKING:
    from stoker.training.loop import Loader, Run


@torch.no_grad()
def evaluate(model: nn.Module, loader: Loader, run: Run) -> dict[str, float]:
    """`val/loss`, `val/acc1` and `val/acc5` over all ranks' samples."""
    model = model.module if isinstance(model, DistributedDataParallel) else model
    share_buffers(model, run.ranks)
    was_training = model.training
    model.eval()
    sums = Accumulator(run.device)
    run.observer.validation_begins(loader.steps())
    for batch in loader.epoch(0):
        # Fewer samples than ranks may be left at the end; then some ranks get an empty batch.
        if len(batch):
            prepared = run.prepare_val(batch)
            with run.step.precision.autocast():
                logits = model(prepared.inputs)
                loss = run.val_loss(logits, prepared.labels)
            sums.add(logits, prepared.labels, loss)
        run.observer.validation_step()
    model.train(was_training)
    return named_scores("val", sums.result())


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
