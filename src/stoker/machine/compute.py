"""Arithmetic: the FLOPs that an image costs in training, and what this machine's CPU can do."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from stoker.machine.accelerators import Datasheet, Format
from stoker.machine.host import usable_ram_bytes

# FLOPs that one image costs in training: counted on tensors without data, in about a second, on any machine.

aten = torch.ops.aten


def convolution_backward_flops(grad_output: Any, inputs: Any, weight: Any, *arguments: Any, **_named: Any) -> int:
    """FLOPs of `aten.convolution_backward` from its arguments (tensors or shapes): each gradient costs a forward.

    torch's own formula counts the gradient of a grouped convolution's weight `groups` times over, which makes
    EfficientNet-B0 fourteen times as expensive as it is (torch 2.15).
    """
    # After the three tensors: bias_sizes, stride, padding, dilation, transposed, output_padding, groups, output_mask.
    transposed, wanted = arguments[4], arguments[7]
    shape = _shape(inputs)
    positions = shape if transposed else _shape(grad_output)
    forward = 2 * shape[0] * prod(positions[2:]) * prod(_shape(weight))
    return forward * sum(map(bool, wanted[:2]))


FORMULAS: Mapping[Any, Callable[..., int]] = {aten.convolution_backward: convolution_backward_flops}
"""What torch.utils.flop_counter gets wrong, put right."""


def training_flops_per_image(model: nn.Module, size: int, *, channels: int = 3) -> int | None:
    """Forward and backward of one image of `size` x `size` pixels; a multiply and an add are two.

    What gradient checkpointing computes twice is counted once: utilisation is of useful work. None where the model
    cannot be run on tensors without data. Leaves the model, its statistics and torch's generator as they were.
    """
    # Two images, because batch norm refuses one value per channel (1 x 1 maps at the end of a small network).
    batch = 2
    state: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        state[name] = torch.empty_like(parameter, device="meta").requires_grad_(parameter.requires_grad)
    for name, buffer in model.named_buffers():
        state[name] = torch.empty_like(buffer, device="meta")
    inputs = torch.empty(batch, channels, size, size, device="meta")
    counter = FlopCounterMode(display=False, custom_mapping=dict(FORMULAS))
    was_training = model.training
    try:
        with _without_checkpointing(model), torch.random.fork_rng(devices=[]), counter:
            model.train()
            outputs = torch.func.functional_call(model, state, (inputs,))
            _sum(outputs).backward()  # type: ignore[no-untyped-call]
    except Exception:  # whatever a model does that needs values: then its FLOPs are not known, and nothing else is lost
        return None
    finally:
        model.train(was_training)
    return counter.get_total_flops() // batch or None


def _shape(value: Any) -> tuple[int, ...]:
    return tuple(value.shape) if isinstance(value, Tensor) else tuple(value)


def _sum(outputs: Any) -> Tensor:
    tensors = [leaf for leaf in torch.utils._pytree.tree_leaves(outputs) if isinstance(leaf, Tensor)]
    total = sum(tensor.sum() for tensor in tensors)
    assert isinstance(total, Tensor), "a model gives tensors"
    return total


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


# What this machine's CPU can do, measured in about a second: products by number format, and memory bandwidth.

NAME = "this machine's CPU"
# Long enough for products to reach their rate. Many CPUs have no instructions for the half formats, and are fifty times
# slower in them (0.4 GFLOP/s beside 21 on one of 2018): those get a product that is done in a tenth of a second.
SIDES: dict[Format, int] = {"fp32": 768, "fp16": 256, "bf16": 256}
# Beyond the caches of all but the largest servers.
COPIED_BYTES = 128 * 1024**2
SECONDS_EACH = 0.2
_DTYPES: dict[Format, torch.dtype] = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def measure_cpu(seconds_each: float = SECONDS_EACH) -> Datasheet:
    """A datasheet of the cores that torch uses now; others that work at the same time make it smaller."""
    peaks = {name: _product_rate(dtype, SIDES[name], seconds_each) for name, dtype in _DTYPES.items()}
    bandwidth = _copy_rate(seconds_each)
    return Datasheet(
        name=NAME,
        title=f"{NAME} ({torch.get_num_threads()} threads)",
        vram_bytes=usable_ram_bytes(),
        memory_bytes_per_second=bandwidth,
        peak_flops=peaks,
        pcie_bytes_per_second=bandwidth,  # nothing is sent anywhere: a copy in memory
        source="measured here",
        is_cpu=True,
    )


def _product_rate(dtype: torch.dtype, side: int, seconds: float) -> float:
    left, right = torch.rand(side, side).to(dtype), torch.rand(side, side).to(dtype)
    return 2 * side**3 / _best_of(lambda: torch.mm(left, right), seconds)


def _copy_rate(seconds: float) -> float:
    source = torch.ones(COPIED_BYTES // 4)
    target = torch.empty_like(source)
    # Read once and written once.
    return 2 * COPIED_BYTES / _best_of(lambda: target.copy_(source), seconds)


def _best_of(run: Callable[[], object], seconds: float) -> float:
    """The shortest time: others on the machine only ever make it longer."""
    run()  # pages, caches and threads are there after it
    best, ends = float("inf"), time.perf_counter() + seconds
    while True:
        began = time.perf_counter()
        run()
        now = time.perf_counter()
        best = min(best, now - began)
        if now >= ends:
            return best
