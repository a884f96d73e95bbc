"""What the driver says about an accelerator's link; without an accelerator nothing is reported."""

from __future__ import annotations

import pytest
import torch

from stoker.profile.accelerators import covered_share, device_busy_share, measure_cpu, measure_transfer, read_link
from stoker.profile.observed import AcceleratorFacts


def test_a_link_is_as_the_driver_says_and_what_it_does_not_know_is_none() -> None:
    assert read_link("NVIDIA A10G, 1, 4, 8, 16") == AcceleratorFacts(
        name="NVIDIA A10G", pcie_generation=1, pcie_generation_max=4, pcie_width=8, pcie_width_max=16
    )
    assert read_link("Tesla T4, [N/A], 3, [Not Supported]") == AcceleratorFacts(name="Tesla T4", pcie_generation_max=3)
    assert read_link("") == AcceleratorFacts()


def test_overlapping_kernels_count_once_and_gaps_do_not() -> None:
    assert covered_share([(0, 10), (5, 12), (20, 30), (22, 24)]) == pytest.approx(22 / 30)
    assert covered_share([(3, 4)]) == 1.0
    assert covered_share([]) is None


def test_a_cpu_has_no_device_link_but_a_datasheet() -> None:
    sheet = measure_cpu(seconds_each=0.02)
    assert (sheet.is_cpu, sheet.name) == (True, "this machine's CPU")
    assert 1e8 < sheet.peak_flops["fp32"] < 1e14
    assert 1e8 < sheet.memory_bytes_per_second < 1e13
    cpu = torch.device("cpu")
    assert measure_transfer(cpu, 1000, 0.1, pinned=False) is None
    assert device_busy_share(lambda: None, cpu) is None
