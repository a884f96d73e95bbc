"""Validation: every sample counted exactly once, for any number of ranks and any batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from stoker.errors import UserError
from stoker.train.launch import LeaveValidation
from stoker.train.ranks import Ranks, any_rank
from stoker.train.step import Prepared

if TYPE_CHECKING:
    from stoker.train.loop import Loader, Run


# Loss and accuracy over many batches and all ranks: sums stay on the device until they are asked for.

TOP = 5


@dataclass(frozen=True)
class Scores:
    """Means over every sample that was added, on all ranks; None where there was none."""

    loss: float | None
    acc1: float | None
    """Percent of the samples whose label had the highest score."""
    acc5: float | None
    """Percent of the samples whose label was among the five highest scores; with fewer classes, among all."""
    samples: int
    """Samples behind `loss`."""
    judged: int
    """Samples behind the accuracies: fewer where batches were mixed, and have no one label."""


class Accumulator:
    """Adds up batches without waiting for the device; ranks may add different numbers of samples, or none."""

    def __init__(self, device: torch.device | str) -> None:
        device = torch.device(device)
        # Counts up to 2^53 are exact in float64, so one tensor, and one message, carries sums and counts.
        precise = torch.float32 if device.type == "mps" else torch.float64
        self._loss = torch.zeros((), dtype=precise, device=device)
        # How often the label stood at each place from the top.
        self._hits = torch.zeros(TOP, dtype=torch.int64, device=device)
        # Shapes are known on the host: counting needs no device.
        self._samples = 0
        self._judged = 0

    def add(self, logits: Tensor, labels: Tensor, loss: Tensor) -> None:
        """Adds a batch: logits (samples, classes), labels (samples,), the mean loss of the batch."""
        self.add_loss(loss, len(labels))
        self.add_hits(logits, labels)

    def add_loss(self, loss: Tensor, samples: int) -> None:
        """Adds the mean loss over so many samples; alone, for batches whose labels were mixed."""
        if samples:  # the mean over nothing is no number
            self._loss += loss.detach().to(self._loss.dtype) * samples
            self._samples += samples

    def add_hits(self, logits: Tensor, labels: Tensor) -> None:
        """Adds whose labels were among the highest scores."""
        best = logits.detach().topk(min(TOP, logits.shape[1]), dim=1).indices
        self._hits[: best.shape[1]] += (best == labels[:, None]).sum(0)
        self._judged += len(labels)

    def total(self) -> dict[str, float]:
        """The sums over all ranks, for a checkpoint. Every rank has to call it: they wait for the device and each
        other."""
        counts = torch.tensor([self._samples, self._judged], dtype=self._loss.dtype, device=self._loss.device)
        hits = torch.stack((self._hits[0], self._hits.sum())).to(self._loss.dtype)
        sums = torch.cat((self._loss[None], hits, counts))
        if dist.is_available() and dist.is_initialized():
            dist.all_reduce(sums)
        return dict(zip(("loss", "hits1", "hits5", "samples", "judged"), sums.tolist(), strict=True))

    def restore(self, total: dict[str, float] | None) -> None:
        """Goes on from saved sums; they belong to one rank, the others begin with nothing."""
        if total is None:
            return
        self._loss.fill_(total["loss"])
        self._hits[0] = int(total["hits1"])
        self._hits[1] = int(total["hits5"]) - int(total["hits1"])  # where exactly is no longer known, nor asked
        self._samples, self._judged = int(total["samples"]), int(total["judged"])

    def result(self) -> Scores:
        """The means. Every rank has to call it."""
        loss, hits1, hits5, samples, judged = self.total().values()
        return Scores(
            loss=loss / samples if samples else None,
            acc1=100.0 * hits1 / judged if judged else None,
            acc5=100.0 * hits5 / judged if judged else None,
            samples=int(samples),
            judged=int(judged),
        )


# Validation: every sample counted exactly once, for any number of ranks and any batch.

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
