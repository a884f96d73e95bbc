"""A model without memory: the real module tree, its tensors only shapes."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from stoker.errors import StokerError


def build_without_memory(build_model: Callable[[], nn.Module]) -> nn.Module:
    """The model on the meta device; on the CPU, with its weights, where its constructor reads values.

    Not built under the fake mode: a fake parameter cannot change its memory format (torch refuses to swap it).
    """
    try:
        with torch.device("meta"):
            return build_model()
    except StokerError:
        raise
    except Exception:
        return build_model()


def make_fake(model: nn.Module) -> None:
    """Replaces parameters and buffers by tensors of the fake mode that is active; shared ones stay shared."""
    # With the original, which has to live as long as its number stands for it.
    made: dict[int, tuple[Tensor, Tensor]] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                if id(parameter) not in made:
                    fake = nn.Parameter(_empty_like(parameter), requires_grad=parameter.requires_grad)
                    made[id(parameter)] = parameter, fake
                module._parameters[name] = made[id(parameter)][1]  # type: ignore[assignment]
        for name, buffer in module._buffers.items():
            if buffer is not None:
                if id(buffer) not in made:
                    made[id(buffer)] = buffer, _empty_like(buffer)
                module._buffers[name] = made[id(buffer)][1]


def _empty_like(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="cpu")
