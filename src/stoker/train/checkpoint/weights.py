"""Loads weights from a local file into a model, without running any code from the file.

Files of other programs wrap the network: `model.`, `module.`, `_orig_mod.` before each name, an average beside the
weights, a loss or metrics with their own tensors. The prefix under which most of the model's names are found decides
which tensors are the network's.

Read are safetensors, and torch.save's zip files as Lightning, timm, torchvision's scripts and others write them
(`pickled`).
"""

from __future__ import annotations

import json
import re
import struct
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import safetensors
import safetensors.torch
import xxhash
from safetensors import SafetensorError
from torch import Tensor, nn

from stoker.core.console import Say, some
from stoker.core.errors import UserError
from stoker.train.checkpoint.folder import checkpoint_in
from stoker.train.checkpoint.format import is_ours, read_checkpoint
from stoker.train.checkpoint.pickled import Foreign, Name, NotReadable, SavedTensor, TorchFile

# Where training programs save a network's weights; other entries that hold tensors come after them.
PARTS = ("state_dict_ema", "model_ema", "state_dict", "model", "current_model_state")
# Names of averages: `ema_model.module.fc.weight` in Lightning's table, `model_ema` in torchvision's file.
_AVERAGED = re.compile(r"(?:^|_)(?:ema|swa|avg|averaged?)(?:_|$)", re.IGNORECASE)
# Lightning's WeightAveraging saves the average as the state_dict, and the weights themselves under this name.
_WEIGHTS_BESIDE_AVERAGE = "current_model_state"
# Where files name their architecture: timm; torchvision's and timm's arguments; a Lightning module's arguments.
_MODEL_KEYS = ("arch", "model_name", "model", "model_arch", "architecture", "backbone")
_CHUNK_BYTES = 1 << 22


@dataclass(frozen=True)
class Table:
    """Named tensors of a file, possibly still unread, possibly with other things beside them."""

    values: Mapping[Any, Any]
    averaged: bool
    """Whether the file calls them an average; inside a table, names can say so too."""


@dataclass(frozen=True)
class WeightsFile:
    """A file with weights, and what it says about itself; None where it says nothing."""

    path: Path
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


def _open_safetensors(path: Path) -> WeightsFile:
    try:
        tensors = safetensors.torch.load_file(path)
        with safetensors.safe_open(path, framework="pt") as stream:
            metadata = stream.metadata() or {}
    except (SafetensorError, OSError) as error:
        raise damaged(path, error) from None
    if not tensors:
        raise UserError("weights-missing", f"weights: {path} has no tensors", hint="weights=<another file>")
    found = WeightsFile(path, "safetensors", (Table(tensors, averaged=False),))
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
        raise _without_tensors(path, some(others))
    return WeightsFile(
        path=path, maker=_maker(content), tables=tables, epoch=_number(content.get("epoch")),
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
        return (Table(content, averaged=False),) if _holds_tensors(content) else ()
    beside = _WEIGHTS_BESIDE_AVERAGE in found
    return tuple(
        Table(values, averaged=says_averaged(part) or (beside and part == "state_dict"))
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


Which = Literal["ema", "raw"]
# A wrapper's own entries, which belong to no network: torch's AveragedModel counts its updates.
_COUNTERS = ("n_averaged",)
# A table counts as the network's if it has at least this share of the names in the best one.
_ENOUGH = 0.5


@dataclass(frozen=True)
class WeightsReport:
    """What was loaded, and from where."""

    path: Path
    averaged: bool
    """Whether they are a moving average (EMA)."""
    both: bool
    """Whether the file has the average and the weights themselves, so that there was a choice."""
    skipped: tuple[str, ...]
    """The classifier's tensors, if the file has another number of classes: they keep their random values."""
    others: tuple[str, ...]
    """Entries of the table that do not belong to the network: a loss, metrics, a second network."""
    origin: str
    """Who wrote the file and when, in a few words."""

    def describe(self) -> str:
        """One line for people."""
        kind = "the average (EMA)" if self.averaged else "the weights"
        beside = (", not their average" if not self.averaged else ", not the raw weights") if self.both else ""
        parts = [f"weights from {self.path} ({self.origin}): {kind}{beside}"]
        if self.skipped:
            parts.append(f"new, because the number of classes differs: {', '.join(self.skipped)}")
        if self.others:
            parts.append(f"not the network's, left out: {some(list(self.others))}")
        return "; ".join(parts)


@dataclass(frozen=True)
class NetworkTable:
    """The network inside a table: its values are those whose names begin with the prefix."""

    table: Table
    prefix: str
    found: int
    """How many of the network's names it has."""

    @property
    def averaged(self) -> bool:
        return self.table.averaged or says_averaged(self.prefix)

    def values(self) -> dict[str, Any]:
        return {
            name.removeprefix(self.prefix): value
            for name, value in self.table.values.items()
            if isinstance(name, str) and name.startswith(self.prefix) and name not in _COUNTERS
        }

    def beside(self) -> list[str]:
        return [str(name) for name in self.table.values if not (isinstance(name, str) and name.startswith(self.prefix))]


def open_source(path: Path, say: Say = lambda _text: None) -> tuple[WeightsFile, dict[str, Any] | None]:
    """The weights of a file, or of a run folder's best checkpoint; and the whole state of a checkpoint of ours."""
    path = checkpoint_in(path, say)
    if not is_ours(path):
        return open_weights(path), None
    state = read_checkpoint(path)
    lacking = [part for part in ("model", "config", "progress") if part not in state]
    if lacking:
        raise UserError("checkpoint-incomplete", f"{path} holds no {', '.join(lacking)}", hint="another checkpoint")
    tables = [Table(state["model"], averaged=False)]
    if state.get("ema") is not None:
        # Over the raw ones: the average holds tensors that two layers share only once.
        tables.insert(0, Table({**state["model"], **state["ema"]["tensors"]}, averaged=True))
    file = WeightsFile(
        path=path, maker="a checkpoint of stoker", tables=tuple(tables),
        epoch=int(state["progress"]["epoch"]), step=int(state["progress"]["step"]), model=state["config"].get("model"),
        classes=tuple(state["classes"]) if state.get("classes") else None,
    )  # fmt: skip
    return file, state


def load_weights(model: nn.Module, source: WeightsFile | Path | str, which: Which | None = None) -> WeightsReport:
    """Loads all weights or none: the average if the file has one, unless `which` says otherwise.

    Only a classifier of another size is skipped, and reported. Tensors that do not belong to the network are left out.
    """
    file = source if isinstance(source, WeightsFile) else open_weights(Path(source))
    own = model.state_dict()
    chosen, both = choose_network(file, own, which)
    values = chosen.values()
    tops = {name.partition(".")[0] for name in own}
    # Extra names that share their first part with the network mean another architecture (layer4.2 for a network that
    # ends at layer4.1); any others belong to the program that trained it.
    apart = [name for name in values if name not in own and name.partition(".")[0] not in tops]
    found = {name: file.tensor(value) for name, value in values.items() if name in own}
    unexpected = [name for name in values if name not in own and name not in apart]
    skipped = _other_classifier(model, own, found)
    _check_fit(file.path, own, found, skipped, unexpected)
    taken = {name: value for name, value in found.items() if name not in skipped}
    model.load_state_dict(taken, strict=False)
    others = [*(f"{chosen.prefix}{name}" for name in apart), *_apart(chosen, own)]
    return WeightsReport(
        path=file.path, averaged=chosen.averaged, both=both, skipped=tuple(sorted(skipped)), others=tuple(others),
        origin=file.origin,
    )  # fmt: skip


def choose_network(file: WeightsFile, own: Mapping[str, Any], which: Which | None = None) -> tuple[NetworkTable, bool]:
    """The network's part of the file, and whether there is both an average and the weights themselves."""
    places = [place for table in file.tables for place in _places(table, own)]
    most = max(place.found for place in places)
    fitting = [place for place in places if place.found >= _ENOUGH * most]
    averaged = [place for place in fitting if place.averaged]
    raw = [place for place in fitting if not place.averaged]
    wanted = averaged if which == "ema" or (which is None and averaged) else raw
    if not wanted:
        missing, there = ("moving average (EMA)", "raw") if which == "ema" else ("raw weights", "ema")
        raise UserError(
            "weights-of-the-other-kind",
            f"{file.path} ({file.origin}) holds no {missing}",
            hint=f"--{there}, or leave out --{which}",
        )
    best = max(wanted, key=lambda place: place.found)  # ties go to the first: tables are in order of preference
    rivals = [place for place in wanted if place.found == best.found and place.table is best.table]
    # If only a few names agree by chance, the error about missing ones says more.
    if len(rivals) > 1 and best.found >= _ENOUGH * len(own):
        raise UserError(
            "weights-ambiguous",
            f"{file.path} holds this network {len(rivals)} times: {', '.join(place.prefix + '*' for place in rivals)}",
            why="they may be different networks, such as a student and its teacher",
            hint="save the tensors of one: safetensors.torch.save_file(state_dict, new)",
        )
    return best, bool(averaged and raw)


def _places(table: Table, own: Mapping[str, Any]) -> list[NetworkTable]:
    """The prefixes under which the network's names are found, and how many; if there are none, the prefix of all."""
    counts: Counter[str] = Counter()
    names = [name for name in table.values if isinstance(name, str) and name not in _COUNTERS]
    for name in names:
        start = 0
        while True:  # each place where a name of the network could begin
            if name[start:] in own:
                counts[name[:start]] += 1
            start = name.find(".", start) + 1
            if start == 0:
                break
    if not counts:
        return [NetworkTable(table, _common_prefix(names), 0)]
    return [NetworkTable(table, prefix, found) for prefix, found in counts.items()]


def _common_prefix(names: list[str]) -> str:
    prefix = ""
    while names:
        part = names[0][len(prefix) :].partition(".")[0]
        longer = f"{prefix}{part}."
        if not all(name.startswith(longer) for name in names):
            break
        prefix = longer
    return prefix


def _apart(chosen: NetworkTable, own: Mapping[str, Any]) -> list[str]:
    """Entries beside the network that hold tensors: not its average, nor counters."""
    copies = {place.prefix for place in _places(chosen.table, own) if place.found >= _ENOUGH * chosen.found}
    return [
        name
        for name in chosen.beside()
        if is_tensor(chosen.table.values.get(name))
        and not any(prefix and name.startswith(prefix) for prefix in copies)
        and name.rpartition(".")[2] not in _COUNTERS
    ]


def _other_classifier(model: nn.Module, own: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> set[str]:
    """The names of the classifier's tensors, if they have other shapes in the file."""
    heads = classifier_names(model)
    names = {name for name in own.keys() & found.keys() if name.startswith(heads)} if heads else set()
    # The first dimension is the number of classes; if others differ, it is another network.
    differ = {name for name in names if own[name].shape != found[name].shape}
    if any(own[name].shape[1:] != found[name].shape[1:] for name in differ):
        return set()
    return names if differ else set()


def classifier_names(model: nn.Module) -> tuple[str, ...]:
    config: dict[str, Any] = getattr(model, "pretrained_cfg", None) or {}
    named = config.get("classifier") or ()
    return tuple(f"{head}." for head in ((named,) if isinstance(named, str) else named))


def _check_fit(
    path: Path, own: Mapping[str, Tensor], found: Mapping[str, Tensor], skipped: set[str], unexpected: list[str]
) -> None:
    # A counter that batch norm has had since torch 0.4.1 and does not need here: torchvision's older files lack it.
    missing = [name for name in own if name not in found and not name.endswith(".num_batches_tracked")]
    shapes = [
        f"{name} {tuple(found[name].shape)} for {tuple(own[name].shape)}"
        for name in own
        if name in found and name not in skipped and own[name].shape != found[name].shape
    ]
    parts = [
        f"{len(names)} {what}: {some(names)}"
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
