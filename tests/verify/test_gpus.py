"""What `stoker verify` says about GPUs, from what nvidia-smi and the kernel's log print; a stand-in prints it here."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from stoker.core.finding import Finding
from stoker.tasks.checks import Subject
from stoker.verify.machine import CHECKS, judge_products, judge_torch, query_gpus, read_xids
from stoker.verify.run_checks import run_checks
from tests.support.subjects import HERE, check_named, subject_of
from tests.support.tiny_training import write_config

# As `nvidia-smi --query-gpu=... --format=csv,noheader,nounits` prints it on a host with two A100.
A100: dict[str, str] = {
    "name": "NVIDIA A100-SXM4-80GB",
    "driver_version": "550.54.15",
    "pcie.link.width.current": "16",
    "pcie.link.width.max": "16",
    "clocks.sm": "210",
    "clocks.max.sm": "1410",
    "temperature.gpu": "31",
    "clocks_event_reasons.hw_slowdown": "Not Active",
    "clocks_event_reasons.hw_thermal_slowdown": "Not Active",
    "clocks_event_reasons.sw_thermal_slowdown": "Not Active",
    "ecc.errors.uncorrected.volatile.total": "0",
}
NVIDIA_SMI = """#!/usr/bin/env python3
import json, sys
gpus = json.loads({gpus!r})
fields = next(word for word in sys.argv if word.startswith("--query-gpu=")).partition("=")[2].split(",")
assert "--format=csv,noheader,nounits" in sys.argv
for field in fields:
    if field != "index" and field not in gpus[0]:
        print(f'Field "{{field}}" is not a valid field to query.\\n')
        sys.exit(2)
for number, gpu in enumerate(gpus):
    print(", ".join(str(number) if field == "index" else gpu[field] for field in fields))
"""
XID = "[ 9876.5] NVRM: Xid (PCI:0000:3b:00): {number}, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.\n"


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Subject]:
    """Makes a host with these GPUs: a subject for a config with that many devices."""
    programs = tmp_path / "bin"
    programs.mkdir()
    monkeypatch.setenv("PATH", str(programs), prepend=":")

    def make(*gpus: dict[str, str], devices: int = 1, log: str = "[    0.0] Linux version 6.8\n") -> Subject:
        (programs / "nvidia-smi").write_text(NVIDIA_SMI.format(gpus=json.dumps(gpus)))
        (programs / "dmesg").write_text(f"#!/bin/sh\ncat <<'END'\n{log}END\n")
        for program in programs.iterdir():
            program.chmod(0o755)
        machine = replace(HERE, accelerators=len(gpus))
        return subject_of(write_config(tmp_path, tmp_path), f"devices={devices}", machine=machine)

    return make


def found(name: str, subject: Subject) -> Finding:
    return run_checks([check_named(name)], subject).results[0].finding


def test_without_a_gpu_none_of_these_apply(tmp_path: Path) -> None:
    checks = [check for check in CHECKS if check.on_gpu]
    report = run_checks(checks, subject_of(write_config(tmp_path, tmp_path)))
    assert report.not_applicable == tuple(check.name for check in checks)
    assert len(checks) == 6


def test_as_many_healthy_gpus_as_the_config_wants_pass(host: Callable[..., Subject]) -> None:
    subject = host(A100, A100, devices=2)
    assert found("gpus", subject).seen == "2 of 2 NVIDIA A100-SXM4-80GB, driver 550.54.15"
    assert found("gpu-link", subject).seen == "16 lanes each"
    assert found("gpu-clocks", subject).seen == "up to 1410 MHz, none slowed down by heat or power"
    assert found("gpu-errors", subject).seen == "no uncorrected memory errors; no serious Xid messages"
    names = ("gpus", "gpu-link", "gpu-clocks", "gpu-errors")
    assert [found(name, subject).status for name in names] == ["passed"] * 4
    fewer = found("gpus", host(A100, devices=4))
    assert (fewer.status, fewer.fix) == ("failed", "devices=1")


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("gpus", {"name": "NVIDIA A10G"}, "the GPUs differ (NVIDIA A100-SXM4-80GB, NVIDIA A10G)"),
        ("gpu-link", {"pcie.link.width.current": "4"}, "GPU 1 has 4 of 16 lanes"),
        (
            "gpu-clocks",
            {"clocks_event_reasons.hw_thermal_slowdown": "Active", "temperature.gpu": "91"},
            "slowed down: GPU 1 (hw_thermal_slowdown, 91 °C)",
        ),
        ("gpu-errors", {"ecc.errors.uncorrected.volatile.total": "7"}, "GPU 1: 7 uncorrected memory errors"),
    ],
)
def test_a_gpu_that_is_not_healthy_is_named(
    host: Callable[..., Subject], name: str, change: dict[str, str], words: str
) -> None:
    outcome = found(name, host(A100, A100 | change, devices=2))
    assert outcome.status == "failed"
    assert words in outcome.seen
    assert outcome.fix


def test_a_serious_xid_in_the_log_fails_and_a_programs_mistake_does_not(host: Callable[..., Subject]) -> None:
    outcome = found("gpu-errors", host(A100, log=XID.format(number=79) + XID.format(number=13)))
    assert outcome.status == "failed"
    assert outcome.seen == "the kernel's log has Xid 79"
    assert found("gpu-errors", host(A100, log=XID.format(number=13))).status == "passed"
    assert read_xids() == [13]


def test_older_drivers_call_a_reason_throttling(host: Callable[..., Subject]) -> None:
    older = {name.replace("event", "throttle"): value for name, value in A100.items()}
    assert found("gpu-clocks", host(older)).status == "passed"
    hot = older | {"clocks_throttle_reasons.hw_slowdown": "Active"}
    assert found("gpu-clocks", host(hot)).status == "failed"


def test_what_the_driver_does_not_report_is_unknown(
    host: Callable[..., Subject], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    virtual = A100 | {"pcie.link.width.current": "[N/A]", "ecc.errors.uncorrected.volatile.total": "[N/A]"}
    subject = host(virtual)
    assert found("gpu-link", subject).status == "unknown"
    assert found("gpu-errors", subject).seen == "ECC is not reported; no serious Xid messages"
    monkeypatch.setenv("PATH", str(tmp_path))
    assert query_gpus("name") is None
    assert [found(name, subject).status for name in ("gpus", "gpu-clocks", "gpu-errors")] == ["unknown"] * 3


def test_torch_must_be_able_to_use_the_gpu() -> None:
    assert judge_torch(True, "13.0", "2.15.0").status == "passed"
    assert "needs a driver for CUDA 13.0" in judge_torch(False, "13.0", "2.15.0").seen
    assert "built for the CPU only" in judge_torch(False, None, "2.15.0+cpu").seen


def test_a_product_is_checked_to_the_last_bit() -> None:
    devices = [torch.device("cpu")]
    assert judge_products(devices, torch.mm, side=64).status == "passed"

    def one_wrong_bit(left: Any, right: Any) -> Any:
        product = torch.mm(left, right)
        product[3, 5] += 1
        return product

    outcome = judge_products(devices, one_wrong_bit, side=64)
    assert outcome.status == "failed"
    assert "cpu float32: 1 of 4,096 numbers are wrong" in outcome.seen
