"""The counter of kernels counts what a device would be asked to do."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.support.operators import counted


def test_views_and_allocations_are_free_and_the_rest_is_counted() -> None:
    tensor = torch.ones(4, 6)
    with counted() as ops:
        view = tensor.view(6, 4).t()[1:].expand(2, -1, -1).detach().as_strided((2, 2), (1, 1))
        torch.empty_like(view)
        assert ops.kernels == 0
        (tensor + 1).mul_(2).to(torch.float64)
        torch.zeros(3)
        tensor.copy_(tensor.clone())
    assert ops.by_name == {"add": 1, "mul_": 1, "_to_copy": 1, "zeros": 1, "clone": 1, "copy_": 1}
    assert ops.kernels == 6
    assert ops.copies == 0


def test_a_foreach_call_is_one_kernel_unless_its_lists_differ() -> None:
    def kernels(first: list[torch.Tensor], second: list[torch.Tensor], *, strict: bool) -> int:
        with counted(strict=strict) as ops:
            torch._foreach_add(first, second)
        return ops.kernels

    plain = [torch.ones(2, 3), torch.ones(5)]
    assert kernels(plain, plain, strict=True) == 1
    for other in (
        [torch.ones(3, 2).t(), torch.ones(5)],
        [torch.ones(2, 3, dtype=torch.float64), torch.ones(5)],
        [torch.ones(1, 3), torch.ones(5)],
    ):
        assert kernels(plain, other, strict=False) == 1
        assert kernels(plain, other, strict=True) == 2


def test_copies_between_devices_are_told_from_kernels_and_blocking_ones_are_named() -> None:
    host = torch.ones(3)
    with FakeTensorMode(allow_non_fake_inputs=True), counted() as ops:
        there = host.to("cuda", non_blocking=True)
        there.copy_(host, non_blocking=True)
        assert ops.copies == 2
        assert ops.blocking == []
        there.copy_(host)
        host.to("cuda")
    assert ops.copies == 4
    assert ops.kernels == 0
    assert ops.blocking == ["copy_", "_to_copy"]


def test_a_tensor_made_from_numbers_of_the_host_is_named() -> None:
    with FakeTensorMode(allow_non_fake_inputs=True), counted() as ops:
        torch.tensor([1.0, 2.0], device="cuda")
        torch.scalar_tensor(1.0, device="cuda")
    assert len(ops.blocking) == 2


def test_reading_a_value_is_named() -> None:
    with counted() as ops:
        assert torch.ones(3).sum().item() == pytest.approx(3)
    assert ops.blocking == ["_local_scalar_dense"]
