"""How a model computes: number formats, torch.compile with a fallback, the share of the device's peak it reaches."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch._functorch import config as functorch_config

from stoker.config import Config
from stoker.machine.datasheets import Datasheet, datasheet_for_device, load_datasheet
from stoker.machine.flops import training_flops_per_image
from stoker.train.schedule import all_sizes, default_resize_epochs, image_size

# The number formats of a step: autocast, the loss scaler, TF32.

_AUTOCAST = {"16-mixed": torch.float16, "bf16-mixed": torch.bfloat16}


class Precision:
    """What a config's `precision` means on a device."""

    def __init__(self, name: str, device: torch.device) -> None:
        self._dtype = _AUTOCAST.get(name)
        self._device = device.type
        # Only float16 has too small a range for gradients; the scaler keeps them in it.
        self.scaler = torch.amp.GradScaler(device.type, enabled=name == "16-mixed")

    def autocast(self) -> AbstractContextManager[None]:
        if self._dtype is None:
            return nullcontext()
        return torch.autocast(self._device, self._dtype)


def set_matmul_precision(name: str) -> None:
    """`high` and `medium` allow TF32 in float32 products, and cuDNN's convolutions along with them."""
    torch.set_float32_matmul_precision(name)
    torch.backends.cudnn.allow_tf32 = name != "highest"


# torch.compile that never ends a run: what cannot be compiled runs as it is, said once.

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


# Model FLOPs utilisation: what share of the accelerator's peak a run turns into training.

Utilisation = Callable[[float, int], float | None]
"""(images a second over all ranks, epoch) to a share between 0 and 1; None where it is not known."""


def accelerator_of(config: Config, device: torch.device | None = None) -> Datasheet | None:
    """The datasheet that the config names, or the device's own; None where neither is known. Raises UsageError."""
    if config.accelerator is not None:
        return load_datasheet(config.accelerator)
    if device is None or device.type != "cuda":
        return None
    return datasheet_for_device(torch.cuda.get_device_name(device))


def utilisation_of(config: Config, model: nn.Module, device: torch.device, world: int) -> Utilisation | None:
    """Counts the model's FLOPs once for each image size of the run; then asking costs a multiplication.

    None where no peak is known for the device and the config's precision, or the FLOPs cannot be counted.
    """
    sheet = accelerator_of(config, device)
    peak = None if sheet is None else sheet.peak(config.precision, config.matmul_precision)
    if peak is None:
        return None
    until = config.resize_epochs or default_resize_epochs(config.epochs)
    sizes = all_sizes(config.start_img_size, config.img_size, until)
    # Beforehand, for all of them: in the middle of an epoch it would cost a step half a second.
    flops = {size: training_flops_per_image(model, size) for size in sizes}
    if all(count is None for count in flops.values()):
        return None

    def share(images_per_second: float, epoch: int) -> float | None:
        count = flops[image_size(epoch, config.start_img_size, config.img_size, until)]
        return None if count is None else images_per_second * count / (peak * world)

    return share
