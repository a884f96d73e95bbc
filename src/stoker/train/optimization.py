"""Optimizers over a model's parameters, in an order that checkpoints can rely on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from stoker.train.lamb import Lamb

SETTINGS = ("weight_decay", "momentum", "nesterov", "betas")
"""What config keys set in an optimizer's groups, besides the learning rate, which is set at every step."""
# Devices with one fused kernel for all parameters; on others torch chooses.
_FUSED_DEVICES = {"cpu", "cuda"}


def build_optimizer(
    model: nn.Module,
    name: str,
    lr: float,
    *,
    momentum: float = 0.9,
    nesterov: bool = False,
    betas: tuple[float, float] = (0.9, 0.999),
    weight_decay: float = 0.0,
    decay_bias_and_norm: bool = True,
) -> torch.optim.Optimizer:
    """The optimizer called `sgd`, `adamw` or `lamb`. The model must already be on its device.

    Each of them can skip an update on the device: set `optimizer.found_inf` to a float32 tensor of no dimensions (1.0
    skips the update, 0.0 makes it) and `optimizer.grad_scale` to None before `step()`, and delete both afterwards. A
    skipped update changes no bit of parameters and state, whatever the gradients hold. SGD and AdamW can because they
    are fused; on a device other than a CPU or a CUDA GPU they are not, and torch's `step()` refuses the tensor.
    """
    groups = parameter_groups(model, weight_decay, decay_bias_and_norm)
    if name == "sgd":
        sgd = torch.optim.SGD(groups, lr=lr, momentum=momentum, nesterov=nesterov, fused=_fused(groups))
        _define_momentum(sgd)
        sgd.register_load_state_dict_post_hook(_define_momentum)
        return sgd
    if name == "adamw":
        return torch.optim.AdamW(groups, lr=lr, betas=betas, fused=_fused(groups))
    assert name == "lamb", name
    return Lamb(groups, lr, betas=betas)


def _define_momentum(sgd: torch.optim.Optimizer) -> None:
    """Gives every parameter that lacks it a momentum of zero, so that the first update is 0 x momentum + gradient.

    By itself, torch allocates momentum without a value and leaves the value to the first update. If `found_inf` skips
    that one, the second takes whatever the memory held for momentum. Also after loading: a state that was saved before
    the first update holds no momentum.
    """
    for group in sgd.param_groups:
        for parameter in group["params"] if group["momentum"] != 0 else ():
            if sgd.state[parameter].get("momentum_buffer") is None:
                sgd.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)


def parameter_groups(model: nn.Module, weight_decay: float, decay_bias_and_norm: bool) -> list[dict[str, Any]]:
    """Always two groups, weights and then biases with norms, each sorted by name; frozen parameters are left out.

    Two groups even if both decay alike, so that a checkpoint does not depend on that key. Sorted because an optimizer's
    state knows parameters only by number, and models may register their layers in any order.
    """
    trained = sorted((name, value) for name, value in model.named_parameters() if value.requires_grad)
    # All 1-D parameters are biases or scales (norms, layer scale); a weight has an input and an output dimension.
    weights = [value for _, value in trained if value.ndim > 1]
    others = [value for _, value in trained if value.ndim <= 1]
    return [
        {"params": weights, "weight_decay": weight_decay},
        {"params": others, "weight_decay": weight_decay if decay_bias_and_norm else 0.0},
    ]


def load_state(optimizer: torch.optim.Optimizer, saved: Mapping[str, Any]) -> None:
    """Continues from a saved state, with this optimizer's own settings: torch's `load_state_dict` brings back the saved
    ones, so that a weight decay that has changed since would not be applied."""
    groups = [
        dict(old) | {name: new[name] for name in SETTINGS if name in new}
        for old, new in zip(saved["param_groups"], optimizer.param_groups, strict=True)
    ]
    state = dict(saved["state"])
    for group in groups:
        if group.get("momentum") == 0:  # otherwise today's momentum would still be there if it is turned on again
            for number in group["params"]:
                state[number] = {k: v for k, v in state.get(number, {}).items() if k != "momentum_buffer"}
    optimizer.load_state_dict({"state": state, "param_groups": groups})
    for parameter, values in optimizer.state.items():
        for name, value in values.items():
            # `channels_last` may have changed since; fused kernels assume the same layout for parameter and state.
            if isinstance(value, Tensor) and value.shape == parameter.shape and value.stride() != parameter.stride():
                values[name] = torch.empty_like(parameter).copy_(value)


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Sets the learning rate of every group."""
    for group in optimizer.param_groups:
        group["lr"] = lr


def _fused(groups: list[dict[str, Any]]) -> bool | None:
    parameters = [parameter for group in groups for parameter in group["params"]]
    fits = all(value.device.type in _FUSED_DEVICES and value.is_floating_point() for value in parameters)
    return True if fits else None
