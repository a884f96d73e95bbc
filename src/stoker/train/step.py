"""One update of the weights from a group of batches; survives a lack of memory and a loss that is NaN or infinite."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from stoker.console import Say
from stoker.data.draws import mix_numbers
from stoker.errors import UserError
from stoker.train.compute import Precision
from stoker.train.ranks import Ranks, any_rank

# Until every shape has been used once, a rank that runs out of memory has to be noticed before the ranks wait for each
# other's gradients: the first steps average them by hand.
GUARDED_STEPS = 2


class Prepared(NamedTuple):
    """A batch on the device, as the model takes it."""

    inputs: Tensor
    targets: Tensor
    labels: Tensor
    mixed: bool


@dataclass(frozen=True)
class StepResult:
    """What one step computed; tensors stay on the device."""

    loss: Tensor
    outputs: list[tuple[Tensor, Prepared]]
    """The logits of each micro-batch, and the micro-batch."""
    skipped: bool
    """The loss or the gradient was NaN or infinite on some rank: the weights were not changed."""
    bad_here: bool = False
    """Whether this rank's loss was the cause."""


class TrainStep:
    """Forward, backward and update, in micro-batches that fit into the device's memory."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        loss: Callable[[Tensor, Tensor], Tensor],
        precision: Precision,
        ranks: Ranks,
        *,
        micro_batch: int,
        clip_grad_norm: float | None,
        seed: int,
        say: Say,
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self.loss = loss
        self.precision = precision
        self.ranks = ranks
        self.micro_batch = micro_batch
        self._clip = clip_grad_norm
        self._parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        self._seed = seed
        self.say = say
        self._guarded = GUARDED_STEPS
        self._buffers = list(model.buffers())
        self._kept_buffers = [buffer.detach().clone() for buffer in self._buffers]

    def __call__(
        self, batches: Sequence[Prepared], step: int, *, before_update: Callable[[], None] = lambda: None
    ) -> StepResult:
        """Updates the weights from all these batches together; `before_update` is called just before they change."""
        _copy(self._buffers, self._kept_buffers)
        while True:
            # A function of the step, not of what ran before: dropout is the same after a resume.
            self._seed_generators(mix_numbers(mix_numbers(self._seed, step), self.ranks.rank) >> 1)
            attempt, out_of_memory = None, False
            try:
                attempt = self._gradients(batches)
            except torch.OutOfMemoryError:
                # Handled below: in here the traceback still holds the tensors that take the memory.
                out_of_memory = True
            guarded = self._guarded > 0 or self.ranks.world == 1
            if guarded and any_rank(out_of_memory, self.ranks):
                attempt = None
                self._restore_buffers()
                self._halve()
                continue
            if out_of_memory or attempt is None:
                raise self._memory_error()
            return self._update(*attempt, before_update)

    def _seed_generators(self, seed: int) -> None:
        # Not torch.manual_seed: without a GPU in use it took 365 us where this takes 2.
        torch.default_generator.manual_seed(seed)
        if self._parameters[0].device.type == "cuda":
            torch.cuda.manual_seed(seed)

    def _gradients(self, batches: Sequence[Prepared]) -> tuple[Tensor, list[tuple[Tensor, Prepared]]]:
        self.optimizer.zero_grad(set_to_none=True)
        total = sum(len(batch.labels) for batch in batches)
        chunks = list(_chunks(batches, self.micro_batch))
        loss_sum: Tensor | None = None
        outputs = []
        for number, chunk in enumerate(chunks):
            last = number == len(chunks) - 1
            with self._no_sync(unless=last and not self._guarded), self.precision.autocast():
                logits = self.model(chunk.inputs)
                loss = self.loss(logits, chunk.targets) * (len(chunk.labels) / total)
                self.precision.scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
            outputs.append((logits.detach(), chunk))
            loss_sum = loss.detach() if loss_sum is None else loss_sum + loss.detach()
        assert loss_sum is not None
        return loss_sum, outputs

    def _update(
        self, loss: Tensor, outputs: list[tuple[Tensor, Prepared]], before_update: Callable[[], None]
    ) -> StepResult:
        if self._guarded:
            self._guarded -= 1
            self._average_gradients()
        scaler = self.precision.scaler
        if self._clip is not None:
            scaler.unscale_(self.optimizer)
        watched = loss
        if self._clip is not None:
            norm = nn.utils.clip_grad_norm_(self._parameters, self._clip)
            # The scaler handles an occasional float16 overflow; it is no reason to skip here.
            watched = loss if scaler.is_enabled() else norm
        skipped = any_rank(not bool(torch.isfinite(watched)), self.ranks)  # waits for the device
        before_update()
        if not skipped:
            scaler.step(self.optimizer)
        else:
            self._restore_buffers()
            if scaler.is_enabled() and self._clip is None:
                scaler.unscale_(self.optimizer)  # counts the infinities; scaler.update needs the count
        if scaler.is_enabled():
            scaler.update()
        return StepResult(loss, outputs, skipped, skipped and not bool(torch.isfinite(loss)))

    def _restore_buffers(self) -> None:
        """Restores batch norm's buffers, which the forward pass changed: an infinity would stay in them for good."""
        _copy(self._kept_buffers, self._buffers)

    def _average_gradients(self) -> None:
        if self.ranks.world == 1:
            return
        import torch.distributed as dist

        for parameter in self.model.parameters():
            if parameter.grad is not None:
                parameter.grad /= self.ranks.world  # before the sum, as DistributedDataParallel does
                dist.all_reduce(parameter.grad)

    def _no_sync(self, *, unless: bool) -> Any:
        if isinstance(self.model, DistributedDataParallel) and not unless:
            return self.model.no_sync()
        return nullcontext()

    def _halve(self) -> None:
        if self.micro_batch == 1:
            raise self._memory_error()
        self.micro_batch = -(-self.micro_batch // 2)
        self.optimizer.zero_grad(set_to_none=True)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        self.say(
            f"out of device memory: each batch is now computed in pieces of {self.micro_batch} samples; "
            "the update is still that of the whole batch (batch norm sees the pieces)"
        )

    def _memory_error(self) -> UserError:
        return UserError(
            "out-of-device-memory",
            f"the device does not have enough memory for {self.micro_batch} samples at a time",
            hint="img_size= lower, gradient_checkpointing=true, or a smaller model",
        )


@torch.no_grad()
def _copy(sources: list[Tensor], targets: list[Tensor]) -> None:
    if sources:
        torch._foreach_copy_(targets, sources)


def _chunks(batches: Sequence[Prepared], size: int) -> Iterator[Prepared]:
    for batch in batches:
        for start in range(0, len(batch.labels), size):
            piece = slice(start, start + size)
            yield Prepared(batch.inputs[piece], batch.targets[piece], batch.labels[piece], batch.mixed)


@dataclass(frozen=True)
class TraceableStep:
    """A training step to be traced by a plan: functions that are called only then, on a device without memory."""

    build_model: Callable[[], nn.Module]
    """On the default device, in its final memory format."""
    build_optimizer: Callable[[nn.Module], torch.optim.Optimizer]
    loss: Callable[[Any, Tensor], Tensor]
    make_batch: Callable[[int], Prepared]
    """A batch of that many samples, including the augmentation on the device."""
    batch_size: int
    precision: str = "32"
    """32, 16-mixed or bf16-mixed."""
    ema_decay: float | None = None
    accumulation: int = 1
    clip_grad_norm: float | None = None
    checkpointed: TraceableStep | None = None
    """The same step with gradient checkpointing; None if it already checkpoints, or the model cannot."""


def plain_batch(
    sample: tuple[int, ...],
    *,
    target: tuple[int, ...] = (),
    num_classes: int | None = None,
    dtype: torch.dtype = torch.float32,
    memory_format: torch.memory_format = torch.contiguous_format,
) -> Callable[[int], Prepared]:
    """A `make_batch` for data that needs no augmentation on the device.

    `sample` is the shape of one input, (3, 224, 224) or (1, 128, 128, 128); `target` that of its class numbers, () for
    one label per sample. With `num_classes` targets are soft: a float for each class.
    """

    def make(batch: int) -> Prepared:
        inputs = torch.empty((batch, *sample), dtype=dtype, memory_format=memory_format)
        labels = torch.empty(batch, dtype=torch.int64)
        targets = labels if target == () else torch.empty((batch, *target), dtype=torch.int64)
        if num_classes is not None:
            targets = torch.empty((batch, num_classes, *target))
        return Prepared(inputs, targets, labels, mixed=False)

    return make
