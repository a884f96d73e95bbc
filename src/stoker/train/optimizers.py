"""Optimizers over a model's parameters, in an order that checkpoints can rely on; and LAMB, which torch lacks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from stoker.config import Config
from stoker.train.checkpoint.format import contiguous_strides, is_dense

SETTINGS = ("weight_decay", "momentum", "nesterov", "betas")
"""What config keys set in an optimizer's groups, besides the learning rate, which is set at every step."""
# Devices with one fused kernel for all parameters; on others torch chooses.
_FUSED_DEVICES = {"cpu", "cuda"}


def build_optimizer(config: Config, model: nn.Module, lr: float) -> torch.optim.Optimizer:
    """The optimizer that the config describes. The model must already be on its device.

    Each of them can skip an update on the device: set `optimizer.found_inf` to a float32 tensor of no dimensions (1.0
    skips the update, 0.0 makes it) and `optimizer.grad_scale` to None before `step()`, and delete both afterwards. A
    skipped update changes no bit of parameters and state, whatever the gradients hold. SGD and AdamW can because they
    are fused; on a device other than a CPU or a CUDA GPU they are not, and torch's `step()` refuses the tensor.
    """
    groups = parameter_groups(model, config.weight_decay, config.decay_bias_and_norm)
    if config.optimizer == "sgd":
        sgd = torch.optim.SGD(groups, lr=lr, momentum=config.momentum, nesterov=config.nesterov, fused=_fused(groups))
        _define_momentum(sgd)
        sgd.register_load_state_dict_post_hook(_define_momentum)
        return sgd
    if config.optimizer == "adamw":
        return torch.optim.AdamW(groups, lr=lr, betas=config.betas, fused=_fused(groups))
    return Lamb(groups, lr, betas=config.betas)


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
    for group in optimizer.param_groups:
        group["lr"] = lr


def _fused(groups: list[dict[str, Any]]) -> bool | None:
    parameters = [parameter for group in groups for parameter in group["params"]]
    fits = all(value.device.type in _FUSED_DEVICES and value.is_floating_point() for value in parameters)
    return True if fits else None


# Each parameter begins at a multiple of this many numbers in the flat buffers, so that its trust ratio can be spread
# over whole rows: the index that does it has one entry for a row, not one for each number. It also aligns the views, as
# vectorised kernels require.
ROW = 256
# The fields that timm's Lamb keeps in its groups, with the values that describe what this class computes: each of the
# two can load the other's state.
_TIMMS_OPTIONS = {
    "bias_correction": True, "grad_averaging": True, "max_grad_norm": None, "trust_clip": False,
    "always_adapt": False, "caution": False, "decoupled_decay": False, "corrected_weight_decay": False,
}  # fmt: skip


class _Group(NamedTuple):
    """The parameters of one group that have gradients, in the order of the flat buffers."""

    options: dict[str, Any]
    parameters: list[Tensor]
    updates: list[Tensor]
    """Views of the scratch buffer, one for each parameter."""


class _Layout(NamedTuple):
    """Flat buffers for the parameters that have gradients; those that decay come first."""

    parameters: list[Tensor]
    groups: list[_Group]
    decays: list[bool]
    """Whether each group has weight decay."""
    exp_avg: Tensor
    exp_avg_sq: Tensor
    scratch: Tensor
    """Gradients go in, updates come out."""
    views: list[Tensor]
    """Views of the scratch buffer, one for each parameter, in all groups."""
    decayed: list[Tensor]
    decayed_updates: list[Tensor]
    decayed_rows: Tensor
    """The beginning of the scratch buffer, in rows."""
    owner: Tensor
    """Which of `decayed` each of these rows belongs to."""


class Lamb(torch.optim.Optimizer):
    """Layer-wise adaptive moments (arXiv 1904.00962), with weight decay as part of the update, in a few dozen kernels
    for any number of parameters, and without ever waiting for the device.

    The numbers are those of timm's Lamb without its own clipping. timm issues about 14 operators for each parameter,
    2,210 an update for ResNet-50, most of them so small that launching them takes longer than computing. Here there are
    44: the moments of all parameters lie in two flat buffers, so that arithmetic is one operator over everything. What
    needs each parameter by itself, such as norms, goes through `_foreach_` calls over views into the buffers. A view
    has its parameter's own strides: lists that agree in shapes, strides and types run in a few kernels, and others in
    one for each tensor.

    As in timm, only parameters of groups with weight decay get a trust ratio; the others are updated as by Adam.
    Takes `found_inf` and `grad_scale` as torch's fused optimizers do: tensors on the device. Where `found_inf` is not
    0, neither parameters nor state change by a single bit. Parameters without a gradient, and their state, stay as
    they are. All parameters must have one type and be on one device.

    Memory: 12 bytes for each parameter, of which 8 are state; 4 are scratch, for gradients and then updates.
    """

    # Read by torch's GradScaler: it then passes its tensors instead of reading them.
    _step_supports_amp_scaling = True
    found_inf: Tensor
    grad_scale: Tensor | None

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
    ) -> None:
        options = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, **_TIMMS_OPTIONS}
        super().__init__(params, options)
        first = self.param_groups[0]
        parameters = list(chain.from_iterable(group["params"] for group in self.param_groups))
        assert len({(parameter.dtype, parameter.device) for parameter in parameters}) == 1
        assert all((group["betas"], group["eps"]) == (first["betas"], first["eps"]) for group in self.param_groups)
        # As timm, a count for each group; on the device, because a skipped update is not counted.
        for group in self.param_groups:
            group["step"] = torch.zeros((), dtype=torch.float32, device=parameters[0].device)
        self._layout: _Layout | None = None
        self._lay_out(set(parameters))

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Called for loaded states and copies: takes their tensors into the flat buffers."""
        super().__setstate__(state)
        parameters = list(chain.from_iterable(group["params"] for group in self.param_groups))
        for group in self.param_groups:  # timm's state has none before the first update, and counts on the CPU
            step = torch.as_tensor(group.get("step", 0.0), dtype=torch.float32)
            group["step"] = step.to(parameters[0].device)
        self._layout = None
        self._lay_out(set(parameters))

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        assert closure is None
        found_inf = getattr(self, "found_inf", None)
        step = self.param_groups[0]["step"]
        skip = torch.zeros_like(step, dtype=torch.bool) if found_inf is None else found_inf != 0
        for group in self.param_groups:
            group["step"].add_(~skip)
        every = chain.from_iterable(group["params"] for group in self.param_groups)
        layout = self._lay_out({parameter for parameter in every if parameter.grad is not None})
        if layout is None:
            return
        beta1, beta2 = self.param_groups[0]["betas"]
        keep1, keep2, root_factor, root_term = self._factors(skip)

        values, exp_avg, exp_avg_sq = layout.scratch, layout.exp_avg, layout.exp_avg_sq
        torch._foreach_copy_(layout.views, [value.grad for value in layout.parameters if value.grad is not None])
        if (scale := getattr(self, "grad_scale", None)) is not None:
            values.div_(scale)
        # Not a product with 0, which NaN and infinities survive; -0.0 because x + -0.0 is x for every x, also for -0.0.
        values.masked_fill_(skip, -0.0)
        exp_avg.mul_(keep1).add_(values, alpha=1 - beta1)
        exp_avg_sq.mul_(keep2).addcmul_(values, values, value=1 - beta2)
        torch.sqrt(exp_avg_sq, out=values)
        torch.div(exp_avg, values.mul_(root_factor).add_(root_term), out=values)
        if layout.decayed:
            _decay_and_trust(layout)
        values.masked_fill_(skip, 0.0)
        for part in layout.groups:
            torch._foreach_add_(part.parameters, part.updates, alpha=-part.options["lr"])

    def _factors(self, skip: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """How much the moments keep (1 if the update is skipped), and the factors of the second moment's denominator.

        The update is m / c1 / (sqrt(v / c2) + eps) with the corrections c = 1 - beta^step; the latter two contain c1,
        so that the division by it takes no operator over all parameters.
        """
        betas, eps, step = (self.param_groups[0][name] for name in ("betas", "eps", "step"))
        keep1, keep2 = (torch.full_like(step, beta).masked_fill_(skip, 1.0) for beta in betas)
        # expm1, because 1 - 0.999 in float32 is wrong in its fifth digit.
        correction1, correction2 = (
            torch.expm1(step * (math.log(beta) if beta > 0 else -math.inf)).neg_() for beta in betas
        )
        return keep1, keep2, correction1 * torch.rsqrt(correction2), correction1 * eps

    def _lay_out(self, wanted: set[Tensor]) -> _Layout | None:
        """The layout for the wanted parameters; built anew only if they are not those of the last step."""
        groups = [
            (group, [parameter for parameter in group["params"] if parameter in wanted])
            for group in sorted(self.param_groups, key=lambda group: group["weight_decay"] == 0)
        ]
        decays = [group["weight_decay"] != 0 for group, _ in groups]
        old = self._layout
        if old is not None and old.decays == decays and set(old.parameters) == wanted:
            return old
        if old is not None:
            # Otherwise the view of a parameter that drops out would keep the whole old buffer alive.
            for parameter in old.parameters:
                self.state[parameter] = {name: value.clone() for name, value in self.state[parameter].items()}
        self._layout = self._new_layout(groups, decays) if wanted else None
        return self._layout

    def _new_layout(self, groups: list[tuple[dict[str, Any], list[Tensor]]], decays: list[bool]) -> _Layout:
        parameters = list(chain.from_iterable(members for _, members in groups))
        rows = [-(-parameter.numel() // ROW) for parameter in parameters]
        like, size = parameters[0], sum(rows) * ROW
        exp_avg, exp_avg_sq, scratch = (torch.zeros(size, dtype=like.dtype, device=like.device) for _ in range(3))
        begin, views = 0, []
        for parameter, count in zip(parameters, rows, strict=True):
            dense = is_dense(parameter.shape, parameter.stride())
            strides = parameter.stride() if dense else contiguous_strides(parameter.shape)
            for name, flat in (("exp_avg", exp_avg), ("exp_avg_sq", exp_avg_sq)):
                view = flat.as_strided(parameter.shape, strides, begin)
                if name in self.state[parameter]:
                    view.copy_(self.state[parameter][name])
                self.state[parameter][name] = view
            views.append(scratch.as_strided(parameter.shape, strides, begin))
            begin += count * ROW
        made, position = [], 0
        for options, members in groups:
            if members:
                made.append(_Group(options, members, views[position : position + len(members)]))
                position += len(members)
        many = sum(len(members) for (_, members), decay in zip(groups, decays, strict=True) if decay)
        counts = torch.tensor(rows[:many], dtype=torch.int64)
        owner = torch.arange(many).repeat_interleave(counts, output_size=sum(rows[:many]))
        return _Layout(
            parameters=parameters, groups=made, decays=decays, exp_avg=exp_avg, exp_avg_sq=exp_avg_sq, scratch=scratch,
            views=views, decayed=parameters[:many], decayed_updates=views[:many],
            decayed_rows=scratch.view(-1, ROW)[: sum(rows[:many])], owner=owner.to(like.device),
        )  # fmt: skip


def _decay_and_trust(layout: _Layout) -> None:
    """Adds the weight decay to the updates, and scales each to the norm of its parameter, where neither norm is 0."""
    for group in layout.groups:
        if group.options["weight_decay"] != 0:
            torch._foreach_add_(group.updates, group.parameters, alpha=group.options["weight_decay"])
    weight_norm = torch.stack(torch._foreach_norm(layout.decayed))
    update_norm = torch.stack(torch._foreach_norm(layout.decayed_updates))
    ratio = (weight_norm / update_norm).masked_fill_(torch.minimum(weight_norm, update_norm) <= 0, 1.0)
    layout.decayed_rows.mul_(ratio.index_select(0, layout.owner).unsqueeze_(1))
