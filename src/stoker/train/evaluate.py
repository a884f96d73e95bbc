"""Loss and scores over many batches and all ranks, and validation, which counts every sample exactly once."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from stoker.core.errors import UserError
from stoker.train.compute import Compiled
from stoker.train.launch import LeaveValidation
from stoker.train.observer import Observer
from stoker.train.ranks import any_rank
from stoker.train.step import TOP, Prepared, StepResult, count_hits

if TYPE_CHECKING:
    from stoker.train.loop import Loader, Run

ASK_EVERY = 8
"""Batches between two points at which the ranks agree whether to leave; they wait for each other there."""


class Accumulator:
    """Adds up batches without waiting for the device; ranks may add different numbers of samples, or none."""

    def __init__(self, device: torch.device | str) -> None:
        device = torch.device(device)
        # Counts up to 2^53 are exact in float64, so one tensor, and one message, carries sums and counts.
        precise = torch.float32 if device.type == "mps" else torch.float64
        self._loss = torch.zeros((), dtype=precise, device=device)
        # How often the label was at each place from the top.
        self._hits = torch.zeros(TOP, dtype=torch.int64, device=device)
        # Shapes are known on the host: counting does not involve the device.
        self._samples = 0
        self._judged = 0

    def add(self, logits: Tensor, labels: Tensor, loss: Tensor) -> None:
        """Adds a batch: logits (samples, classes), labels (samples,), the mean loss of the batch."""
        samples = len(labels)
        if samples:  # the mean over nothing is NaN
            self._loss += loss.detach().to(self._loss.dtype) * samples
        count_hits(self._hits, logits.detach(), labels)
        self._samples += samples
        self._judged += samples

    def add_step(self, result: StepResult) -> None:
        """Adds a training step, unless the device skips it: then its numbers count as zero here, and the host calls
        `take_back` once it knows."""
        self._loss.add_(result.loss.masked_fill(result.skipped, 0.0), alpha=result.samples)
        self._hits.add_(result.hits * ~result.skipped)
        self._samples += result.samples
        self._judged += result.judged

    def take_back(self, samples: int, judged: int) -> None:
        """The counts of a step that the device skipped."""
        self._samples -= samples
        self._judged -= judged

    def total(self) -> dict[str, float]:
        """The sums over all ranks, for a checkpoint. Every rank has to call it: waits for the device and the others."""
        counts = torch.tensor([self._samples, self._judged], dtype=self._loss.dtype, device=self._loss.device)
        hits = torch.stack((self._hits[0], self._hits.sum())).to(self._loss.dtype)
        sums = torch.cat((self._loss[None], hits, counts))
        if dist.is_available() and dist.is_initialized():
            dist.all_reduce(sums)
        return dict(zip(("loss", "hits1", "hits5", "samples", "judged"), sums.tolist(), strict=True))

    def reset(self) -> None:
        self._loss.zero_()
        self._hits.zero_()
        self._samples = self._judged = 0

    def restore(self, total: dict[str, float]) -> None:
        """Continues from saved sums; only one rank may, since they are those of all ranks."""
        self._loss.fill_(total["loss"])
        self._hits[0] = int(total["hits1"])
        self._hits[1] = int(total["hits5"]) - int(total["hits1"])  # the exact place is no longer known, and not needed
        self._samples, self._judged = int(total["samples"]), int(total["judged"])

    def result(self) -> dict[str, float]:
        """Mean loss, and the percentages of samples whose label had the highest score (acc1) or was among the five
        highest (acc5; with fewer classes, among all). What was not measured is left out: mixed batches have no single
        label. Every rank has to call it."""
        loss, hits1, hits5, samples, judged = self.total().values()
        found = {"loss": loss / samples} if samples else {}
        return found | ({"acc1": 100.0 * hits1 / judged, "acc5": 100.0 * hits5 / judged} if judged else {})


class Remark(NamedTuple):
    """What an epoch's metrics give reason to say."""

    event: str
    details: dict[str, Any]
    text: str
    """For people."""


class Scoring(Protocol):
    """How a task scores its validation; one for a run, used again in each epoch."""

    def reset(self) -> None:
        """Begins again with nothing."""

    def add(self, logits: Tensor, labels: Tensor, loss: Tensor, batch: Any, piece: slice) -> None:
        """Adds a piece of a batch with the mean loss of its samples, without waiting for the device. `batch` is as the
        loader made it."""

    def result(self) -> dict[str, float]:
        """The scores over all ranks, which all have to call it, by their names without `val/`."""
        ...

    def look(self, metrics: Mapping[str, Any]) -> Remark | None:
        """What an epoch's metrics give reason to say, if anything. Every rank has to call it."""


@torch.no_grad()
def evaluate(run: Run, loader: Loader, observer: Observer) -> dict[str, float]:
    """`val/loss` and the task's scores over all ranks' samples; raises LeaveValidation when asked to leave."""
    model = run.step.model.module if isinstance(run.step.model, DistributedDataParallel) else run.step.model
    for buffer in model.buffers() if run.ranks.world > 1 else ():
        dist.broadcast(buffer, src=0)  # batch norm's statistics: all ranks validate the same model
    was_training = model.training
    model.eval()
    run.scores.scoring.reset()
    observer.validation_begins(loader.steps())
    most: int | None = None
    try:
        for number, batch in enumerate(run.stop.unless_leaving(loader.epoch(0))):
            # The last batch may have fewer samples than there are ranks: some ranks then get an empty one.
            if len(batch):
                # A compiled model is compiled for one size: the first, and largest.
                if most is None and isinstance(model, Compiled):
                    most = len(batch)
                prepared = run.input.uploader.prepare(partial(run.input.prepare_val, batch))
                most = _score(model, prepared, batch, run, most)
            observer.validation_step()
            run.input.guard_memory(loader)
            # All ranks have the same number of batches, so they ask at the same ones.
            if (run.ranks.world == 1 or number % ASK_EVERY == 0) and any_rank(run.stop.wanted, run.ranks):
                raise LeaveValidation
    finally:
        model.train(was_training)
    return {f"val/{name}": value for name, value in run.scores.scoring.result().items()}


def _score(model: nn.Module, prepared: Prepared, batch: Any, run: Run, most: int | None) -> int | None:
    """Adds a batch in pieces of `most` samples, halved whenever memory runs out; returns the size that fits."""
    done = 0
    while done < len(prepared.labels):
        piece = slice(done, None if most is None else done + most)
        out_of_memory = False
        try:
            labels = prepared.labels[piece]
            with run.step.precision.autocast():
                inputs = prepared.inputs[piece]
                if isinstance(model, Compiled):
                    inputs = _padded(inputs, most or len(inputs))
                logits = model(inputs)[: len(labels)]
                loss = run.scores.val_loss(logits, labels)
            run.scores.scoring.add(logits, labels, loss, batch, piece)
            done += len(labels)
        except torch.OutOfMemoryError:
            out_of_memory = True  # handled below: in here the traceback still holds the tensors
        if out_of_memory:
            most = _smaller(most or len(prepared.labels), run)
    return most


def _padded(inputs: Tensor, samples: int) -> Tensor:
    """The inputs padded with zeros to that many samples, in the same layout: a model is compiled for each shape."""
    if len(inputs) >= samples:
        return inputs
    each = inputs[0].numel()
    padded = inputs.new_zeros(samples * each).as_strided((samples, *inputs.shape[1:]), (each, *inputs.stride()[1:]))
    padded[: len(inputs)] = inputs
    return padded


def _smaller(size: int, run: Run) -> int:
    if size == 1:
        raise UserError(
            "out-of-device-memory",
            "the device does not have enough memory to validate one sample",
            hint="smaller images or patches: val_img_size=, patch_size=",
        )
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    size = -(-size // 2)
    run.step.say(f"out of device memory: validation now runs in pieces of {size} samples")
    return size
