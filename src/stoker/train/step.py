"""One update of the weights from a group of batches; survives a lack of memory and gradients that are not finite.

Nothing here waits for the device. Whether an update counts is decided there, from gradients that are the same on every
rank, and the host reads the decision a step later (`StepResult.report`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from stoker.core.console import Say
from stoker.core.errors import UserError
from stoker.loader.rng import mix_numbers
from stoker.train.checkpoint.format import is_dense
from stoker.train.compute import Precision
from stoker.train.ranks import Ranks, any_rank

# Until every shape has been used once, a rank that runs out of memory has to be noticed before the ranks wait for each
# other's gradients: the first steps average them by hand.
GUARDED_STEPS = 2
TOP = 5
"""Places from the top at which a label is counted."""


class Prepared(NamedTuple):
    """A batch on the device, as the model takes it."""

    inputs: Tensor
    targets: Tensor
    labels: Tensor
    mixed: bool

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.inputs, self.targets, self.labels


class Pending(NamedTuple):
    """A batch that is prepared when its turn comes, so that of several accumulated ones only one is on the device."""

    samples: int
    prepare: Callable[[], Prepared]
    """May be called again: an attempt that runs out of memory is repeated."""


@dataclass(frozen=True)
class StepResult:
    """What one step computed; tensors stay on the device."""

    loss: Tensor
    """Mean over the samples of this rank."""
    skipped: Tensor
    """Whether a gradient was NaN or infinite on any rank: then nothing was updated. The same on every rank."""
    report: Tensor
    """For the host to read later: skipped, whether this rank's own loss was NaN or infinite (0 or 1 each), the loss."""
    hits: Tensor
    """How often the label was at each place from the top, of the samples that were not mixed."""
    samples: int
    judged: int
    """Samples behind `hits`."""


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
        self._buffers = _Buffers(model)

    def expect_new_shapes(self) -> None:
        """Images of another size follow: their first steps are watched for a lack of memory, like those of the run."""
        self._guarded = GUARDED_STEPS

    def __call__(
        self, batches: Sequence[Pending], step: int, *, before_update: Callable[[], None] = lambda: None
    ) -> StepResult:
        """Updates the weights from all these batches together; `before_update` is called just before they change."""
        self._buffers.keep()
        while True:
            # A function of the step, not of earlier random draws: dropout is the same after a resume.
            self._seed_generators(mix_numbers(mix_numbers(self._seed, step), self.ranks.rank) >> 1)
            sums, out_of_memory = None, False
            try:
                sums = self._gradients(batches)
            except torch.OutOfMemoryError:
                # Handled below: in here the traceback still holds the tensors that take the memory.
                out_of_memory = True
            guarded = self._guarded > 0 or self.ranks.world == 1
            if guarded and any_rank(out_of_memory, self.ranks):
                sums = None
                self._buffers.restore()
                self._halve()
                continue
            if out_of_memory or sums is None:
                raise self._memory_error()
            return self._update(sums, before_update)

    def _seed_generators(self, seed: int) -> None:
        # Not torch.manual_seed: without a GPU in use it took 365 us where this takes 2.
        torch.default_generator.manual_seed(seed)
        if self._parameters[0].device.type == "cuda":
            torch.cuda.manual_seed(seed)

    def _gradients(self, batches: Sequence[Pending]) -> _StepSums:
        total = sum(batch.samples for batch in batches)
        pieces = sum(-(-batch.samples // self.micro_batch) for batch in batches)
        # Several pieces add to gradients that already exist: with CUDA graphs, gradients made by the first piece would
        # be in the graph's own memory, which the second piece overwrites.
        self.optimizer.zero_grad(set_to_none=pieces == 1)
        if pieces > 1:
            for parameter in self._parameters:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
        sums, done = _StepSums(self._parameters[0].device), 0
        for batch in batches:
            for piece in _pieces(batch.prepare(), self.micro_batch):
                done += 1
                self._add_piece(piece, len(piece.labels) / total, sums, last=done == pieces)
            del piece  # before the next batch is prepared, not after
        return sums

    def _add_piece(self, piece: Prepared, share: float, sums: _StepSums, *, last: bool) -> None:
        """Adds the gradients of one piece. Nothing of its forward pass is alive afterwards: with CUDA graphs, the next
        forward pass overwrites it."""
        model: Any = self.model
        apart = isinstance(model, DistributedDataParallel) and (self._guarded or not last)
        with model.no_sync() if apart else nullcontext():
            with self.precision.autocast():
                logits = self.model(piece.inputs)
                loss = self.loss(logits, piece.targets) * share
            sums.add(loss, logits, piece)
            # 1, or NaN if the loss is not finite: a loss can be infinite and have finite gradients. Through the
            # gradients, which are added up over all ranks, every rank learns of it without a message.
            weight = (loss.detach() * 0).add_(1)
            self.precision.scaler.scale(loss).backward(weight)  # type: ignore[no-untyped-call]

    def _update(self, sums: _StepSums, before_update: Callable[[], None]) -> StepResult:
        if self._guarded:
            self._guarded -= 1
            self._average_gradients()
        scaler, optimizer = self.precision.scaler, self.optimizer
        gradients = [parameter.grad for parameter in self._parameters if parameter.grad is not None]
        norm: Tensor | None = None
        if scaler.is_enabled():
            scaler.unscale_(optimizer)
            found = next(iter(scaler._found_inf_per_device(optimizer).values())).reshape(())
        if self._clip is not None or not scaler.is_enabled():
            norm = nn.utils.get_total_norm(gradients)
        if not scaler.is_enabled():
            assert norm is not None
            found = (norm * 0).ne(0).to(torch.float32)  # 0 times a finite number is 0, anything else is NaN
        if self._clip is not None:
            assert norm is not None
            nn.utils.clip_grads_with_norm_(self._parameters, self._clip, norm)
        before_update()
        self._step_unless(found)
        skipped = found > 0
        self._buffers.restore_if(skipped)
        if scaler.is_enabled():
            scaler.update()
        bad_here = (sums.loss * 0).ne(0)
        report = torch.stack((found, bad_here.to(torch.float32), sums.loss))
        return StepResult(sums.loss, skipped, report, sums.hits, sums.samples, sums.judged)

    def _step_unless(self, found: Tensor) -> None:
        """The optimizer's step, unless `found` is 1: a fused optimizer decides that on the device."""
        optimizer: Any = self.optimizer
        if not getattr(optimizer, "_step_supports_amp_scaling", False):
            # Reached only on devices without a fused optimizer.
            if bool(found < 1):  # waits for the device
                optimizer.step()
            return
        optimizer.grad_scale, optimizer.found_inf = None, found
        try:
            optimizer.step()
        finally:
            del optimizer.grad_scale, optimizer.found_inf

    def _average_gradients(self) -> None:
        if self.ranks.world == 1:
            return
        import torch.distributed as dist

        gradients = [parameter.grad for parameter in self.model.parameters() if parameter.grad is not None]
        torch._foreach_div_(gradients, self.ranks.world)  # before the sum, as DistributedDataParallel does
        flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
        dist.all_reduce(flat)
        parts = torch.split(flat, [gradient.numel() for gradient in gradients])
        for gradient, part in zip(gradients, parts, strict=True):
            gradient.copy_(part.view(gradient.shape))

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
            hint="smaller images or patches (img_size=, patch_size=), gradient_checkpointing=true, or a smaller model",
        )


class _StepSums:
    """Loss and hits of a step's pieces."""

    def __init__(self, device: torch.device) -> None:
        self.loss = torch.zeros((), device=device)
        self.hits = torch.zeros(TOP, dtype=torch.int64, device=device)
        self.samples = self.judged = 0

    def add(self, loss: Tensor, logits: Tensor, piece: Prepared) -> None:
        self.loss += loss.detach()
        self.samples += len(piece.labels)
        # A mixed image has no single correct label, and a label map has one for each voxel.
        if not piece.mixed and isinstance(logits, Tensor) and logits.ndim == 2:
            count_hits(self.hits, logits.detach(), piece.labels)
            self.judged += len(piece.labels)


def count_hits(hits: Tensor, logits: Tensor, labels: Tensor) -> None:
    """Adds how often the label was at each place from the top; with fewer classes than places, the rest stays."""
    best = logits.topk(min(TOP, logits.shape[1]), dim=1).indices
    hits[: best.shape[1]] += (best == labels[:, None]).sum(0)


class _Buffers:
    """The buffers of a model, such as batch norm's statistics, as they were before a step: the forward pass changes
    them, and an infinity would stay in them for good. Three kernels for each dtype, whatever their number."""

    def __init__(self, model: nn.Module) -> None:
        by_dtype: dict[torch.dtype, list[Tensor]] = {}
        for buffer in model.buffers():
            if buffer.numel() and is_dense(buffer.shape, buffer.stride()):  # others are views that no layer writes to
                in_memory_order = buffer.detach().as_strided((buffer.numel(),), (1,))
                by_dtype.setdefault(buffer.dtype, []).append(in_memory_order)
        self._groups: list[tuple[list[Tensor], Tensor, Tensor, tuple[Tensor, ...]]] = []
        for flat in by_dtype.values():
            kept = torch.cat(flat)
            chosen = torch.empty_like(kept)
            self._groups.append((flat, kept, chosen, torch.split(chosen, [len(buffer) for buffer in flat])))

    @torch.no_grad()
    def keep(self) -> None:
        for flat, kept, _, _ in self._groups:
            torch.cat(flat, out=kept)

    @torch.no_grad()
    def restore_if(self, skipped: Tensor) -> None:
        """Puts the kept values back, if `skipped` is true on the device."""
        for flat, kept, chosen, parts in self._groups:
            torch.cat(flat, out=chosen)
            torch.where(skipped, kept, chosen, out=chosen)
            torch._foreach_copy_(flat, parts)

    @torch.no_grad()
    def restore(self) -> None:
        for flat, kept, _, _ in self._groups:
            torch._foreach_copy_(flat, torch.split(kept, [len(buffer) for buffer in flat]))


def _pieces(batch: Prepared, size: int) -> Iterator[Prepared]:
    for start in range(0, len(batch.labels), size):
        part = slice(start, start + size)
        yield Prepared(batch.inputs[part], batch.targets[part], batch.labels[part], batch.mixed)


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
    ahead: bool = True
    """Whether the next batch is on the device while one is computed: not where the device is the CPU."""
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
