"""torch.compile that never ends a run: what cannot be compiled runs as it is, said once."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch._functorch import config as functorch_config

WORTH_SAYING_S = 1.0


class Compiled(nn.Module):
    """A model whose first call compiles it, and falls back to the plain one where that fails."""

    def __init__(self, model: nn.Module, mode: str, say: Callable[[str], None]) -> None:
        super().__init__()
        self.plain = model
        # Outside the module tree: state_dict and parameters are the plain model's.
        self.__dict__["_compiled"] = torch.compile(model, mode=None if mode == "default" else mode)
        self._say = say
        self._seen: set[Any] = set()
        self.compile_s = 0.0
        """Time of the first calls, which the step's own time should not be judged by."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        compiled = self.__dict__["_compiled"]
        if compiled is None:
            output: torch.Tensor = self.plain(inputs)
            return output
        key = (tuple(inputs.shape), self.training, torch.is_grad_enabled())
        if key in self._seen:
            result: torch.Tensor = compiled(inputs)
            return result
        began = time.perf_counter()
        try:
            # The backward pass too: by default torch leaves it for the first backward, where nobody could fall back.
            with functorch_config.patch(force_non_lazy_backward_lowering=True):
                first: torch.Tensor = compiled(inputs)
        except torch.OutOfMemoryError:
            raise  # the step's business
        except Exception as error:
            self.__dict__["_compiled"] = None
            reason = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
            self._say(f"warning: compile_model: torch.compile failed ({reason[:120]}); going on without it")
            fallback: torch.Tensor = self.plain(inputs)
            return fallback
        took_s = time.perf_counter() - began
        self.compile_s += took_s
        self._seen.add(key)
        if took_s >= WORTH_SAYING_S:
            self._say(f"compiled for {'training' if self.training else 'validation'} in {took_s:.0f} s")
        return first


def compile_or_fall_back(model: nn.Module, mode: str, say: Callable[[str], None]) -> nn.Module:
    """The model, compiled at its first call."""
    return Compiled(model, mode, say)
