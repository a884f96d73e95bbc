"""Loads weights from a local file into a model, without running any code from the file."""

from __future__ import annotations

import argparse
import struct
import zipfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, Literal

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from stoker.errors import UserError

# Where training programs save a model's weights; the averaged ones first, because those are published.
_PARTS = ("state_dict_ema", "model_ema", "state_dict", "model")
# Prefixes that wrappers add to every name: DDP and torch's averaged model, torch.compile.
_WRAPPERS = ("module.", "_orig_mod.")
_NAMED = 5


@dataclass(frozen=True)
class WeightsReport:
    """What was loaded, and from where."""

    path: Path
    file_format: Literal["safetensors", "torch"]
    part: str | None
    """The entry of the file with the weights; None if the file has nothing else."""
    loaded: int
    """Number of tensors."""
    skipped: tuple[str, ...]
    """The classifier's tensors, if the file has another number of classes: they keep their random values."""


def load_weights(model: nn.Module, path: Path | str) -> WeightsReport:
    """Loads all weights or none; only a classifier of another size is skipped, and reported."""
    path = Path(path)
    file_format = _recognise(path)
    content = _read_safetensors(path) if file_format == "safetensors" else _read_torch(path)
    part = next((name for name in _PARTS if isinstance(content.get(name), Mapping) and content[name]), None)
    found = _unwrapped(content if part is None else content[part], path)

    own = model.state_dict()
    skipped = _other_classifier(model, own, found)
    _check_fit(path, own, {name: value for name, value in found.items() if name not in skipped}, skipped)
    taken = {name: value for name, value in found.items() if name in own and name not in skipped}
    model.load_state_dict(taken, strict=False)
    return WeightsReport(path, file_format, part, len(taken), tuple(sorted(skipped)))


def _recognise(path: Path) -> Literal["safetensors", "torch"]:
    """The format, from the file's first bytes rather than its name."""
    try:
        with path.open("rb") as stream:
            head = stream.read(9)
    except OSError as error:
        raise UserError("weights-unreadable", f"weights: {path}: {error.strerror}", hint="weights=<file>") from None
    if head[:4] == b"PK\x03\x04":
        return "torch"
    if len(head) == 9 and head[8:] == b"{" and struct.unpack("<Q", head[:8])[0] < path.stat().st_size:
        return "safetensors"
    if head[:1] == b"\x80":
        raise UserError(
            "weights-old-format",
            f"weights: {path} is a bare pickle, as torch wrote before version 1.6",
            why="such a file can run code when it is loaded; only safetensors and zip files of plain tensors are read",
            hint="if you trust it, convert it: torch.save(torch.load(old, weights_only=True), new)",
        )
    raise UserError(
        "weights-unknown-format",
        f"weights: {path} is neither safetensors nor a torch checkpoint",
        hint="it may be incomplete: download it again",
    )


def _read_safetensors(path: Path) -> dict[str, Any]:
    try:
        return dict(safetensors.torch.load_file(path))
    except (SafetensorError, OSError) as error:
        raise _damaged(path, error) from None


def _read_torch(path: Path) -> dict[str, Any]:
    try:
        with zipfile.ZipFile(path) as archive:  # before torch.load, which trusts these parts
            if any(name.endswith("/constants.pkl") for name in archive.namelist()):
                raise _damaged(path, "it is a TorchScript program, not a table of tensors")
            # torch stores without compressing; a compressed entry could grow a thousandfold in memory.
            if any(entry.compress_type != zipfile.ZIP_STORED for entry in archive.infolist()):
                raise _damaged(path, "it is compressed, which torch never does")
            # torch does not check the checksums, and would train on with flipped bits.
            if (entry_name := archive.testzip()) is not None:
                raise _damaged(path, f"the checksum of {entry_name} is wrong")
        # weights_only: an unpickler that builds only tensors and plain containers. timm saves its arguments beside the
        # weights, as a Namespace, which is harmless.
        with torch.serialization.safe_globals([argparse.Namespace]):
            content = torch.load(path, map_location="cpu", weights_only=True)
    except UnpicklingError as error:
        raise UserError(
            "weights-not-plain",
            f"weights: {path} contains more than tensors: {_global_in(error)}",
            why="loading it would run code from the file; nothing was run",
            hint="if you trust the file, save only its state_dict: safetensors.torch.save_file(state_dict, new)",
        ) from None
    except UserError:
        raise
    except Exception as error:  # damaged pickles raise anything: IndexError, AttributeError, TypeError
        raise _damaged(path, error) from None
    if not isinstance(content, Mapping):
        raise _damaged(path, f"it contains a {type(content).__name__} instead of named tensors")
    return dict(content)


def _unwrapped(tensors: Mapping[Any, Any], path: Path) -> dict[str, Tensor]:
    # n_averaged: the counter of torch's AveragedModel, which torchvision saves as model_ema.
    found = {name: value for name, value in tensors.items() if name != "n_averaged"}
    wrong = [str(name) for name, value in found.items() if not (isinstance(name, str) and isinstance(value, Tensor))]
    if wrong or not found:
        raise UserError(
            "weights-missing",
            f"weights: {path} has no named tensors" + (f", but {_listed(wrong)}" if wrong else ""),
            hint=f"they must be at the top level of the file or in {', '.join(_PARTS)}",
        )
    # Only a prefix of every name is a wrapper's; a network may have a part called `module`.
    while prefix := next((p for p in _WRAPPERS if all(name.startswith(p) for name in found)), None):
        found = {name.removeprefix(prefix): value for name, value in found.items()}
    return found


def _other_classifier(model: nn.Module, own: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> set[str]:
    """The names of the classifier's tensors, if they have other shapes in the file."""
    config: dict[str, Any] = getattr(model, "pretrained_cfg", None) or {}
    named = config.get("classifier") or ()
    heads = tuple(f"{head}." for head in ((named,) if isinstance(named, str) else named))
    names = {name for name in own.keys() & found.keys() if name.startswith(heads)} if heads else set()
    # The first dimension is the number of classes; if others differ, it is another network.
    differ = {name for name in names if own[name].shape != found[name].shape}
    if any(own[name].shape[1:] != found[name].shape[1:] for name in differ):
        return set()
    return names if differ else set()


def _check_fit(path: Path, own: Mapping[str, Tensor], found: Mapping[str, Tensor], skipped: set[str]) -> None:
    missing = [name for name in own if name not in found and name not in skipped]
    unexpected = [name for name in found if name not in own]
    shapes = [
        f"{name} {tuple(found[name].shape)} for {tuple(own[name].shape)}"
        for name in own
        if name in found and own[name].shape != found[name].shape
    ]
    parts = [
        f"{len(names)} {what}: {_listed(names)}"
        for what, names in (("missing", missing), ("unexpected", unexpected), ("of another shape", shapes))
        if names
    ]
    if parts:
        raise UserError(
            "weights-do-not-fit",
            f"weights: {path} does not fit this model; {'; '.join(parts)}",
            why="a partly loaded network would train, and be silently worse",
            hint="set model to the architecture that the file was saved from",
        )


def _listed(names: Iterable[str]) -> str:
    listed = list(names)
    return ", ".join(listed[:_NAMED]) + (f" and {len(listed) - _NAMED} more" if len(listed) > _NAMED else "")


def _global_in(error: UnpicklingError) -> str:
    """The forbidden name in torch's long explanation."""
    lines = [line for line in str(error).splitlines() if "GLOBAL" in line or "Unsupported" in line]
    return (lines or str(error).splitlines() or ["something else"])[0].strip()[:200]


def _damaged(path: Path, reason: object) -> UserError:
    line = next(iter(str(reason).splitlines()), type(reason).__name__)
    return UserError(
        "weights-damaged",
        f"weights: {path} cannot be read: {line}",
        hint="it may be incomplete: download it again",
    )
