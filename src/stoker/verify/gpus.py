"""Checks of the accelerators: count, driver, link, clocks, memory errors, and whether a product comes out right.

What the driver knows comes from nvidia-smi; a field that it does not know is None, and nothing is concluded from it.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from stoker.core.finding import Finding
from stoker.tasks.checks import Check, Subject, failed, passed, unknown

if TYPE_CHECKING:
    import torch

TIMEOUT_S = 10.0
SIDE = 1024
_XID = re.compile(r"NVRM: Xid \((?P<device>[^)]*)\): (?P<number>\d+)")
# By NVIDIA's list of Xid messages, these come from a program's mistake or its end (13, 31, 43, 45), or record a repair
# (63); all others can mean a damaged device.
HARMLESS_XIDS = {13, 31, 43, 45, 63}


def query_gpus(*fields: str) -> list[dict[str, str | None]] | None:
    """These fields of every GPU, as nvidia-smi prints them; None where it cannot tell."""
    command = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
    except (OSError, subprocess.SubprocessError):
        return None
    if done.returncode != 0:
        return None  # no driver, or a field that this version does not know
    rows = [[part.strip() for part in line.split(",")] for line in done.stdout.splitlines() if line.strip()]
    return [
        {name: None if part.startswith("[") or part == "N/A" else part for name, part in zip(fields, row, strict=False)}
        for row in rows
    ]


def check_gpus(subject: Subject) -> Finding:
    """As many GPUs as the config wants, all alike."""
    wanted = subject.config.devices
    seen = query_gpus("name", "driver_version")
    if seen is None:
        return unknown("nvidia-smi does not answer", "install NVIDIA's driver, or check it with: nvidia-smi")
    present = min(len(seen), subject.machine.accelerators or 0)
    names = sorted({str(gpu["name"]) for gpu in seen})
    facts = {
        "present": present,
        "wanted": wanted,
        "names": names,
        "driver": seen[0]["driver_version"] if seen else None,
    }
    if wanted > present:
        return failed(f"the config wants {wanted} GPUs, and {present} are here", f"devices={present}", **facts)
    if len(names) > 1 and wanted > 1:
        return failed(
            f"the GPUs differ ({', '.join(names)}): every step waits for the slowest",
            "CUDA_VISIBLE_DEVICES= with GPUs of one kind",
            **facts,
        )
    return passed(f"{wanted} of {present} {names[0]}, driver {facts['driver']}", **facts)


def check_torch_sees_gpus(_subject: Subject) -> Finding:
    import torch

    return judge_torch(torch.cuda.is_available(), torch.version.cuda, torch.__version__)


def judge_torch(available: bool, cuda: str | None, version: str) -> Finding:
    """Whether torch can use the GPUs that the kernel shows."""
    if cuda is None and not available:
        return failed(f"torch {version} is built for the CPU only", "pip install a torch build with CUDA or ROCm")
    if not available:
        return failed(
            f"torch {version} cannot use the GPU: it needs a driver for CUDA {cuda}",
            "a newer NVIDIA driver, or a torch build for an older CUDA; `nvidia-smi` shows the driver's version",
        )
    return passed(f"torch {version} with CUDA {cuda}")


def check_link(_subject: Subject) -> Finding:
    """Every lane of the PCIe link works. Its generation says nothing: an idle link runs slower to save power."""
    seen = query_gpus("index", "pcie.link.width.current", "pcie.link.width.max")
    known = [
        (gpu["index"], _number(gpu["pcie.link.width.current"]), _number(gpu["pcie.link.width.max"]))
        for gpu in seen or []
    ]
    widths = [(index, now, most) for index, now, most in known if now is not None and most is not None]
    if not widths:
        return unknown("nvidia-smi does not report the link")
    narrow = [(index, now, most) for index, now, most in widths if now < most]
    facts = {"widths": [now for _, now, _ in widths], "widest": [most for _, _, most in widths]}
    if narrow:
        said = ", ".join(f"GPU {index} has {now:g} of {most:g} lanes" for index, now, most in narrow)
        return failed(said, "reseat the card or use another slot; a virtual machine may report it wrongly", **facts)
    return passed(f"{widths[0][1]:g} lanes each", **facts)


def check_clocks(_subject: Subject) -> Finding:
    """No GPU is slowed down by heat or by its power supply."""
    # Drivers from 535 on call it an event, older ones throttling.
    for prefix in ("clocks_event_reasons", "clocks_throttle_reasons"):
        reasons = [f"{prefix}.hw_slowdown", f"{prefix}.hw_thermal_slowdown", f"{prefix}.sw_thermal_slowdown"]
        seen = query_gpus("index", "clocks.sm", "clocks.max.sm", "temperature.gpu", *reasons)
        if seen:
            break
    else:
        return unknown("nvidia-smi does not report clocks")
    slowed = [
        f"GPU {gpu['index']} ({', '.join(name.rpartition('.')[2] for name in reasons if gpu[name] == 'Active')}, "
        f"{gpu['temperature.gpu']} °C)"
        for gpu in seen
        if any(gpu[name] == "Active" for name in reasons)
    ]
    facts = {"sm_mhz": [gpu["clocks.sm"] for gpu in seen], "max_sm_mhz": [gpu["clocks.max.sm"] for gpu in seen]}
    if slowed:
        return failed(
            f"slowed down: {', '.join(slowed)}", "check cooling and power: nvidia-smi -q -d PERFORMANCE", **facts
        )
    return passed(f"up to {seen[0]['clocks.max.sm']} MHz, none slowed down by heat or power", **facts)


def check_memory_errors(_subject: Subject) -> Finding:
    """No uncorrected memory errors, and no serious Xid message of the driver in the kernel's log."""
    seen = query_gpus("index", "ecc.errors.uncorrected.volatile.total")
    errors = [(gpu["index"], _number(gpu["ecc.errors.uncorrected.volatile.total"])) for gpu in seen or []]
    xids = read_xids()
    facts = {"ecc_uncorrected": [count for _, count in errors], "xids": xids}
    broken = [f"GPU {index}: {count:g} uncorrected memory errors" for index, count in errors if count]
    serious = sorted({number for number in xids or () if number not in HARMLESS_XIDS})
    if serious:
        broken.append(f"the kernel's log has Xid {', '.join(map(str, serious))}")
    if broken:
        return failed("; ".join(broken), "nvidia-smi --gpu-reset, a reboot, or another machine", **facts)
    ecc = "no uncorrected memory errors" if any(count is not None for _, count in errors) else "ECC is not reported"
    log = "no serious Xid messages" if xids is not None else "the kernel's log cannot be read (sudo dmesg)"
    both = any(count is not None for _, count in errors) or xids is not None
    return passed(f"{ecc}; {log}", **facts) if both else unknown(f"{ecc}; {log}", "sudo dmesg | grep Xid", **facts)


def read_xids() -> list[int] | None:
    """The numbers of the driver's error messages since the host started; None where the log cannot be read."""
    try:
        done = subprocess.run(["dmesg"], capture_output=True, text=True, timeout=TIMEOUT_S, errors="replace")
    except (OSError, subprocess.SubprocessError):
        return None
    if done.returncode != 0:
        return None
    return [int(match["number"]) for match in _XID.finditer(done.stdout)]


def check_product(_subject: Subject) -> Finding:
    """A large matrix product on each GPU has the right result, to the last bit."""
    import torch

    if not torch.cuda.is_available():
        return unknown("torch cannot use the GPU")
    devices = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    return judge_products(devices, torch.mm)


def judge_products(
    devices: Sequence[torch.device], multiply: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], side: int = SIDE
) -> Finding:
    """Compares products with those of the host. The factors are -1, 0 and 1: sums of a thousand such products are exact
    in float32, TF32 and float16, so that any difference is an error of the hardware."""
    import torch

    generator = torch.Generator().manual_seed(0)
    left, right = (torch.randint(-1, 2, (side, side), generator=generator) for _ in range(2))
    expected = (left.double() @ right.double()).float()
    wrong: list[str] = []
    facts: dict[str, Any] = {}
    for device in devices:
        for dtype in (torch.float32, torch.float16):
            product = multiply(left.to(device, dtype), right.to(device, dtype)).cpu().float()
            count = int((product != expected).sum())
            name = f"{device} {str(dtype).removeprefix('torch.')}"
            facts[name] = count
            if count:
                wrong.append(f"{name}: {count:,} of {side * side:,} numbers are wrong")
    if wrong:
        return failed("; ".join(wrong), "do not train on this device: CUDA_VISIBLE_DEVICES= without it", **facts)
    return passed(f"{side} x {side} products in float32 and float16 are exact on {len(devices)} devices", **facts)


def _number(text: str | None) -> float | None:
    try:
        return None if text is None else float(text)
    except ValueError:
        return None


CHECKS = (
    Check("gpus", "machine", "as many GPUs as the config wants, of one kind", check_gpus, on_gpu=True),
    Check("torch-and-driver", "machine", "torch can use the GPUs", check_torch_sees_gpus, on_gpu=True),
    Check("gpu-link", "machine", "the width of the PCIe link", check_link, on_gpu=True),
    Check("gpu-clocks", "machine", "clocks that are not slowed down", check_clocks, on_gpu=True),
    Check("gpu-errors", "machine", "memory errors (ECC) and Xid messages", check_memory_errors, on_gpu=True),
    Check("gpu-product", "machine", "a matrix product with the right result", check_product, on_gpu=True),
)
