"""A bound on a step's memory for models that cannot be traced: what one real forward pass keeps for the backward."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from stoker.training.ema import WeightAverage
from stoker.training.traceable import TraceableStep

# Batch norm refuses to train on a single value; half of what two samples keep is what one keeps.
SAMPLES = 2
# An optimizer's state: two float32 averages (AdamW, LAMB); SGD's momentum is one.
STATES = 2
# Gradients of the two largest tensors are alive beside them when the backward pass begins.
LARGEST_TEMPORARIES = 2
# Rounding and gaps: the traces of results/vram reserve up to a fifth more than they use.
FRAGMENTATION = 0.2


@dataclass(frozen=True)
class Bound:
    """Bytes that do not depend on the batch, and those of one sample."""

    parameter_bytes: int
    trained_bytes: int
    ema_bytes: int
    kept_bytes: int
    """For the backward pass, by one sample, in float32."""
    largest_bytes: int
    input_bytes: int
    accumulation: int
    how: str

    def parts(self, batch: int) -> dict[str, int]:
        """By the names of a budget, for so many samples."""
        found = {
            "parameters": self.parameter_bytes,
            "gradients": self.trained_bytes,
            "optimizer": STATES * self.trained_bytes,
            "ema": self.ema_bytes,
            "activations": batch * self.kept_bytes,
            "temporary": LARGEST_TEMPORARIES * batch * self.largest_bytes,
            "batch": 2 * batch * self.input_bytes * self.accumulation,
        }
        return found | {"fragmentation": int(FRAGMENTATION * sum(found.values()))}


def bound_without_trace(step: TraceableStep) -> Bound:
    """Runs the real model forward on two samples, on the CPU and in float32: an upper bound for mixed precision."""
    with torch.random.fork_rng(devices=[]):
        model = step.build_model()
        model.train()
        inputs = step.make_batch(SAMPLES).inputs
        kept = _kept_for_backward(model, inputs)
    parameters = list(model.parameters())
    everything = [*parameters, *model.buffers()]
    average = WeightAverage(model, step.ema_decay).tensors.values() if step.ema_decay is not None else ()
    own = {tensor.untyped_storage()._cdata for tensor in everything}
    activations = {key: size for key, size in kept.items() if key not in own}
    return Bound(
        parameter_bytes=_bytes(everything),
        trained_bytes=_bytes([parameter for parameter in parameters if parameter.requires_grad]),
        ema_bytes=_bytes(list(average)),
        kept_bytes=-(-sum(activations.values()) // SAMPLES),
        largest_bytes=-(-max(activations.values(), default=0) // SAMPLES),
        input_bytes=-(-inputs.untyped_storage().nbytes() // SAMPLES),
        accumulation=step.accumulation,
        how="what a real forward pass of two samples keeps in float32, in proportion, and a fifth for gaps",
    )


def _kept_for_backward(model: nn.Module, inputs: Tensor) -> dict[int, int]:
    """Bytes of each piece of memory that autograd holds on to."""
    found: dict[int, int] = {}
    alive: list[Tensor] = []  # so that no number is given out twice

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        found[storage._cdata] = storage.nbytes()
        alive.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(inputs)
    return found


def _bytes(tensors: list[Tensor]) -> int:
    return sum({tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in tensors}.values())
