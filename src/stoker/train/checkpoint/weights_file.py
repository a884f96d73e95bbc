"""What a file with weights holds: its tables of named tensors, and what it says about its origin.

safetensors, and torch.save's zip files as Lightning, timm, torchvision's scripts and others write them. Nothing in a
file is executed (`pickled`).
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import safetensors
import safetensors.torch
import xxhash
from safetensors import SafetensorError
from torch import Tensor

from stoker.core.errors import UserError
from stoker.train.checkpoint.pickled import Foreign, Name, NotReadable, SavedTensor, TorchFile

FileFormat = Literal["safetensors", "torch", "stoker"]
# Where training programs save a network's weights; other entries that hold tensors come after them.
PARTS = ("state_dict_ema", "model_ema", "state_dict", "model", "current_model_state")
# Names of averages: `ema_model.module.fc.weight` in Lightning's table, `model_ema` in torchvision's file.
_AVERAGED = re.compile(r"(?:^|_)(?:ema|swa|avg|averaged?)(?:_|$)", re.IGNORECASE)
# Lightning's WeightAveraging saves the average as the state_dict, and the weights themselves under this name.
_WEIGHTS_BESIDE_AVERAGE = "current_model_state"
# Where files name their architecture: timm; torchvision's and timm's arguments; a Lightning module's arguments.
_MODEL_KEYS = ("arch", "model_name", "model", "model_arch", "architecture", "backbone")
_CHUNK_BYTES = 1 << 22
NAMED = 5


@dataclass(frozen=True)
class Table:
    """Named tensors of a file, possibly still unread, possibly with other things beside them."""

    part: str | None
    """The entry of the file that they are in; None if the file has nothing else."""
    values: Mapping[Any, Any]
    averaged: bool
    """Whether the file calls them an average; inside a table, names can say so too."""


@dataclass(frozen=True)
class WeightsFile:
    """A file with weights, and what it says about itself; None where it says nothing."""

    path: Path
    file_format: FileFormat
    maker: str
    """Who wrote it, for people: `a Lightning 2.5.6 checkpoint`."""
    tables: tuple[Table, ...]
    epoch: int | None = None
    step: int | None = None
    model: str | None = None
    classes: tuple[str, ...] | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Config keys that the file gives besides the model: `img_size` of an exported network."""
    torch_file: TorchFile | None = None

    def tensor(self, value: Any) -> Tensor:
        """A value of a table as a tensor; raises UserError if it is something else."""
        if isinstance(value, Tensor):
            return value
        if isinstance(value, SavedTensor) and self.torch_file is not None:
            try:
                return self.torch_file.load(value)
            except NotReadable as error:
                raise damaged(self.path, error) from None
        raise UserError(
            "weights-not-plain",
            f"weights: {self.path} holds {_kind_of(value)} in place of a tensor",
            why="building it would run code that the file names; nothing was run",
            hint="save only the tensors: safetensors.torch.save_file(model.state_dict(), new)",
        )

    @property
    def origin(self) -> str:
        """Who wrote it and when, in a few words."""
        at = [f"{name} {value:,}" for name, value in (("epoch", self.epoch), ("step", self.step)) if value is not None]
        return f"{self.maker}{', ' if at else ''}{', '.join(at)}"


def open_weights(path: Path) -> WeightsFile:
    """The content of a file that is not ours; tensors of torch's files are read when they are asked for."""
    kind = recognise(path)
    return _open_safetensors(path) if kind == "safetensors" else _open_torch(path)


def recognise(path: Path) -> Literal["safetensors", "torch"]:
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
            why="such a file can run code when it is loaded; only safetensors and torch's zip files are read",
            hint="if you trust it, convert it: torch.save(torch.load(old, weights_only=True), new)",
        )
    raise UserError(
        "weights-unknown-format",
        f"weights: {path} is neither safetensors nor a torch checkpoint",
        hint="it may be incomplete: download or copy it again",
    )


def file_hash(path: Path) -> str:
    """xxh3-128 of the file, in hex."""
    digest = xxhash.xxh3_128()
    with path.open("rb") as stream:
        while chunk := stream.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def says_averaged(name: str) -> bool:
    """Whether a dotted name has a part that is called an average."""
    return any(_AVERAGED.search(part) for part in name.split("."))


def is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor | SavedTensor)


def damaged(path: Path, reason: object) -> UserError:
    line = next(iter(str(reason).splitlines()), type(reason).__name__)
    return UserError(
        "weights-damaged",
        f"weights: {path} cannot be read: {line}",
        why="none of it was loaded",
        hint="it may be incomplete: download or copy it again",
    )


def listed(names: list[str]) -> str:
    return ", ".join(names[:NAMED]) + (f" and {len(names) - NAMED} more" if len(names) > NAMED else "")


def _open_safetensors(path: Path) -> WeightsFile:
    try:
        tensors = safetensors.torch.load_file(path)
        with safetensors.safe_open(path, framework="pt") as stream:
            metadata = stream.metadata() or {}
    except (SafetensorError, OSError) as error:
        raise damaged(path, error) from None
    if not tensors:
        raise UserError("weights-missing", f"weights: {path} has no tensors", hint="weights=<another file>")
    found = WeightsFile(path, "safetensors", "safetensors", (Table(None, tensors, averaged=False),))
    if "stoker" not in metadata:
        return found
    return replace(
        found,
        maker="an export of stoker",
        epoch=_number(_parsed(metadata, "epoch")),
        step=_number(_parsed(metadata, "step")),
        model=metadata.get("model"),
        classes=_texts(_parsed(metadata, "classes")),
        settings={key: value for key in ("img_size", "crop_ratio") if (value := _parsed(metadata, key)) is not None},
    )


def _open_torch(path: Path) -> WeightsFile:
    try:
        file = TorchFile(path)
    except NotReadable as error:
        raise damaged(path, error) from None
    content = file.content.items if isinstance(file.content, Foreign) and file.content.items else file.content
    if not isinstance(content, Mapping):
        raise _without_tensors(path, _kind_of(content))
    tables = _tables(content)
    if not tables:
        others = [str(key) for key in content if isinstance(key, str)]
        raise _without_tensors(path, listed(others))
    return WeightsFile(
        path=path, file_format="torch", maker=_maker(content), tables=tables, epoch=_number(content.get("epoch")),
        step=_number(content.get("global_step")), model=_model_name(content), torch_file=file,
    )  # fmt: skip


def _tables(content: Mapping[Any, Any]) -> tuple[Table, ...]:
    """The tables of a checkpoint in the order of preference; the file itself if it is one."""
    found: dict[str, Mapping[Any, Any]] = {}
    for key in (*PARTS, *content):
        value = content.get(key)
        values = value.items if isinstance(value, Foreign) else value
        if isinstance(key, str) and isinstance(values, dict) and _holds_tensors(values):
            found.setdefault(key, values)
    if not found:
        return (Table(None, content, averaged=False),) if _holds_tensors(content) else ()
    beside = _WEIGHTS_BESIDE_AVERAGE in found
    return tuple(
        Table(part, values, averaged=says_averaged(part) or (beside and part == "state_dict"))
        for part, values in found.items()
    )


def _holds_tensors(values: Mapping[Any, Any]) -> bool:
    return any(isinstance(name, str) and is_tensor(value) for name, value in values.items())


def _maker(content: Mapping[Any, Any]) -> str:
    version = content.get("pytorch-lightning_version")
    if isinstance(version, str):
        return f"a Lightning {version[:20]} checkpoint"
    if "arch" in content and "state_dict" in content:
        return "a timm checkpoint"
    if "model" in content and "args" in content:
        return "a checkpoint of torchvision's training script"
    return "a torch file"


def _model_name(content: Mapping[Any, Any]) -> str | None:
    for holder in (content, content.get("hyper_parameters"), content.get("args")):
        if not isinstance(holder, Mapping | Foreign):
            continue
        for key in _MODEL_KEYS:
            name = holder.get(key)
            if isinstance(name, str) and 0 < len(name) <= 100 and name.isprintable():
                return name
    return None


def _number(value: Any) -> int | None:
    return value if type(value) is int and value >= 0 else None


def _parsed(metadata: Mapping[str, str], key: str) -> Any:
    try:
        return json.loads(metadata[key])
    except (KeyError, ValueError, RecursionError):
        return None


def _texts(value: Any) -> tuple[str, ...] | None:
    plain = isinstance(value, list) and value and all(isinstance(item, str) for item in value)
    return tuple(value) if plain else None


def _kind_of(value: Any) -> str:
    if isinstance(value, Foreign):
        return f"an object of {value.name[:120]}"
    return f"the name {value.text[:120]}" if isinstance(value, Name) else f"a {type(value).__name__}"


def _without_tensors(path: Path, what: str) -> UserError:
    return UserError(
        "weights-missing",
        f"weights: {path} has no named tensors" + (f", but {what}" if what else ""),
        why=f"they must be at the top level of the file or in an entry such as {', '.join(PARTS[:4])}",
        hint="save a state_dict: safetensors.torch.save_file(model.state_dict(), new)",
    )
