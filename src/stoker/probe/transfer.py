"""How fast batches reach an accelerator, and over which link."""

from __future__ import annotations

import subprocess
import time
from contextlib import suppress
from dataclasses import replace

import torch

from stoker.facts.observed import AcceleratorFacts

QUERY = ("name", "pcie.link.gen.current", "pcie.link.gen.max", "pcie.link.width.current", "pcie.link.width.max")
# nvidia-smi takes a second or two on a host with many devices.
ANSWER_S = 10.0


def measure_transfer(device: torch.device, batch_bytes: int, seconds: float, pinned: bool) -> AcceleratorFacts | None:
    """Bytes a second from the host's memory, in pieces as large as a batch; None on a CPU.

    The link is asked about while it is busy: idle ones run at a lower speed to save power.
    """
    if device.type != "cuda":
        return None
    host = torch.empty(batch_bytes, dtype=torch.uint8, pin_memory=pinned)
    target = torch.empty_like(host, device=device)
    asked = _ask(device.index or 0)
    target.copy_(host, non_blocking=True)
    torch.cuda.synchronize(device)  # waits for the device: nothing else is measured here
    began, copied = time.perf_counter(), 0
    while time.perf_counter() - began < seconds or (asked is not None and asked.poll() is None):
        target.copy_(host, non_blocking=True)
        torch.cuda.synchronize(device)
        copied += batch_bytes
        if time.perf_counter() - began > seconds + ANSWER_S:
            break
    rate = copied / (time.perf_counter() - began)
    return replace(_answer(asked), transfer_bytes_per_second=rate, count=torch.cuda.device_count())


def read_link(line: str) -> AcceleratorFacts:
    """What a line of nvidia-smi says; what it does not know ('[N/A]') is None."""
    parts = [part.strip() for part in line.split(",")]
    name, *numbers = [*parts, *[""] * len(QUERY)][: len(QUERY)]
    generation, generation_max, width, width_max = (int(part) if part.isdigit() else None for part in numbers)
    return AcceleratorFacts(
        name=name or None,
        pcie_generation=generation,
        pcie_generation_max=generation_max,
        pcie_width=width,
        pcie_width_max=width_max,
    )


def _ask(index: int) -> subprocess.Popen[str] | None:
    uuid = str(torch.cuda.get_device_properties(index).uuid)  # indices of nvidia-smi are not those of CUDA
    command = ["nvidia-smi", f"--id=GPU-{uuid.removeprefix('GPU-')}", f"--query-gpu={','.join(QUERY)}"]
    with suppress(OSError):
        return subprocess.Popen(
            [*command, "--format=csv,noheader,nounits"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
    return None


def _answer(asked: subprocess.Popen[str] | None) -> AcceleratorFacts:
    if asked is None:
        return AcceleratorFacts()
    try:
        out, _ = asked.communicate(timeout=ANSWER_S)
    except subprocess.TimeoutExpired:
        asked.kill()
        asked.wait()
        return AcceleratorFacts()
    return read_link(out.splitlines()[0]) if asked.returncode == 0 and out else AcceleratorFacts()
