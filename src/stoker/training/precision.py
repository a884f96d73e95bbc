"""The number formats of a step: autocast, the loss scaler, TF32."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

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
