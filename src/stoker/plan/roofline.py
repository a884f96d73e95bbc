"""How long a device takes for a traced step: the roofline of each operator, added up.

An operator takes the time of its products or of its memory traffic, whichever is longer, plus part of the other. Bytes
and FLOPs come from the trace, peaks from the datasheet; every constant below is the same for all devices and models.
bench/roofline.py compares the result with published rates.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from stoker.plan.records import TracedOp
from stoker.profile.datasheets import Datasheet

Kind = Literal["convolution", "matrix product", "normalisation", "pointwise", "layout", "update"]

# The first three shares were chosen together, in steps of 0.05 or more, over all rows of results/roofline; none was
# fitted to one device. Large products in cuBLAS and cuDNN reach 80 to 95 % of the datasheet's peak; clocks above the
# specified one make up for some of the rest.
PRODUCT_EFFICIENCY = 0.9
# Share of the datasheet's bandwidth; plain copies reach 85 to 93 %, kernels with reductions less.
BANDWIDTH_EFFICIENCY = 0.8
# A tile waits for its first operands and writes its result when the products are done: this share of the shorter time
# is not hidden behind the longer one.
NOT_OVERLAPPED = 0.5
# Depthwise convolutions run on scalar units, and the gradient of their weights is a long reduction: far from the peak.
# Share of the fp32 peak, from the EfficientNet, MobileNet and ConvNeXt rows of results/roofline.
DEPTHWISE_EFFICIENCY = 0.08
# Convolutions over volumes have few channels where they have the most voxels, and fill only part of each tile: 0.33,
# 0.39 and 0.38 of the peak in the three rows of nnU-Net (A100 and V100, fp16 and TF32).
VOLUME_EFFICIENCY = 0.35
# Batch norm needs mean and variance before it can normalise: two passes over its input; its backward needs two sums
# over x and dy before it can compute dx. The same goes for group norm. Layer norm keeps a row in registers in the
# forward pass; its backward reads once for dx and once for the sums over rows.
STATISTICS_PASSES = 2.0
# The backward of a convolution reads dy twice, for dx and for dw; dy is about half of what is read.
BACKWARD_READS = 1.5
# Tensor-core convolutions work on channels-last data: a contiguous input is converted, which reads and writes it once
# more, and so is the result ('Tensor Layouts In Memory: NCHW vs NHWC', NVIDIA's guide to convolutional layers).
CONVERSION_PASSES = 2.0
# The shortest time of a kernel and the gap before the next one on a busy stream.
KERNEL_FLOOR_S = 4e-6
# Host time per operator for Python, the dispatcher, autograd and the launch. Between 10 us for bare dispatch and the
# 59 us in NVIDIA's table for ResNet-50 at batch 1 (10.4 ms, 175 operators, including transfer and wait).
HOST_S = 20e-6
# A compiled model calls its kernels without Python, the dispatcher and autograd.
HOST_COMPILED_S = 7e-6
# Gradients are sent in buckets during the backward pass; the last one is sent after it (DDP's bucket_cap_mb).
BUCKET_BYTES = 25 * 1024**2
# Share of the link's bandwidth in a ring all-reduce: NCCL's bus bandwidth on NVLink machines; over PCIe everything
# passes through host memory.
NVLINK_EFFICIENCY = 0.75
PCIE_EFFICIENCY = 0.4
NETWORK_EFFICIENCY = 0.8
NETWORK_BYTES_PER_SECOND = 12.5e9
"""Bandwidth of a node: 100 Gbit/s."""

_NORMS_BY_STATISTICS = ("batch_norm", "group_norm", "instance_norm")
_FORMAT_OF_DTYPE = {"float16": "fp16", "bfloat16": "bf16"}
# What torch.compile fuses with its neighbours (it may also fuse reductions, which this rule leaves out).
_FUSED: tuple[Kind, ...] = ("pointwise", "normalisation")


@dataclass(frozen=True)
class AllReduce:
    """The gradients that all devices add up in every step, around a ring."""

    gradient_bytes: int
    gpus: int
    """Per node."""
    nodes: int = 1

    def seconds(self, sheet: Datasheet) -> float:
        """Each byte passes every link twice, except the device's own share."""
        world = self.gpus * self.nodes
        if world <= 1 or self.gradient_bytes <= 0:
            return 0.0
        efficiency = PCIE_EFFICIENCY if sheet.interconnect_bytes_per_second is None else NVLINK_EFFICIENCY
        slowest = sheet.peer_bytes_per_second * efficiency
        if self.nodes > 1:
            network = NETWORK_BYTES_PER_SECOND * NETWORK_EFFICIENCY
            slowest = min(slowest, network) if self.gpus > 1 else network
        return 2 * (world - 1) / world * self.gradient_bytes / slowest


@dataclass(frozen=True)
class StepTime:
    total_s: float
    """The device time, or that of the host for launching all operators if it is longer."""
    by_kind: dict[str, float]
    """They add up to the device time; `communication` is only the part that the backward pass does not hide."""
    device_s: float


def step_seconds(
    ops: Sequence[TracedOp],
    sheet: Datasheet,
    *,
    channels_last: bool,
    compiled: bool = False,
    tf32: bool = True,
    all_reduce: AllReduce | None = None,
) -> StepTime:
    """The time of a traced step, including the part of the all-reduce that the backward pass does not hide."""
    todo = list(_fused(ops)) if compiled else list(ops)
    by_kind: dict[str, float] = {}
    backward_s = 0.0
    for op in todo:
        kind, seconds = kind_of(op), _op_seconds(op, sheet, tf32=tf32)
        layout = 0.0 if channels_last else _layout_seconds(op, sheet, tf32=tf32)
        by_kind[kind] = by_kind.get(kind, 0.0) + seconds
        if layout:
            by_kind["layout"] = by_kind.get("layout", 0.0) + layout
        if op.phase == "backward":
            backward_s += seconds + layout
    if all_reduce is not None and (sending_s := all_reduce.seconds(sheet)) > 0:
        last_bucket_s = sending_s * min(1.0, BUCKET_BYTES / all_reduce.gradient_bytes)
        by_kind["communication"] = max(sending_s - backward_s, last_bucket_s)
    device_s = sum(by_kind.values())
    host_s = 0.0 if sheet.is_cpu else len(todo) * (HOST_COMPILED_S if compiled else HOST_S)
    return StepTime(max(device_s, host_s), by_kind, device_s)


def kind_of(op: TracedOp) -> Kind:
    if op.phase == "update":
        return "update"
    if "conv" in op.name:
        return "convolution"
    if op.flops:
        return "matrix product"
    return "normalisation" if "norm" in op.name and "linalg" not in op.name else "pointwise"


def _op_seconds(op: TracedOp, sheet: Datasheet, *, tf32: bool) -> float:
    products = op.flops / _product_rate(op, sheet, tf32=tf32) if op.flops else 0.0
    traffic = _moved_bytes(op) / (sheet.memory_bytes_per_second * BANDWIDTH_EFFICIENCY)
    busy = max(products, traffic) + NOT_OVERLAPPED * min(products, traffic)
    return max(busy, op.kernels * KERNEL_FLOOR_S)


def _product_rate(op: TracedOp, sheet: Datasheet, *, tf32: bool) -> float:
    peaks = sheet.peak_flops
    if op.depthwise and not sheet.is_cpu:
        return peaks["fp32"] * DEPTHWISE_EFFICIENCY
    wanted = _FORMAT_OF_DTYPE.get(op.dtype, "tf32" if tf32 else "fp32")
    # A format that the device does not support is computed in float32: bfloat16 on Volta and Turing.
    peak = next((rate for name, rate in peaks.items() if name == wanted), peaks["fp32"])
    return peak * (VOLUME_EFFICIENCY if op.volumetric and not sheet.is_cpu else PRODUCT_EFFICIENCY)


def _moved_bytes(op: TracedOp) -> float:
    """Bytes between the device and its memory, including repeated reads."""
    read = float(op.read_bytes)
    if any(name in op.name for name in _NORMS_BY_STATISTICS) or op.name == "native_layer_norm_backward":
        read *= STATISTICS_PASSES
    elif "conv" in op.name and op.phase == "backward" and op.kernels > 1:
        read *= BACKWARD_READS
    return read + op.written_bytes


def _layout_seconds(op: TracedOp, sheet: Datasheet, *, tf32: bool) -> float:
    """Conversions to and from channels-last around a tensor-core convolution of contiguous tensors."""
    if kind_of(op) != "convolution" or op.depthwise or sheet.is_cpu:
        return 0.0
    half = _FORMAT_OF_DTYPE.get(op.dtype)
    peaks = sheet.peak_flops
    # If tensor cores are no faster for float32 (GeForce) or do not support it (Volta), contiguous kernels run on the
    # other units.
    on_tensor_cores = half in peaks if half is not None else tf32 and peaks.get("tf32", 0.0) > peaks["fp32"]
    if not on_tensor_cores:
        return 0.0
    return CONVERSION_PASSES * _moved_bytes(op) / (sheet.memory_bytes_per_second * BANDWIDTH_EFFICIENCY)


def _fused(ops: Iterable[TracedOp]) -> Iterable[TracedOp]:
    """As torch.compile would: in a run of pointwise operators and norms, intermediate results are never stored.

    The rule: within a run, an operator does not read its predecessor's result from memory, and the predecessor does not
    write it. The run is one kernel, except that a norm needs its statistics first and starts a new one.
    """
    run: TracedOp | None = None
    for op in ops:
        if run is not None and kind_of(run) in _FUSED and kind_of(op) == "pointwise" and run.phase == op.phase:
            handed = min(run.written_bytes, op.read_bytes)
            run = replace(
                run,
                read_bytes=run.read_bytes + op.read_bytes - handed,
                written_bytes=run.written_bytes - handed + op.written_bytes,
            )
            continue
        if run is not None:
            if kind_of(run) == "pointwise" and kind_of(op) == "normalisation" and run.phase == op.phase:
                handed = min(run.written_bytes, op.read_bytes)
                run = replace(run, written_bytes=run.written_bytes - handed)
            yield run
        run = op
    if run is not None:
        yield run
