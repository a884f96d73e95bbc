"""How a model computes: precision, torch.compile with a fallback, and the share of the device's peak it reaches."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch._functorch import config as functorch_config

from stoker.config import Config
from stoker.core.console import Say
from stoker.profile.datasheets import Datasheet, datasheet_for_device, load_datasheet
from stoker.profile.flops import training_flops_per_image
from stoker.train.schedule import all_sizes, default_resize_epochs, image_size

_AUTOCAST = {"16-mixed": torch.float16, "bf16-mixed": torch.bfloat16}
LONG_COMPILE_S = 1.0
MOST_GRAPHS = 64
"""Every image size of a run has two: training and validation."""

Utilisation = Callable[[float, int], float | None]
"""(images per second over all ranks, epoch) to a share of the peak between 0 and 1; None if it is not known."""


def compute_dtype(precision: str) -> torch.dtype:
    """What convolutions and products are computed in on a GPU; inputs made in this type need no conversion."""
    return _AUTOCAST.get(precision, torch.float32)


class Precision:
    """The autocast and the loss scaler of a config's `precision` on a device."""

    def __init__(self, name: str, device: torch.device) -> None:
        self._dtype = _AUTOCAST.get(name)
        self._device = device.type
        # Only float16 has too small a range for gradients; the scaler keeps them within it.
        self.scaler = torch.amp.GradScaler(device.type, enabled=name == "16-mixed")

    def autocast(self) -> AbstractContextManager[None]:
        if self._dtype is None:
            return nullcontext()
        return torch.autocast(self._device, self._dtype)


def set_matmul_precision(name: str) -> None:
    """`high` and `medium` allow TF32 in float32 products, and cuDNN's convolutions along with them."""
    torch.set_float32_matmul_precision(name)
    torch.backends.cudnn.allow_tf32 = name != "highest"


def choose_fastest_kernels(device: torch.device) -> None:
    """On a GPU, lets cuDNN time its algorithms for each new shape of a convolution and remember the fastest."""
    # Shapes are fixed within an image size, so this costs a second or so at each size. The algorithms may differ in
    # rounding from one start to the next; those that are chosen without timing do too, between cards and versions.
    torch.backends.cudnn.benchmark = device.type == "cuda"


class Compiled(nn.Module):
    """A model that is compiled at its first call; if that fails, it runs uncompiled, with one warning."""

    def __init__(self, model: nn.Module, mode: str, say: Say) -> None:
        super().__init__()
        self.plain = model
        # Outside the module tree: state_dict and parameters are the plain model's.
        from torch._dynamo import config as dynamo_config  # takes a second, which only this needs

        # Not dynamic: the second size of progressive resizing would compile one graph for all sizes, which is slower.
        self.__dict__["_compiled"] = torch.compile(model, mode=None if mode == "default" else mode, dynamic=False)
        # Above its limit of graphs for one function, torch runs without compiling and says nothing.
        dynamo_config.recompile_limit = max(dynamo_config.recompile_limit, MOST_GRAPHS)
        self._say = say
        self._seen: set[Any] = set()
        self._uses_graphs = mode in ("max-autotune", "reduce-overhead")

    def forward(self, inputs: torch.Tensor) -> Any:
        compiled = self.__dict__["_compiled"]
        if compiled is None:
            return self.plain(inputs)
        if self._uses_graphs:
            # Nothing of an earlier pass is in use any more: CUDA graphs may take back its memory.
            torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]
        key = (tuple(inputs.shape), self.training, torch.is_grad_enabled())
        if key in self._seen:
            return compiled(inputs)
        began = time.perf_counter()
        try:
            # The backward pass too: by default torch compiles it at the first backward, too late to fall back.
            with functorch_config.patch(force_non_lazy_backward_lowering=True):
                first = compiled(inputs)
        except torch.OutOfMemoryError:
            raise  # the step handles it
        except Exception as error:
            self.__dict__["_compiled"] = None
            reason = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
            self._say(f"warning: compile_model: torch.compile failed ({reason[:120]}); continuing without it")
            return self.plain(inputs)
        took_s = time.perf_counter() - began
        self._seen.add(key)
        if took_s >= LONG_COMPILE_S:
            self._say(f"compiled for {'training' if self.training else 'validation'} in {took_s:.0f} s")
        return first


def accelerator_of(config: Config, device: torch.device | None = None) -> Datasheet | None:
    """The datasheet named in the config, or the device's own; None if neither is known. Raises UsageError."""
    if config.accelerator is not None:
        return load_datasheet(config.accelerator)
    if device is None or device.type != "cuda":
        return None
    return datasheet_for_device(torch.cuda.get_device_name(device))


def utilisation_of(config: Config, model: nn.Module, device: torch.device, world: int) -> Utilisation | None:
    """Model FLOPs utilisation: counts the model's FLOPs once for each image size; a call then costs a multiplication.

    None if the peak of the device in the config's precision is not known, or the FLOPs cannot be counted.
    """
    sheet = accelerator_of(config, device)
    peak = None if sheet is None else sheet.peak(config.precision, config.matmul_precision)
    if peak is None:
        return None
    until = config.resize_epochs or default_resize_epochs(config.epochs)
    sizes = all_sizes(config.start_img_size, config.img_size, until)
    # All sizes now: in the middle of an epoch it would cost a step half a second.
    flops = {size: training_flops_per_image(model, size) for size in sizes}
    if all(count is None for count in flops.values()):
        return None

    def share(images_per_second: float, epoch: int) -> float | None:
        count = flops[image_size(epoch, config.start_img_size, config.img_size, until)]
        return None if count is None else images_per_second * count / (peak * world)

    return share
