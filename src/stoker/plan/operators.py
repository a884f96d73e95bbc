"""Operators on CPU tensors as CUDA would run them: their data type under autocast, and cuDNN's workspace."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from stoker.attach.operators import bytes_of, is_channels_last

aten = torch.ops.aten

# CUDA's autocast rules on CPU tensors: which operators use half precision, and which float32.
#
# Fake tensors have to be CPU tensors (fake CUDA tensors fail in backward without a GPU), and the CPU has other lists:
# it leaves softmax, the norms and interpolation in half precision, for instance, while CUDA uses float32 and twice the
# memory. While a step is traced, CUDA's lists (ATen/autocast_mode.h of torch 2.15) replace the CPU's.
# Still different: the old form of `norm`, and losses over embeddings, which no vision model calls.

# AT_FORALL_FP32, without those also in the CPU's list.
FLOAT32 = (
    "acos", "asin", "cosh", "erfinv", "exp", "expm1", "log", "log10", "log2", "log1p", "reciprocal", "rsqrt", "sinh",
    "tan", "pow.Tensor_Scalar", "pow.Tensor_Tensor", "pow.Scalar", "softplus", "layer_norm", "native_layer_norm",
    "rms_norm", "group_norm", "cosine_similarity", "soft_margin_loss", "dist", "renorm", "logsumexp",
    "upsample_nearest1d", "_upsample_nearest_exact1d", "upsample_nearest2d", "_upsample_nearest_exact2d",
    "upsample_nearest3d", "_upsample_nearest_exact3d", "upsample_linear1d", "upsample_bilinear2d",
    "_upsample_bilinear2d_aa", "upsample_trilinear3d", "upsample_bicubic2d", "_upsample_bicubic2d_aa",
)  # fmt: skip
# AT_FORALL_FP32_SET_OPT_DTYPE: the result becomes float32 in the same kernel, without a copy of the input.
FLOAT32_RESULT = ("cumprod", "cumsum", "sum", "sum.dim_IntList")
# AT_FORALL_LOWER_PRECISION_FP, without those in the CPU's list.
HALF = ("prelu", "mv", "addmv", "addr")
# Converted to float32 on the CPU, left alone on CUDA.
UNTOUCHED = ("avg_pool3d",)
# On CUDA, composed of operators with rules of their own; the CPU makes a float32 copy first.
COMPOSED = ("cross_entropy_loss",)


@contextmanager
def cuda_autocast_rules() -> Iterator[None]:
    """Inside, autocast on CPU tensors follows CUDA's lists, in all threads of this process."""
    library: Any = torch.library.Library("aten", "IMPL", "AutocastCPU")  # type: ignore[no-untyped-call]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns about each kernel that we replace
            for name, rule in _rules():
                library.impl(name, rule, "AutocastCPU")
        yield
    finally:
        library._destroy()


def _rules() -> Iterator[tuple[str, Callable[..., Any]]]:
    known = [(FLOAT32, _in_float32), (FLOAT32_RESULT, _to_float32), (HALF, _in_half), (UNTOUCHED, _as_it_is)]
    for names, rule in known:
        yield from ((name, rule(_operator(name))) for name in names if _operator(name) is not None)
    yield from ((name, _operator(name).decompose) for name in COMPOSED)
    yield "softmax.int", _softmax(torch.ops.aten.softmax.int, torch.ops.aten._softmax.default)
    yield "log_softmax.int", _softmax(torch.ops.aten.log_softmax.int, torch.ops.aten._log_softmax.default)


def _operator(name: str) -> Any:
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet, None), overload or "default", None)


def _without_autocast() -> Any:
    return torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU))


def _cast(arguments: Any, dtype: torch.dtype) -> Any:
    def one(value: Any) -> Any:
        eligible = isinstance(value, Tensor) and value.is_floating_point() and value.dtype != torch.float64
        return value.to(dtype) if eligible else value

    return pytree.tree_map(one, arguments)


def _in_float32(operator: Any) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        with _without_autocast():
            return operator(*_cast(args, torch.float32), **_cast(kwargs, torch.float32))

    return call


def _in_half(operator: Any) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        dtype = torch.get_autocast_dtype("cpu")
        with _without_autocast():
            return operator(*_cast(args, dtype), **_cast(kwargs, dtype))

    return call


def _to_float32(operator: Any) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        if args[0].is_floating_point() and args[0].dtype != torch.float64 and kwargs.get("dtype") is None:
            kwargs["dtype"] = torch.float32
        with _without_autocast():
            return operator(*args, **kwargs)

    return call


def _as_it_is(operator: Any) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        with _without_autocast():
            return operator(*args, **kwargs)

    return call


def _softmax(operator: Any, kernel: Any) -> Callable[..., Any]:
    """CUDA's kernel reads half precision and writes float32; the CPU's would need a copy of its input."""

    def call(values: Tensor, dim: int, dtype: torch.dtype | None = None) -> Any:
        with _without_autocast():
            if values.dtype in (torch.float16, torch.bfloat16) and dtype in (None, torch.float32):
                return kernel(values, dim, True)
            return operator(values, dim, dtype)

    return call


def convolution_workspace(func: Any, args: Any, kwargs: Any, out: Any) -> list[int]:
    """Bytes of workspace that cuDNN uses for a convolution, kernel by kernel.

    By rule, because there is no cuDNN to ask. Its tensor-core kernels (half precision, and float32 as TF32) work on
    channels-last data; contiguous tensors are first converted into its workspace ('Tensor Layouts In Memory: NCHW vs
    NHWC' in NVIDIA's guide to convolutional layers). The gradient of the weights is summed in float32. Depthwise
    convolutions run in torch's own kernels, which need no workspace.
    """
    backward = func is aten.convolution_backward.default
    if not backward and func is not aten.convolution.default:
        return []
    first, second, weight = (args[0], args[1], args[2]) if backward else (out, args[0], args[1])
    groups = args[9] if backward else (args[8] if len(args) > 8 else kwargs.get("groups", 1))
    if groups > 1 and groups == second.shape[1]:
        return []
    converted = 0 if is_channels_last(second) else bytes_of([first]) + bytes_of([second]) + bytes_of([weight])
    if not backward:
        return [converted]
    needs_input, needs_weight, _ = args[10]
    return [converted * needs_input, (converted + 4 * weight.numel()) * needs_weight]
