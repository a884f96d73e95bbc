"""CUDA's autocast rules on CPU tensors: which operators use half precision, and which float32.

Fake tensors have to be CPU tensors (fake CUDA tensors fail in backward without a GPU), and the CPU has other lists: it
leaves softmax, the norms and interpolation in half precision, for instance, while CUDA uses float32 and twice the
memory. While a step is traced, CUDA's lists (ATen/autocast_mode.h of torch 2.15) replace the CPU's. Still different:
the old form of `norm`, and losses over embeddings, which no vision model calls.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

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
    for names, change in (
        (FLOAT32, _to_float32),
        (FLOAT32_RESULT, _float32_result),
        (HALF, _to_half),
        (UNTOUCHED, None),
    ):
        yield from ((name, _rule(_operator(name), change)) for name in names if _operator(name) is not None)
    yield from ((name, _operator(name).decompose) for name in COMPOSED)
    yield "softmax.int", _softmax(torch.ops.aten.softmax.int, torch.ops.aten._softmax.default)
    yield "log_softmax.int", _softmax(torch.ops.aten.log_softmax.int, torch.ops.aten._log_softmax.default)


def _operator(name: str) -> Any:
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet, None), overload or "default", None)


def _without_autocast() -> Any:
    return torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU))


def _rule(operator: Any, change: Callable[[Any], Any] | None) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        with _without_autocast():
            args, kwargs = (args, kwargs) if change is None else change((args, kwargs))
            return operator(*args, **kwargs)

    return call


def _cast(arguments: Any, dtype: torch.dtype) -> Any:
    def one(value: Any) -> Any:
        eligible = isinstance(value, Tensor) and value.is_floating_point() and value.dtype != torch.float64
        return value.to(dtype) if eligible else value

    return pytree.tree_map(one, arguments)


def _to_float32(arguments: Any) -> Any:
    return _cast(arguments, torch.float32)


def _to_half(arguments: Any) -> Any:
    return _cast(arguments, torch.get_autocast_dtype("cpu"))


def _float32_result(arguments: Any) -> Any:
    args, kwargs = arguments
    wanted = args[0].is_floating_point() and args[0].dtype != torch.float64 and kwargs.get("dtype") is None
    return args, kwargs | {"dtype": torch.float32} if wanted else kwargs


def _softmax(operator: Any, kernel: Any) -> Callable[..., Any]:
    """CUDA's kernel reads half precision and writes float32; the CPU's would need a copy of its input."""

    def call(values: Tensor, dim: int, dtype: torch.dtype | None = None) -> Any:
        with _without_autocast():
            if values.dtype in (torch.float16, torch.bfloat16) and dtype in (None, torch.float32):
                return kernel(values, dim, True)
            return operator(values, dim, dtype)

    return call
