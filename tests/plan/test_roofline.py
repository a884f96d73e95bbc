"""The roofline of a step: each rule on its own, on made-up operators."""

from __future__ import annotations

from dataclasses import replace

import pytest

from stoker.plan import roofline
from stoker.plan.records import Phase, TracedOp
from stoker.plan.roofline import AllReduce, kind_of, step_seconds
from stoker.profile.datasheets import load_datasheet

A100 = load_datasheet("a100-80")
MB = 10**6


def op(name: str, phase: Phase = "forward", gflop: float = 0, read: float = 0, written: float = 0) -> TracedOp:
    """A half-precision operator with the given GFLOP and MB read and written."""
    kernels = 2 if name == "convolution_backward" else 1
    return TracedOp(name, phase, int(gflop * 1e9), "float16", int(read * MB), int(written * MB), kernels)


def seconds(*ops: TracedOp, channels_last: bool = True, compiled: bool = False, gpu: str = "a100-80") -> float:
    return step_seconds(ops, load_datasheet(gpu), channels_last=channels_last, compiled=compiled).device_s


def traffic_s(megabytes: float) -> float:
    return megabytes * MB / (2039e9 * roofline.BANDWIDTH_EFFICIENCY)


def test_pointwise_work_takes_the_time_of_its_bytes_and_a_large_product_that_of_its_flops_and_part_of_its_bytes() -> (
    None
):
    assert seconds(op("relu", read=500, written=500)) == pytest.approx(traffic_s(1000))
    products = 1e12 / (312e12 * roofline.PRODUCT_EFFICIENCY)
    took = seconds(op("mm", gflop=1000, read=100, written=100))
    assert took == pytest.approx(products + roofline.NOT_OVERLAPPED * traffic_s(200))


def test_nothing_is_shorter_than_a_kernel() -> None:
    assert seconds(op("relu", read=1e-6)) == roofline.KERNEL_FLOOR_S
    foreach = replace(op("_foreach_add_", "update"), kernels=5)
    assert seconds(foreach) == pytest.approx(5 * roofline.KERNEL_FLOOR_S)


def test_batch_norm_reads_what_it_normalises_twice_both_ways() -> None:
    assert seconds(op("native_batch_norm", read=300, written=300)) == pytest.approx(traffic_s(900))
    backward = op("native_batch_norm_backward", "backward", read=600, written=300)
    assert seconds(backward) == pytest.approx(traffic_s(1500))
    assert seconds(op("native_layer_norm", read=300, written=300)) == pytest.approx(traffic_s(600))


def test_contiguous_convolutions_pay_for_their_conversion_on_tensor_cores_only() -> None:
    convolution = op("convolution", gflop=1, read=300, written=300)
    last, contiguous = seconds(convolution), seconds(convolution, channels_last=False)
    assert contiguous - last == pytest.approx(traffic_s(1200))
    single = replace(convolution, dtype="float32")
    for gpu, converted in (("a100-80", True), ("v100-16", False), ("rtx3090", False)):
        costs = seconds(single, channels_last=False, gpu=gpu) - seconds(single, gpu=gpu)
        assert (costs > 0) == converted, gpu
    assert seconds(replace(convolution, depthwise=True), channels_last=False) == seconds(
        replace(convolution, depthwise=True)
    )


def test_depthwise_convolutions_and_those_of_volumes_are_far_from_the_peak() -> None:
    dense = op("convolution", gflop=10, read=10, written=10)
    assert seconds(replace(dense, depthwise=True)) > 20 * seconds(dense)
    flat = op("convolution", gflop=10_000, read=1, written=1)
    ratio = roofline.PRODUCT_EFFICIENCY / roofline.VOLUME_EFFICIENCY
    assert seconds(replace(flat, volumetric=True)) == pytest.approx(ratio * seconds(flat), rel=1e-3)
    assert kind_of(replace(flat, name="slow_conv3d_forward")) == "convolution"


def test_float32_is_slower_without_tf32_and_bfloat16_on_a_card_that_lacks_it() -> None:
    single = replace(op("mm", gflop=1000), dtype="float32")
    slow = step_seconds([single], A100, channels_last=True, tf32=False).device_s
    assert slow == pytest.approx(seconds(single) * 156 / 19.5)
    brain = replace(single, dtype="bfloat16")
    assert seconds(brain, gpu="v100-16") == pytest.approx(1e12 / (15.7e12 * roofline.PRODUCT_EFFICIENCY))


def test_parts_add_up_and_are_named() -> None:
    convolution, relu = op("convolution", gflop=9, read=9, written=9), op("relu_", read=9, written=9)
    took = step_seconds([convolution, relu, op("_fused_sgd_", "update", read=9)], A100, channels_last=False)
    assert set(took.by_kind) == {"convolution", "layout", "pointwise", "update"}
    assert sum(took.by_kind.values()) == pytest.approx(took.device_s)


def test_many_small_operators_are_bound_by_the_host_that_calls_them() -> None:
    took = step_seconds([op("relu", read=0.01)] * 1000, A100, channels_last=True)
    assert took.total_s == pytest.approx(1000 * roofline.HOST_S)
    large = step_seconds([op("relu", read=1000)], A100, channels_last=True)
    assert large.total_s == large.device_s


def test_a_compiled_chain_is_read_once_and_written_once() -> None:
    chain = [op("relu", read=300, written=300), op("mul", read=300, written=300), op("add", read=600, written=300)]
    assert seconds(*chain) == pytest.approx(traffic_s(2100))
    assert seconds(*chain, compiled=True) == pytest.approx(traffic_s(300 + 300 + 300)), "the other addend is read too"
    norm = [op("native_batch_norm", read=300, written=300), op("relu_", read=300, written=300)]
    assert seconds(*norm, compiled=True) == pytest.approx(traffic_s(2 * 300 + 300))
    apart = [
        op("relu", read=300, written=300),
        op("mm", gflop=1, read=300, written=300),
        op("relu", read=300, written=300),
    ]
    assert seconds(*apart, compiled=True) == pytest.approx(seconds(*apart)), "products are no part of a chain"


def test_gradients_are_sent_during_the_backward_pass() -> None:
    backward = op("convolution_backward", "backward", gflop=20_000, read=900, written=900)
    hundred_mb = 100 * MB
    alone = step_seconds([backward], A100, channels_last=True, all_reduce=AllReduce(hundred_mb, 1))
    eight = step_seconds([backward], A100, channels_last=True, all_reduce=AllReduce(hundred_mb, 8))
    sending = AllReduce(hundred_mb, 8).seconds(A100)
    assert sending == pytest.approx(2 * 7 / 8 * hundred_mb / (300e9 * roofline.NVLINK_EFFICIENCY))
    exposed = eight.device_s - alone.device_s
    assert exposed == pytest.approx(sending * roofline.BUCKET_BYTES / hundred_mb), "the last bucket waits for the end"
    short = op("convolution_backward", "backward", gflop=1, read=1, written=1)
    bare = step_seconds([short], A100, channels_last=True, all_reduce=AllReduce(hundred_mb, 8))
    assert bare.by_kind["communication"] > sending * 0.9


def test_pcie_and_the_network_are_slower_than_nvlink() -> None:
    inside = AllReduce(MB, 8).seconds(A100)
    assert AllReduce(MB, 8).seconds(load_datasheet("rtx4090")) > 10 * inside
    assert AllReduce(MB, 8, nodes=2).seconds(A100) > 10 * inside
    assert AllReduce(MB, 1).seconds(A100) == 0
