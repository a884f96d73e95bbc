"""Accelerators: datasheets, published speeds, the link to the device, and how busy it is."""

from __future__ import annotations

import math
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, Literal

import torch
import yaml

from stoker.clock.observed import AcceleratorFacts
from stoker.errors import UsageError, did_you_mean

# Datasheets of accelerators: memory, bandwidth and peaks, from what ships with stoker or a file of the user's.

Format = Literal["fp32", "tf32", "fp16", "bf16"]
FORMATS: tuple[Format, ...] = ("fp32", "tf32", "fp16", "bf16")
GIB = 1024**3
FILE_ENDINGS = (".yaml", ".yml")
EXAMPLE = "title, vram_gib, memory_gb_per_s, peak_tflops: {fp32: …, fp16: …}, pcie_gb_per_s, source"
_OPTIONAL = (
    "interconnect_gb_per_s", "compute_capability", "device_names", "resnet50_images_per_second", "resnet50_source",
)  # fmt: skip
_REQUIRED = ("title", "vram_gib", "memory_gb_per_s", "peak_tflops", "pcie_gb_per_s", "source")
# A device of 1,000 times today's largest is a slip of units: bytes instead of GB, FLOP/s instead of TFLOP/s.
_LARGEST = {"vram_gib": 1e5, "memory_gb_per_s": 1e7, "pcie_gb_per_s": 1e5, "interconnect_gb_per_s": 1e6}
_LARGEST_TFLOPS = 1e7


@dataclass(frozen=True)
class Datasheet:
    """What one accelerator has, and can do at best."""

    name: str
    """Short, as `--gpu` takes it: a100-80."""
    title: str
    vram_bytes: int
    """As torch shows the device's total capacity."""
    memory_bytes_per_second: float
    peak_flops: Mapping[Format, float]
    """Dense FLOP/s by number format; one that the device lacks is absent."""
    pcie_bytes_per_second: float
    """One direction."""
    source: str
    interconnect_bytes_per_second: float | None = None
    """To other accelerators in the node, one direction; None where it is PCIe."""
    compute_capability: str | None = None
    device_names: tuple[str, ...] = ()
    resnet50_images_per_second: float | None = None
    """Published training rate at 224 px; None where nobody published one that we know."""
    resnet50_source: str | None = None
    is_cpu: bool = False

    @property
    def peer_bytes_per_second(self) -> float:
        """To another accelerator of the node."""
        return self.interconnect_bytes_per_second or self.pcie_bytes_per_second

    def peak(self, precision: str, matmul_precision: str = "high") -> float | None:
        """FLOP/s for a config's `precision` and `matmul_precision`; None where the device has no such format."""
        return self.peak_flops.get(number_format(precision, matmul_precision, self))


def number_format(precision: str, matmul_precision: str, sheet: Datasheet) -> Format:
    """The format in which the products of a config are computed on this device."""
    if precision == "16-mixed":
        return "fp16"
    if precision == "bf16-mixed":
        return "bf16"
    return "tf32" if matmul_precision != "highest" and "tf32" in sheet.peak_flops else "fp32"


def known_datasheets() -> dict[str, Datasheet]:
    """Those that ship with stoker, by name."""
    return dict(_shipped())


def load_datasheet(name_or_path: str) -> Datasheet:
    """By name (`a100-80`, also A100_80), or from a YAML file that describes one accelerator.

    Raises UsageError: `unknown-gpu` with the nearest names, `datasheet-invalid` with the field.
    """
    if name_or_path.lower().endswith(FILE_ENDINGS):
        return _read_file(Path(name_or_path))
    known = _shipped()
    name = name_or_path.strip().lower().replace("_", "-").replace(" ", "-")
    if name in known:
        return known[name]
    raise UsageError(
        "unknown-gpu",
        f"no datasheet for {name_or_path!r}{_nearest(name, known)}",
        why="memory and speed are computed from its datasheet",
        hint=f"one of {', '.join(known)}; or a YAML file with {EXAMPLE}",
    )


def datasheet_for_device(device_name: str) -> Datasheet | None:
    """The one whose device torch calls by this name; None where we have none, rather than a relative's."""
    for sheet in _shipped().values():
        if any(fnmatchcase(device_name.strip(), pattern) for pattern in sheet.device_names):
            return sheet
    return None


def _nearest(name: str, known: Mapping[str, Datasheet]) -> str:
    # 'a100' and '3090' are no slips of the finger: several begin or end like that.
    alike = [other for other in known if name and (other.startswith(name) or other.endswith(name))]
    meant = f"did you mean {' or '.join(alike)}?" if alike else did_you_mean(name, known)
    return f"; {meant}" if meant else ""


@cache
def _shipped() -> Mapping[str, Datasheet]:
    text = resources.files("stoker.machine").joinpath("datasheets.yaml").read_text()
    return {name: _sheet(name, fields, "datasheets.yaml") for name, fields in yaml.safe_load(text).items()}


def _read_file(path: Path) -> Datasheet:
    try:
        fields = yaml.safe_load(path.read_text())
    except OSError as error:
        raise UsageError("datasheet-unreadable", f"{path}: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UsageError("datasheet-invalid", f"{path} is no YAML: {str(error).splitlines()[0]}") from None
    # As the file that ships: one name above the fields; or the fields alone, then the file gives the name.
    if isinstance(fields, dict) and len(fields) == 1 and isinstance(next(iter(fields.values())), dict):
        name, fields = next(iter(fields.items()))
        return _sheet(str(name), fields, str(path))
    return _sheet(path.stem, fields, str(path))


def _sheet(name: str, fields: Any, where: str) -> Datasheet:
    if not isinstance(fields, dict):
        raise _invalid(where, "holds no fields")
    for key in fields:
        if key not in _REQUIRED + _OPTIONAL:
            meant = did_you_mean(str(key), _REQUIRED + _OPTIONAL)
            raise _invalid(where, f"has no field {key!r}" + (f"; {meant}" if meant else ""))
    for key in _REQUIRED:
        if fields.get(key) is None:
            raise _invalid(where, f"lacks {key}")
    names = fields.get("device_names") or []
    if not isinstance(names, list) or not all(isinstance(entry, str) for entry in names):
        raise _invalid(where, f"device_names: {names!r} is no list of names")
    interconnect = fields.get("interconnect_gb_per_s")
    rate = fields.get("resnet50_images_per_second")
    capability = fields.get("compute_capability")
    return Datasheet(
        name=name,
        title=str(fields["title"]),
        vram_bytes=round(_positive(fields, "vram_gib", where) * GIB),
        memory_bytes_per_second=_positive(fields, "memory_gb_per_s", where) * 1e9,
        peak_flops=_peaks(fields["peak_tflops"], where),
        pcie_bytes_per_second=_positive(fields, "pcie_gb_per_s", where) * 1e9,
        source=str(fields["source"]),
        interconnect_bytes_per_second=(
            None if interconnect is None else _positive(fields, "interconnect_gb_per_s", where) * 1e9
        ),
        compute_capability=None if capability is None else str(capability),
        device_names=tuple(names),
        resnet50_images_per_second=None if rate is None else _positive(fields, "resnet50_images_per_second", where),
        resnet50_source=fields.get("resnet50_source"),
    )


def _peaks(value: Any, where: str) -> dict[Format, float]:
    if not isinstance(value, dict) or not value:
        raise _invalid(where, f"peak_tflops: {value!r} is no mapping of number formats ({', '.join(FORMATS)})")
    for name in value:
        if name not in FORMATS:
            raise _invalid(where, f"peak_tflops: {name!r} is none of {', '.join(FORMATS)}")
    if "fp32" not in value:
        raise _invalid(where, "peak_tflops lacks fp32, in which the loss and the update are computed")
    return {
        name: _number(value[name], f"peak_tflops: {name}", where, _LARGEST_TFLOPS) * 1e12
        for name in FORMATS
        if name in value
    }


def _positive(fields: Mapping[str, Any], key: str, where: str) -> float:
    return _number(fields[key], key, where, _LARGEST.get(key, math.inf))


def _number(value: Any, key: str, where: str, largest: float) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise _invalid(where, f"{key}: {value!r} is no positive number")
    if value > largest:
        raise _invalid(where, f"{key}: {value:g} is a thousand times the largest there is; a slip of units?")
    return float(value)


def _invalid(where: str, problem: str) -> UsageError:
    return UsageError("datasheet-invalid", f"{where} {problem}", hint=f"a datasheet has {EXAMPLE}")


# Published speeds of accelerators: figures that somebody measured, with their source.


@dataclass(frozen=True)
class PublishedRate:
    """What one accelerator takes in ResNet-50 training at 224 px."""

    name: str
    images_per_second: float
    source: str


def published_rate(name: str) -> PublishedRate:
    """The published figure for an accelerator; raises UsageError where nobody published one that we know."""
    sheet = load_datasheet(name)
    if sheet.resnet50_images_per_second is None:
        known = [other.name for other in known_datasheets().values() if other.resnet50_images_per_second is not None]
        raise UsageError(
            "no-published-rate",
            f"nobody published what {sheet.title} takes in ResNet-50 training, as far as we know",
            why="how much of it this host can feed is only worth saying against a measured figure",
            hint=f"--gpu {' | '.join(known)}; stoker plan computes a rate for any datasheet",
        )
    return PublishedRate(sheet.name, sheet.resnet50_images_per_second, sheet.resnet50_source or sheet.source)


# How fast batches reach an accelerator, and over which link.

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


# How much of its time an accelerator has work while it is fed: many small kernels leave gaps between them.

PROFILED_STEPS = 5


def device_busy_share(step: Callable[[], object], device: torch.device) -> float | None:
    """Share of the time of a few steps in which some kernel ran; None on a CPU, or where the profiler saw none."""
    if device.type != "cuda":
        return None
    from torch.profiler import ProfilerActivity, profile

    step()
    torch.cuda.synchronize(device)  # waits for the device: a trial, not training
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(PROFILED_STEPS):
            step()
        torch.cuda.synchronize(device)
    ranges = [
        (event.time_range.start, event.time_range.end)
        for event in profiler.events() or ()
        if event.device_type.name == "CUDA"
    ]
    return covered_share(ranges)


def covered_share(ranges: Iterable[tuple[float, float]]) -> float | None:
    """Share of the time from the first begin to the last end that lies in any of the ranges; they may overlap."""
    ordered = sorted(ranges)
    if not ordered:
        return None
    first, reached = ordered[0][0], ordered[0][0]
    covered = 0.0
    for begin, end in ordered:
        if end > reached:
            covered += end - max(begin, reached)
            reached = end
    return covered / (reached - first) if reached > first else None
