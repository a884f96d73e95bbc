"""FLOPs that one image costs in training, counted on tensors without data: about a second on any machine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from stoker.attach.operators import CORRECTED_FORMULAS


def training_flops_per_image(model: nn.Module, size: int, *, channels: int = 3) -> int | None:
    """FLOPs of forward and backward for one image of `size` x `size` pixels; a multiply and an add count as two.

    What gradient checkpointing computes twice is counted once: utilisation is about useful work. None where the model
    cannot run on tensors without data. Leaves the model, its statistics and torch's generator unchanged.
    """
    # Two images, because batch norm refuses one value per channel (1 x 1 maps at the end of a small network).
    batch = 2
    state: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        state[name] = torch.empty_like(parameter, device="meta").requires_grad_(parameter.requires_grad)
    for name, buffer in model.named_buffers():
        state[name] = torch.empty_like(buffer, device="meta")
    inputs = torch.empty(batch, channels, size, size, device="meta")
    counter = FlopCounterMode(display=False, custom_mapping=dict(CORRECTED_FORMULAS))
    was_training = model.training
    try:
        with _without_checkpointing(model), torch.random.fork_rng(devices=[]), counter:
            model.train()
            outputs = torch.func.functional_call(model, state, (inputs,))
            tensors = [leaf for leaf in torch.utils._pytree.tree_leaves(outputs) if isinstance(leaf, Tensor)]
            total = sum(tensor.sum() for tensor in tensors)
            assert isinstance(total, Tensor), "a model returns tensors"
            total.backward()  # type: ignore[no-untyped-call]
    except Exception:  # a model may need values for anything: then its FLOPs are unknown, which costs nothing else
        return None
    finally:
        model.train(was_training)
    return counter.get_total_flops() // batch or None


@contextmanager
def _without_checkpointing(model: nn.Module) -> Iterator[None]:
    checkpointed = any(getattr(part, "grad_checkpointing", False) is True for part in model.modules())
    if checkpointed:
        model.set_grad_checkpointing(False)  # type: ignore[operator]
    try:
        yield
    finally:
        if checkpointed:
            with suppress(Exception):
                model.set_grad_checkpointing(True)  # type: ignore[operator]
