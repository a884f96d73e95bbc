"""What is trained, and how it runs on the device."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from stoker.config.field import KeyGroup, key


def _number_to_name(value: Any) -> Any:
    """YAML reads `precision: 32` as a number; the names of the precisions are text."""
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


Positive = Annotated[int, Field(ge=1)]


class ModelKeys(KeyGroup):
    """Model: what is trained, and how it runs on the device."""

    model: str = key("resnet50", min_length=1)
    """Any name of the timm zoo for `classify`; a MONAI network (`dynunet`, `unet`, `segresnet`) for
    `segment3d`."""

    weights: str | None = key(None, min_length=1)
    """Local file to start from (safetensors, or a timm checkpoint); random weights when not given."""

    img_size: int = key(224, unit="px", ge=8, le=8192)
    """Side of the training images."""

    val_img_size: int | None = key(None, unit="px", ge=8, le=8192)
    """Side of the validation images; `img_size` when not given."""

    crop_ratio: float = key(0.875, gt=0, le=1)
    """Validation: share of the resized image's shorter side that the centre crop keeps."""

    interpolation: Literal["bilinear", "bicubic"] = key("bicubic")
    """How validation images (and training images in `faithful` mode) are resized, with antialiasing."""

    patch_size: tuple[Positive, Positive, Positive] | None = key(None, unit="voxels")
    """Depth, height and width of a patch, for `segment3d`."""

    compile_model: bool = key(False)
    """Compile the model with torch.compile; the first steps take longer."""

    compile_mode: Literal["default", "reduce-overhead", "max-autotune"] = key("default")
    """Mode of torch.compile; `max-autotune` tries more kernels and takes longer to start."""

    channels_last: bool = key(True)
    """Keep tensors in NHWC layout, which tensor cores prefer."""

    precision: Annotated[Literal["32", "16-mixed", "bf16-mixed"], BeforeValidator(_number_to_name)] = key("32")
    """Number format of the computation; `16-mixed` uses a loss scaler."""

    matmul_precision: Literal["highest", "high", "medium"] = key("high")
    """Precision of float32 products; `high` and `medium` allow TF32 on tensor cores."""

    gradient_checkpointing: bool = key(False)
    """Recompute activations in the backward pass: less memory, about a third more work."""

    drop_path: float = key(0.0, ge=0, lt=1)
    """Stochastic depth: probability that a residual block is skipped."""

    dropout: float = key(0.0, ge=0, lt=1)
    """Probability that an input of the classifier is dropped."""

    ema_decay: float | None = key(None, gt=0, lt=1)
    """Keep a moving average of the weights with this decay for each step, and validate it."""
