"""Datasheets of accelerators, shipped or from a user's YAML: memory, bandwidth, peak and published speed."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, Literal

import yaml

from stoker.core.errors import UsageError, did_you_mean

NumberFormat = Literal["fp32", "tf32", "fp16", "bf16"]
NUMBER_FORMATS: tuple[NumberFormat, ...] = ("fp32", "tf32", "fp16", "bf16")
GIB = 1024**3
FILE_ENDINGS = (".yaml", ".yml")
FIELDS = "title, vram_gib, memory_gb_per_s, peak_tflops: {fp32: …, fp16: …}, pcie_gb_per_s, source"
_OPTIONAL = (
    "interconnect_gb_per_s", "compute_capability", "device_names", "resnet50_images_per_second", "resnet50_source",
)  # fmt: skip
_REQUIRED = ("title", "vram_gib", "memory_gb_per_s", "peak_tflops", "pcie_gb_per_s", "source")
# A thousand times today's largest device: the unit is wrong, bytes instead of GB or FLOP/s instead of TFLOP/s.
_LARGEST = {"vram_gib": 1e5, "memory_gb_per_s": 1e7, "pcie_gb_per_s": 1e5, "interconnect_gb_per_s": 1e6}
_LARGEST_TFLOPS = 1e7


@dataclass(frozen=True)
class Datasheet:
    """One accelerator: its memory, bandwidths and peak speeds."""

    name: str
    """Short, as `--gpu` takes it: a100-80."""
    title: str
    vram_bytes: int
    """The device's total capacity as torch reports it."""
    memory_bytes_per_second: float
    peak_flops: Mapping[NumberFormat, float]
    """Dense FLOP/s by number format; formats that the device lacks are absent."""
    pcie_bytes_per_second: float
    """One direction."""
    source: str
    interconnect_bytes_per_second: float | None = None
    """To other accelerators in the node, one direction; None where they are connected by PCIe."""
    device_names: tuple[str, ...] = ()
    resnet50_images_per_second: float | None = None
    """Published training rate at 224 px; None where we know of none."""
    resnet50_source: str | None = None
    is_cpu: bool = False

    @property
    def peer_bytes_per_second(self) -> float:
        """To another accelerator of the node."""
        return self.interconnect_bytes_per_second or self.pcie_bytes_per_second

    def peak(self, precision: str, matmul_precision: str = "high") -> float | None:
        """FLOP/s for a config's `precision` and `matmul_precision`; None where the device lacks that format."""
        if precision == "16-mixed":
            return self.peak_flops.get("fp16")
        if precision == "bf16-mixed":
            return self.peak_flops.get("bf16")
        return self.peak_flops["tf32" if matmul_precision != "highest" and "tf32" in self.peak_flops else "fp32"]


@cache
def known_datasheets() -> Mapping[str, Datasheet]:
    """The datasheets that ship with stoker, by name."""
    text = resources.files("stoker.profile").joinpath("datasheets.yaml").read_text()
    return {name: _sheet(name, fields, "datasheets.yaml") for name, fields in yaml.safe_load(text).items()}


def load_datasheet(name_or_path: str) -> Datasheet:
    """The datasheet with this name (`a100-80`, also A100_80), or in this YAML file.

    Raises UsageError: `unknown-gpu` with the closest names, `datasheet-invalid` with the field.
    """
    if name_or_path.lower().endswith(FILE_ENDINGS):
        return _read_file(Path(name_or_path))
    known = known_datasheets()
    name = name_or_path.strip().lower().replace("_", "-").replace(" ", "-")
    if name in known:
        return known[name]
    raise UsageError(
        "unknown-gpu",
        f"no datasheet for {name_or_path!r}{_nearest(name, known)}",
        why="memory and speed are computed from the datasheet",
        hint=f"use one of {', '.join(known)}; for a card we don't ship, pass a YAML datasheet with {FIELDS}",
    )


def datasheet_for_device(device_name: str) -> Datasheet | None:
    """The datasheet of the device with this torch name; None rather than that of a similar device."""
    for sheet in known_datasheets().values():
        if any(fnmatchcase(device_name.strip(), pattern) for pattern in sheet.device_names):
            return sheet
    return None


def _nearest(name: str, known: Mapping[str, Datasheet]) -> str:
    # 'a100' and '3090' are not typos but parts of several names.
    alike = [other for other in known if name and (other.startswith(name) or other.endswith(name))]
    meant = f"did you mean {' or '.join(alike)}?" if alike else did_you_mean(name, known)
    return f"; {meant}" if meant else ""


def _read_file(path: Path) -> Datasheet:
    try:
        fields = yaml.safe_load(path.read_text())
    except OSError as error:
        raise UsageError(
            "datasheet-unreadable", f"{path}: {error.strerror}", hint="check the path after --gpu"
        ) from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise _invalid(str(path), f"not valid YAML: {str(error).splitlines()[0]}") from None
    # Like the shipped file, with a name above the fields; or the fields alone, named after the file.
    if isinstance(fields, dict) and len(fields) == 1 and isinstance(next(iter(fields.values())), dict):
        name, fields = next(iter(fields.items()))
        return _sheet(str(name), fields, str(path))
    return _sheet(path.stem, fields, str(path))


def _sheet(name: str, fields: Any, where: str) -> Datasheet:
    if not isinstance(fields, dict):
        raise _invalid(where, "not a mapping of fields")
    for key in fields:
        if key not in _REQUIRED + _OPTIONAL:
            meant = did_you_mean(str(key), _REQUIRED + _OPTIONAL)
            raise _invalid(where, f"unknown field {key!r}" + (f"; {meant}" if meant else ""))
    for key in _REQUIRED:
        if fields.get(key) is None:
            raise _invalid(where, f"{key} is missing")
    names = fields.get("device_names") or []
    if not isinstance(names, list) or not all(isinstance(entry, str) for entry in names):
        raise _invalid(where, f"device_names: expected a list of names, got {names!r}")
    interconnect = fields.get("interconnect_gb_per_s")
    rate = fields.get("resnet50_images_per_second")
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
        device_names=tuple(names),
        resnet50_images_per_second=None if rate is None else _positive(fields, "resnet50_images_per_second", where),
        resnet50_source=fields.get("resnet50_source"),
    )


def _peaks(value: Any, where: str) -> dict[NumberFormat, float]:
    if not isinstance(value, dict) or not value:
        raise _invalid(where, f"peak_tflops: expected a mapping of {', '.join(NUMBER_FORMATS)}, got {value!r}")
    for name in value:
        if name not in NUMBER_FORMATS:
            raise _invalid(where, f"peak_tflops: expected {', '.join(NUMBER_FORMATS)}, got {name!r}")
    if "fp32" not in value:
        raise _invalid(where, "peak_tflops: fp32 is missing, which the loss and the update are computed in")
    return {
        name: _number(value[name], f"peak_tflops: {name}", where, _LARGEST_TFLOPS) * 1e12
        for name in NUMBER_FORMATS
        if name in value
    }


def _positive(fields: Mapping[str, Any], key: str, where: str) -> float:
    return _number(fields[key], key, where, _LARGEST.get(key, math.inf))


def _number(value: Any, key: str, where: str, largest: float) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise _invalid(where, f"{key}: expected a positive number, got {value!r}")
    if value > largest:
        raise _invalid(where, f"{key}: {value:g} is a thousand times the largest device there is; wrong unit?")
    return float(value)


def _invalid(where: str, problem: str) -> UsageError:
    return UsageError("datasheet-invalid", f"{where}: {problem}", hint=f"a datasheet has the fields {FIELDS}")


PACKING_SPEEDUP = 1.5
"""Images a second from shards of 500 px and quality 90, beside the original files, where decoding limits: 1.51 (1.30 to
1.66) in results/loaders, 1.55 (1.39 to 1.57) in results/cures."""


@dataclass(frozen=True)
class PublishedRate:
    """Images a second that an accelerator trains ResNet-50 with at 224 px, and who measured it."""

    name: str
    images_per_second: float
    source: str


def published_rate(name: str) -> PublishedRate:
    """The published figure for an accelerator; raises UsageError where we know of none."""
    sheet = load_datasheet(name)
    if sheet.resnet50_images_per_second is None:
        known = [other.name for other in known_datasheets().values() if other.resnet50_images_per_second is not None]
        raise UsageError(
            "no-published-rate",
            f"we know of no published ResNet-50 training speed for {sheet.title}",
            why="the share of it that this host can feed only means something against a measured speed",
            hint=f"--gpu {' | '.join(known)}; for any other card, `stoker plan` computes a speed from its datasheet",
        )
    return PublishedRate(sheet.name, sheet.resnet50_images_per_second, sheet.resnet50_source or sheet.source)
