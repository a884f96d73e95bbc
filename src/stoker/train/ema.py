"""A moving average of a model's weights and buffers (EMA), for evaluation."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn

from stoker.core.errors import UserError

# timm's decay warmup (ModelEmaV3, use_warmup) with gamma 10 and power 1: until `decay` is reached (0.999 after 10,000
# updates), the average spans about a tenth of the run so far. With timm's default power of 2/3, a decay of 0.9999 would
# be reached only after a million updates, longer than most runs.
WARMUP_GAMMA = 10
# Steps of an epoch, for callers to whom the end of an epoch does not matter.
ENDLESS = 2**63

Warmup = Literal["ramp", "copy", "none"]


class WeightAverage:
    """The average of a model's parameters and persistent buffers (integers, such as batch counts, are copied).

    Build it from the bare model (no DDP, not compiled), once that is on its device and its batch norm is converted:
    it keeps references to the model's tensors, so that an update need not look them up.

    With `every`, it is updated only at the first step of an epoch and at each `every`-th after it, as torchvision does;
    `decay` is that of one update. Warmup: with `ramp` the decay rises from 0, so that the random initial weights leave
    no trace. With `copy`, the average is the weights for `warmup_steps`, and then has the full decay.
    """

    def __init__(
        self,
        model: nn.Module,
        decay: float,
        *,
        warmup: Warmup = "ramp",
        every: int = 1,
        steps_per_epoch: int = ENDLESS,
        warmup_steps: int = 0,
    ) -> None:
        self.decay = decay
        self.warmup: Warmup = warmup
        self.steps = 0
        """Steps of the run so far. Which of them are averaged, and with what decay, follows from their number."""
        self._every = every
        self._steps_per_epoch = steps_per_epoch
        self._warmup_steps = warmup_steps
        self._model = _averaged_tensors(model)
        self.tensors = {name: value.detach().clone() for name, value in self._model.items()}
        # One foreach call for each dtype: over mixed dtypes it would launch a kernel for each tensor.
        by_type: dict[torch.dtype, list[str]] = {}
        for name, value in self.tensors.items():
            by_type.setdefault(value.dtype, []).append(name)
        self._pairs = [
            ([self.tensors[name] for name in names], [self._model[name] for name in names])
            for names in by_type.values()
        ]

    @torch.no_grad()
    def update(self) -> None:
        """Moves the average towards the model's current weights; call it after every step.

        Call it after a skipped step, too, so that nothing has to ask the device whether it was skipped: its weights and
        buffers are those of the step before, and are averaged once more, as in timm and torchvision.
        """
        step, self.steps = self.steps, self.steps + 1
        if step % self._steps_per_epoch % self._every != 0:
            return
        weight = 1.0 - self.decay_at(step)
        for averages, values in self._pairs:
            if averages[0].is_floating_point():
                torch._foreach_lerp_(averages, values, weight)
            else:
                torch._foreach_copy_(averages, values)

    def decay_at(self, step: int) -> float:
        """The decay of the update after a step, counted from 0."""
        if self.warmup == "ramp":
            epoch, place = divmod(step, self._steps_per_epoch)
            updates = epoch * -(-self._steps_per_epoch // self._every) + place // self._every
            return min(self.decay, updates / (WARMUP_GAMMA + updates))
        # Up to and including the first update after the warmup: torchvision starts its average anew at every update of
        # the warmup, and a new average begins with the weights.
        return 0.0 if self.warmup == "copy" and step <= self._warmup_steps else self.decay

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
        return {"updates": self.steps, "tensors": dict(self.tensors)}

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
        self.steps = int(state["updates"])

    def restart(self, steps: int) -> None:
        """Begins with the model's current weights, `steps` steps into the run."""
        self.load_state_dict({"updates": steps, "tensors": self._model})

    @torch.no_grad()
    def _swap(self) -> None:
        # Swaps values, not storages: compiled code, DDP and CUDA graphs rely on the addresses.
        for averages, values in self._pairs:
            kept = [torch.empty_like(value) for value in values]
            torch._foreach_copy_(kept, values)
            torch._foreach_copy_(values, averages)
            torch._foreach_copy_(averages, kept)


def _averaged_tensors(model: nn.Module) -> dict[str, Tensor]:
    persistent = set(model.state_dict())
    return dict(model.named_parameters()) | {name: value for name, value in model.named_buffers() if name in persistent}
