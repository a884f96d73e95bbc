"""A moving average of a model's weights and buffers (EMA), for evaluation."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from stoker.errors import UserError

# timm's decay warmup (ModelEmaV3, use_warmup) with gamma 10 and power 1: until `decay` is reached (0.999 after 10,000
# updates), the average spans about a tenth of the run so far. With timm's default power of 2/3, the 0.99998 of
# torchvision's recipe would be reached after 11 million updates, fifteen times its whole run; with power 1, after two
# thirds of it.
WARMUP_GAMMA = 10


def decay_after(updates: int, decay: float, warmup: bool) -> float:
    """The decay of the next update. With warmup it begins at 0, so the random initial weights leave no trace."""
    return min(decay, updates / (WARMUP_GAMMA + updates)) if warmup else decay


class WeightAverage:
    """The average of a model's parameters and persistent buffers (integers, such as batch counts, are copied).

    Build it from the bare model (no DDP, not compiled), once that is on its device and its batch norm is converted:
    it keeps references to the model's tensors, so that an update need not look them up.
    """

    def __init__(self, model: nn.Module, decay: float, *, warmup: bool = True) -> None:
        self.decay = decay
        self.warmup = warmup
        self.updates = 0
        self._model = _averaged_tensors(model)
        self.tensors = {name: value.detach().clone() for name, value in self._model.items()}
        floats = [name for name, value in self.tensors.items() if value.is_floating_point()]
        self._floats = [self.tensors[name] for name in floats]
        self._model_floats = [self._model[name] for name in floats]
        self._counts = [(self.tensors[name], self._model[name]) for name in self.tensors if name not in set(floats)]

    @torch.no_grad()
    def update(self) -> None:
        """Moves the average towards the model's current weights; call it after each optimizer step."""
        weight = 1.0 - decay_after(self.updates, self.decay, self.warmup)
        # One kernel for all tensors; a loop over ResNet-50's 267 would launch as many.
        torch._foreach_lerp_(self._floats, self._model_floats, weight)
        for average, value in self._counts:
            average.copy_(value)
        self.updates += 1

    @contextmanager
    def swapped(self) -> Iterator[None]:
        """Inside the block the model holds the average; afterwards its own weights again, bit by bit.

        Do not train or save inside it: the average holds the model's weights meanwhile.
        """
        self._swap()
        try:
            yield
        finally:
            self._swap()

    def state_dict(self) -> dict[str, Any]:
        """The state with the live tensors, not copies, as torch does it."""
        return {"updates": self.updates, "tensors": dict(self.tensors)}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues from a saved state, with the current decay."""
        saved: Mapping[str, Tensor] = state["tensors"]
        wrong = sorted(self.tensors.keys() ^ saved.keys())
        wrong += [name for name in self.tensors if name in saved and saved[name].shape != self.tensors[name].shape]
        if wrong:
            raise UserError(
                "average-of-another-model",
                f"the saved moving average does not fit this model; {len(wrong)} differ: {', '.join(wrong[:5])}",
                hint="resume with the model it was made from, or start over with --fresh",
            )
        for name, tensor in self.tensors.items():
            tensor.copy_(saved[name])
        self.updates = int(state["updates"])

    @torch.no_grad()
    def _swap(self) -> None:
        # Swaps values, not storages: compiled code, DDP and CUDA graphs rely on the addresses.
        for name, value in self._model.items():
            kept = value.clone()
            value.copy_(self.tensors[name])
            self.tensors[name].copy_(kept)


def _averaged_tensors(model: nn.Module) -> dict[str, Tensor]:
    """The parameters and persistent buffers, shared tensors once."""
    persistent = set(model.state_dict())
    return dict(model.named_parameters()) | {name: value for name, value in model.named_buffers() if name in persistent}
