"""How a model computes: precision, torch.compile with a fallback, and the share of the device's peak it reaches."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch._functorch import config as functorch_config
from torch.utils.flop_counter import FlopCounterMode

from stoker.attach.operators import CORRECTED_FORMULAS
from stoker.config import Config
from stoker.core.console import Say
from stoker.profile.datasheets import Datasheet, datasheet_for_device, load_datasheet
from stoker.train.schedule import default_resize_epochs, image_size

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
    sizes = {image_size(epoch, config.start_img_size, config.img_size, until) for epoch in range(until + 1)}
    # All sizes now: in the middle of an epoch it would cost a step half a second.
    flops = {size: training_flops_per_image(model, size) for size in sizes}
    if all(count is None for count in flops.values()):
        return None

    def share(images_per_second: float, epoch: int) -> float | None:
        count = flops[image_size(epoch, config.start_img_size, config.img_size, until)]
        return None if count is None else images_per_second * count / (peak * world)

    return share


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
